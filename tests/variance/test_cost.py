"""What the cost table makes of verl's timers. The runs themselves are the benchmark's."""

import cost
import demo_run
import pytest


def made(step: float, old_log_prob: float, adv: float) -> dict[str, float]:
    seconds = {"step": step, "gen": 1.0, "old_log_prob": old_log_prob, "adv": adv, "update_actor": 0.2}
    return {f"timing_s/{part}": value for part, value in (seconds | {"update_weights": 0.1}).items()}


def test_own_work_is_what_otb_adds_to_the_timers_it_is_in():
    otb = [[made(2.0, 0.5, 0.2), made(2.0, 0.5, 0.2)], [made(2.0, 0.5, 0.2), made(9.0, 0.7, 0.2)]]
    grpo = [[made(1.5, 0.4, 0.1)], [made(1.5, 0.4, 0.1)]]
    rows = {row["what"]: row for row in cost.rows({cost.OTB: otb, cost.GRPO: grpo})}
    assert list(rows) == [*cost.PARTS, "OTB's own"]
    assert (rows["step"]["otb_ms"], rows["step"]["grpo_ms"]) == (2000, 1500)
    assert rows["step"]["otb_runs_ms"] == "2000.0–5500.0"
    own = rows["OTB's own"]
    assert (own["otb_ms"], own["grpo_ms"], own["added_ms"]) == (700, 500, 200)
    assert own["added_share_of_step"] == pytest.approx(0.1)
    assert rows["gen"]["added_ms"] == 0


def test_runs_take_turns_and_lose_their_first_two_steps(tmp_path, monkeypatch):
    order = []

    def run(directory, estimator, steps, overrides):
        order.append(directory.name)
        return [{"step": step} for step in range(steps)]

    monkeypatch.setattr(demo_run, "run", run)
    found = demo_run.by_turns(("a", "b"), 2, 4, tmp_path)
    assert order == ["0-a", "0-b", "1-b", "1-a"]
    assert found == {name: [[{"step": 2}, {"step": 3}]] * 2 for name in "ab"}
