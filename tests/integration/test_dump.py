"""The dump of a run's steps, on verl's real V1 methods and on its deprecated trainer's advantage computation."""

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from definition import define
from joined_sessions import OUTPUTS, of_the_definition, put_sessions
from real_trainer import padded, put_batch, v1_trainer
from real_worker import jagged, tiny_config, training_worker
from tensordict import TensorDict
from verl_config import OTB, verl_config

from verl_otb import optimal_token_baseline
from verl_otb.core.method import Method
from verl_otb.integration import dump

OF_ROWS = ("returns", "baseline", "advantages", "token_energy", "realized_energy")


@pytest.fixture(scope="module")
def worker(tiny_task):
    return training_worker(tiny_task.model)


@pytest.fixture
def trainer(worker, tiny_task, tmp_path):
    """A trainer that dumps to tmp_path/dump."""

    def make(*overrides):
        config = tiny_config(tiny_task.model, f"+algorithm.otb.dump_dir={tmp_path}/dump", *overrides)
        return v1_trainer(config, worker)

    return make


def take_step(v1, batch, step):
    v1.global_steps = step
    v1._compute_advantage(v1._compute_old_log_prob(batch.meta, metrics={}), {})
    return batch.fields()


def flushed(directory):
    assert dump.flush(str(directory), 30)
    files = {int(path.stem.split("_")[1]): dict(np.load(path)) for path in directory.glob("*.npz")}
    assert {path.name for path in directory.iterdir()} == {f"step_{step}.npz" for step in files}  # no rest of a write
    return files


@pytest.mark.parametrize(
    ("estimator", "align"), [("optimal_token_baseline", "position"), ("tir_optimal_token_baseline", "token")]
)
def test_a_step_s_numbers(trainer, transfer_queue, tmp_path, estimator, align):
    v1, batch = trainer(f"algorithm.adv_estimator={estimator}"), put_batch(transfer_queue)
    mask = batch.fields("response_mask")["response_mask"]
    mask[2][3] = 0  # tool output
    batch.put(response_mask=mask)
    fields = take_step(v1, batch, 7)
    (step,) = flushed(tmp_path / "dump").values()
    # Two groups of three rows; the dump has the one whose scores differ most first: a has .5, 1, .5, b has 0, 0, 1.
    order = [0, 3, 5, 1, 2, 4]
    assert step["uid"].tolist() == [fields["uid"][row] for row in order] == ["b"] * 3 + ["a"] * 3
    assert step["group"].tolist() == [0, 0, 0, 1, 1, 1]
    assert (step["step"], step["lost"], step["align"]) == (7, 0, align)
    names = ("rm_scores", "response_mask", "old_log_probs", "sum_pi_squared")
    tensors = [padded(fields[name])[order] for name in names]
    assert step["score"].tolist() == tensors[0].sum(-1).tolist() == [0, 0, 1, 0.5, 1, 0.5]
    assert np.array_equal(step["response_mask"], tensors[1] != 0)
    assert np.array_equal(step["responses"], padded(fields["responses"])[order])
    of_core = optimal_token_baseline(*tensors, step["uid"], align=align)
    defined = define(*(tensor.double().tolist() for tensor in tensors), step["uid"], align=align)
    for name in OF_ROWS:
        assert np.array_equal(step[name], getattr(of_core, name)), name
        np.testing.assert_allclose(step[name], getattr(defined, name), atol=1e-6)
    # and those are what the run trains on
    np.testing.assert_allclose(step["advantages"], padded(fields["advantages"])[order], atol=1e-7)


OPTIONS = {"leave_one_out": True, "weight": "token", "finished_rows": "carry"}


def test_the_options_and_what_they_give(trainer, transfer_queue, tmp_path):
    v1 = trainer(*(f"+algorithm.otb.{name}={value}" for name, value in OPTIONS.items()))
    batch = put_batch(transfer_queue)
    fields = take_step(v1, batch, 1)
    (step,) = flushed(tmp_path / "dump").values()
    assert {name: step[name].item() for name in OPTIONS} == OPTIONS
    assert step["handle_zero_tail"].item() is True
    order = [0, 3, 5, 1, 2, 4]
    np.testing.assert_allclose(step["advantages"], padded(fields["advantages"])[order], atol=1e-7)
    stock = optimal_token_baseline(
        *(padded(fields[name])[order] for name in ("rm_scores", "response_mask", "old_log_probs", "sum_pi_squared")),
        step["uid"],
    )
    assert not np.allclose(step["baseline"], stock.baseline)


