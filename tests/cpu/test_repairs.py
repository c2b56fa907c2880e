"""The repairs on real FSDP2 modules and models, each beside what stock verl does, so that we hear when it is mended."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig


@pytest.fixture
def process_group(monkeypatch, tmp_path):
    """One rank, through verl's own initialisation."""
    from verl.utils.distributed import initialize_global_process_group_ray

    if torch.distributed.is_initialized():
        yield
        return
    monkeypatch.setenv("DIST_INIT_METHOD", f"file://{tmp_path}/rendezvous")
    initialize_global_process_group_ray()
    yield
    torch.distributed.destroy_process_group()


def test_process_group_is_gloo(process_group):
    assert torch.distributed.get_backend() == "cpu:gloo"


def test_stock_process_group_names_the_cpu_twice(monkeypatch, tmp_path):
    from verl.utils.distributed import initialize_global_process_group_ray

    if torch.distributed.is_initialized():
        pytest.skip("another test of this process left a process group")
    monkeypatch.setenv("DIST_INIT_METHOD", f"file://{tmp_path}/rendezvous")
    with pytest.raises(ValueError, match="Duplicate device type cpu"):
        initialize_global_process_group_ray.__wrapped__()


def live_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in module.named_parameters()
    }


def test_saved_weights_are_copies(process_group):
    """What separate_async and fully_async do: save, train, restore."""
    from verl.utils import fsdp_utils

    module = fully_shard(torch.nn.Linear(3, 2))
    before = {name: weight.clone() for name, weight in live_weights(module).items()}
    saved, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(module)
    with torch.no_grad():
        for weight in live_weights(module).values():
            weight += 1
    fsdp_utils.fsdp2_sharded_load_from_cpu(module, saved, spec)
    for name, weight in live_weights(module).items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


def test_stock_saved_weights_are_the_live_ones(process_group):
    from verl.utils import fsdp_utils

    module = fully_shard(torch.nn.Linear(3, 2))
    saved, _ = fsdp_utils.fsdp2_sharded_save_to_cpu.__wrapped__(module)
    for name, weight in live_weights(module).items():
        assert saved[name][0].data_ptr() == weight.data_ptr()


def test_reference_is_offloaded_without_pinning():
    from verl.workers.engine.fsdp import transformer_impl

    assert transformer_impl.CPUOffloadPolicy(pin_memory=True).pin_memory is False


def test_critic_takes_the_configured_attention(tiny_task):
    from verl.utils.model import load_valuehead_model

    config = AutoConfig.from_pretrained(tiny_task.model, attn_implementation="eager", num_labels=1)
    critic = load_valuehead_model(str(tiny_task.model), torch.float32, config, False)
    assert critic.config._attn_implementation == "eager"
    assert critic(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)
