"""A model that has diverged: the run ends before it is updated, and the checkpoint before stays good."""

import pytest
import torch
from otb_runs import DENSE_REWARD, checkpoints, probed
from real_worker import training_worker

pytestmark = pytest.mark.e2e


def test_nan_ends_the_run_before_the_update(run_verl, tiny_task, tmp_path):
    run = run_verl(
        DENSE_REWARD,
        *checkpoints(tmp_path),
        env=probed(tmp_path, "actor_faults") | {"OTB_FAULT": "nan@2"},
        expect_success=False,
    )
    assert run.returncode == 1
    assert [line["step"] for line in run.metrics] == [1]
    # A step's batch is written right before its update.
    assert [file.name for file in (tmp_path / "probe").glob("step_*")] == ["step_1_0.pt"]
    message = "InputError: step 2: old_log_probs: expected finite, ≤ 0.001, found nan at row 0, column 0, uid '"
    assert message in run.tail(20)
    assert "16 of 16 rows" in run.tail(20)

    folders = (tmp_path / "checkpoints").glob("global_step_*")
    assert [folder.name for folder in folders] == ["global_step_1"]
    worker = training_worker(tiny_task.model)
    initial = [parameter.detach().clone() for parameter in worker.engine.module.parameters()]
    worker.load_checkpoint(str(tmp_path / "checkpoints" / "global_step_1" / "actor"))
    loaded = list(worker.engine.module.parameters())
    assert all(parameter.isfinite().all() for parameter in loaded)
    assert not all(torch.equal(before, after) for before, after in zip(initial, loaded, strict=True))