def test_sessions_of_several_outputs(trainer, transfer_queue, tmp_path):
    """A row of the dump is a session, its outputs joined."""
    batch = put_sessions(transfer_queue)
    fields = take_step(trainer(), batch, 1)
    (step,) = flushed(tmp_path / "dump").values()
    assert step["uid"].tolist() == ["a", "a", "b", "b"]
    advantages = of_the_definition([output for output, *_ in OUTPUTS], fields, "position")
    for row, outputs in enumerate([(3, 0, 6), (1,), (2,), (5, 7, 4)]):  # in the order of their index
        joined = [value for output in outputs for value in advantages[output]]
        np.testing.assert_allclose(step["advantages"][row, : len(joined)], joined, atol=1e-6)
        ids = torch.cat([fields["responses"][output] for output in outputs])
        assert step["responses"][row, : len(ids)].tolist() == ids.tolist()


def test_a_batch_without_token_ids(trainer, transfer_queue, tmp_path):
    """Rows that some other agent loop put there: the dump does without."""
    v1, batch = trainer(), put_batch(transfer_queue)
    v1._compute_old_log_prob(batch.meta, metrics={})
    fields = batch.fields()
    names = ("response_mask", "rm_scores", "old_log_probs", "sum_pi_squared")
    bare = TensorDict({name: jagged(fields[name]) for name in names}, batch_size=len(fields["uid"]))
    bare["uid"] = fields["uid"]
    keys = [f"bare-{key}" for key in batch.keys]
    meta = transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=bare, tags=[{} for _ in keys])
    v1.global_steps = 1
    v1._compute_advantage(meta, {})
    (step,) = flushed(tmp_path / "dump").values()
    assert "responses" not in step
    assert step["advantages"].any()


@pytest.mark.parametrize("module", ["verl.trainer.ppo.ray_trainer", "verl.experimental.separation.ray_trainer"])
def test_the_other_trainers(tmp_path, module):
    import importlib

    from verl import DataProto

    from verl_otb.integration.ray_trainer import step_of

    compute_advantage = importlib.import_module(module).compute_advantage
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "token_level_rewards": torch.rand(4, 6, generator=generator),
        "response_mask": torch.ones(4, 6),
        "old_log_probs": -2 - torch.rand(4, 6, generator=generator),
        "sum_pi_squared": torch.rand(4, 6, generator=generator),
        "responses": torch.arange(24).view(4, 6),
    }
    data = DataProto.from_dict(tensors, {"uid": np.array(list("xxyy"), dtype=object)})
    overrides = [*OTB, f"+algorithm.otb.dump_dir={tmp_path}/dump"]
    config = verl_config(*overrides, "actor_rollout_ref.model.path=none")
    self = SimpleNamespace(config=config, global_steps=3)
    step_of(lambda _: compute_advantage(data, "optimal_token_baseline", config=config.algorithm), self)
    step = flushed(tmp_path / "dump")[3]
    order = [tensors["responses"][:, 0].tolist().index(first) for first in step["responses"][:, 0]]
    assert sorted(order) == [0, 1, 2, 3]
    assert np.array_equal(step["advantages"], data.batch["advantages"][order])
    assert np.array_equal(step["responses"], tensors["responses"][order])


