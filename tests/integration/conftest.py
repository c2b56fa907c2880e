"""A real TransferQueue on a local Ray, for the tests that call verl's trainer methods in this process."""

import shutil
import tempfile

import pytest
from omegaconf import OmegaConf
from verl_config import verl_config


@pytest.fixture(scope="session")
def transfer_queue():
    import ray
    import transfer_queue as tq

    directory = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets lie there
    ray.init(
        num_cpus=4, include_dashboard=False, _temp_dir=directory, object_store_memory=100_000_000, log_to_driver=False
    )
    config = verl_config("transfer_queue.backend.SimpleStorage.num_data_storage_units=1").transfer_queue
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    config.enable = True
    tq.init(config)
    yield tq
    tq.close()
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
