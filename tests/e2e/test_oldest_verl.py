"""verl 0.9.0, the oldest we support: the integration tests, and one whole run, on it.

`make env` unpacks its wheel, code and metadata, into a directory. Before everything else on the path, it is the verl
that every process of a run imports, and that says its version; all else is of the one environment.
"""

import os
import subprocess
import sys

import pytest
from otb_runs import ACTIVE, DENSE_REWARD, assert_trained_on_the_estimator_s, probe, probed
from verl_run import REPOSITORY
from wheels import OLDEST

pytestmark = pytest.mark.e2e

ON_PATH = os.pathsep.join(filter(None, [str(OLDEST), os.environ.get("PYTHONPATH")]))


def test_it_is_the_oldest():
    code = "import verl, importlib.metadata as m; print(verl.__version__, m.version('verl'))"
    environment = {**os.environ, "PYTHONPATH": ON_PATH}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0.9.0", "0.9.0"], done.stderr


# All of tests/integration but two: 10,000 batches, which meet nothing of verl but its registry, and other plugins
# beside ours, which are about our patching alone and take minutes.
LEFT_OUT = ("test_ten_thousand_batches.py", "test_other_plugins.py")


@pytest.mark.timeout(900)
def test_integration_tests():
    command = [sys.executable, "-m", "pytest", "tests/integration", "-q", "-p", "no:cacheprovider"]
    # Tests that ran in this process before may have left the address of their process group.
    of_a_group = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in of_a_group}
    done = subprocess.run(
        [*command, *(f"--ignore=tests/integration/{name}" for name in LEFT_OUT)],
        cwd=REPOSITORY,
        env={**environment, "PYTHONPATH": ON_PATH},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout
    assert str(OLDEST) in done.stdout  # in the paths of its warnings: it was this verl


def test_a_whole_run(run_verl, tmp_path):
    environment = probed(tmp_path, "version_probe")
    environment["PYTHONPATH"] = os.pathsep.join([str(OLDEST), environment["PYTHONPATH"]])
    run = run_verl(DENSE_REWARD, "trainer.total_training_steps=2", env=environment)
    found = [file.read_text() for file in (tmp_path / "probe").glob("verl_of_*")]
    assert set(found) == {"0.9.0"}
    assert len(found) > 5  # driver, trainer, actor, rollout and the rest
    assert run.log.count(ACTIVE) == 1
    assert len(run.metrics) == 2
    for line in run.metrics:
        assert line["otb/realized_energy/mean"] > 0
        assert line["training/rollout_probs_diff_max"] < 1e-6
        assert_trained_on_the_estimator_s(probe(tmp_path, line["step"]))