def test_nothing_is_written_unless_asked_for(worker, tiny_task, transfer_queue, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writers = dump._writer.cache_info().misses
    take_step(v1_trainer(tiny_config(tiny_task.model), worker), put_batch(transfer_queue), 1)
    assert dump._writer.cache_info().misses == writers
    assert list(tmp_path.iterdir()) == []


def estimate(directory, groups=6, rows=3, tokens=5, step=1):
    """One estimate of the registered estimator, `groups` groups of `rows` rows, the spread rising with the group."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    index = np.array([f"u{row % groups}" for row in range(groups * rows)], dtype=object)
    rewards = torch.zeros(groups * rows, tokens)
    rewards[:groups, -1] = torch.arange(1.0, groups + 1)
    with dump.telling(step=step):
        advantages, _ = get_adv_estimator_fn("optimal_token_baseline")(
            token_level_rewards=rewards,
            response_mask=torch.ones_like(rewards),
            old_log_probs=torch.full_like(rewards, -1.0),
            sum_pi_squared=torch.full_like(rewards, 0.5),
            index=index,
            config={"otb": {"dump_dir": str(directory)}},
        )
    assert advantages.shape == rewards.shape


def test_the_groups_that_differ_most_and_no_more(tmp_path):
    estimate(tmp_path, groups=9)
    step = flushed(tmp_path)[1]
    assert step["uid"].tolist() == [f"u{group}" for group in (8, 7, 6, 5) for _ in range(3)]


@pytest.mark.parametrize(
    ("tokens", "groups", "width"),
    [(45, 3, 5), (44, 2, 5), (15, 1, 5), (7, 1, 2), (1, 1, 1)],
)
def test_size(tmp_path, monkeypatch, tokens, groups, width):
    """Groups are whole, so it is their number that gives way, and then the tokens of the one that is left."""
    monkeypatch.setattr(dump, "MAX_TOKENS", tokens)
    estimate(tmp_path)
    step = flushed(tmp_path)[1]
    assert len(step["uid"]) == 3 * groups
    assert step["advantages"].shape == step["response_mask"].shape == (3 * groups, width)
    assert step["longest"] == 5


def test_a_file_is_as_small_as_it_says():
    """What the README says of the size: bytes a token before compression, and of a directory."""
    job = dump._Job(
        step=1,
        inputs={
            "token_level_rewards": torch.rand(8, 1000),
            "response_mask": torch.ones(8, 1000),
            "old_log_probs": -torch.rand(8, 1000) - 1,
            "sum_pi_squared": torch.rand(8, 1000),
            "rollout_is_weights": None,
        },
        responses=torch.ones(8, 1000, dtype=torch.int64),
        uids=["u"] * 8,
        groups=[0] * 8,
        method=Method(),
    )
    arrays = job.arrays()
    assert sum(arrays[name].nbytes for name in (*OF_ROWS, "response_mask", "responses")) == 25 * 8000
    assert 25 * dump.MAX_TOKENS * dump.MAX_FILES < 2**30


def test_number_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "MAX_FILES", 6)
    for step in range(1, 31):
        estimate(tmp_path, step=step)
        steps = list(flushed(tmp_path))
        assert len(steps) <= 6
        assert {1, max(1, step - 1), step} <= set(steps)
    assert sorted(steps)[-3:] == [28, 29, 30]  # close together; what is long ago lies thin
    estimate(tmp_path, step=28)  # a resumed run comes by again
    assert sorted(flushed(tmp_path)) == sorted(steps)


def test_all_rows_masked(tmp_path, caplog):
    rows = {name: torch.zeros(2, 3) for name in ("token_level_rewards", "response_mask")}
    dump.record(str(tmp_path), rows, ["a", "a"], Method())
    assert flushed(tmp_path) == {}
    assert caplog.text == ""


def test_a_disk_that_fails(trainer, transfer_queue, tmp_path, caplog):
    """A file stands where the directory was: every write fails, one line says so, every step is made."""
    v1, directory = trainer(), tmp_path / "dump"
    directory.write_text("")
    for step in (1, 2, 3):
        fields = take_step(v1, put_batch(transfer_queue), step)
        assert padded(fields["advantages"]).any()
        assert dump.flush(str(directory), 30)
    assert caplog.text.count("and the training goes on") == 1
    assert "FileExistsError" in caplog.text or "NotADirectoryError" in caplog.text
    directory.unlink()
    take_step(v1, put_batch(transfer_queue), 4)
    files = flushed(directory)
    assert files.keys() == {4}
    assert files[4]["lost"] == 3


def test_what_cannot_be_recorded_does_not_reach_the_step(tmp_path, caplog):
    dump.record(str(tmp_path), {}, None, Method())
    assert "the training goes on: KeyError" in caplog.text


def test_a_disk_that_stands_still(tmp_path, caplog):
    """Opening the file blocks, as on a network disk that is gone. A fifo without a reader does that."""
    os.mkfifo(tmp_path / ".step_1.npz.part")
    start = time.monotonic()
    estimate(tmp_path, step=1)
    writer = dump._writer(str(tmp_path))
    while writer._queue.qsize():  # the thread has taken the first
        time.sleep(0.01)
    for step in range(2, 8):
        estimate(tmp_path, step=step)
    assert time.monotonic() - start < 5
    assert not dump.flush(str(tmp_path), 0.1)
    assert caplog.text.count("is slower than the training") == 1
    with open(tmp_path / ".step_1.npz.part", "rb") as fifo:
        fifo.read()
    assert dump.flush(str(tmp_path), 30)
    (tmp_path / "step_1.npz").unlink()  # the fifo, moved to its name
    files = flushed(tmp_path)
    assert files.keys() == {2, 3}
    assert files[3]["lost"] == writer.lost == 4
    estimate(tmp_path, step=8)
    assert flushed(tmp_path).keys() == {2, 3, 8}


def test_one_thread_a_directory(tmp_path):
    for step in (1, 2):
        estimate(tmp_path, step=step)
        flushed(tmp_path)
    assert dump._writer(str(tmp_path))._thread in threading.enumerate()
    assert dump._writer(str(tmp_path)) is dump._writer(str(tmp_path))


def test_a_step_without_a_number_is_counted(tmp_path):
    for _ in range(2):
        estimate(tmp_path, step=None)
        flushed(tmp_path)
    assert flushed(tmp_path).keys() == {1, 2}
