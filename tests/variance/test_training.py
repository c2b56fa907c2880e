"""Training runs of the evidence: their CSVs, their order, and what the report makes of them. No run of verl here."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import training
import training_report as report
from training import Run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# In the place of run_tiny_cpu.sh: an arm that fails, one that never ends, and the others, which are done at once.
SCRIPT = """
step='{"step": %d, "data": {"critic/score/mean": 0.5, "response_length/mean": 2.5, "actor/grad_norm": 1.0}}'
case "$ADV_ESTIMATOR $*" in
    rloo*) echo "out of memory" > "$OUT_DIR/train.log"; exit 3 ;;
    grpo*) trap 'exit 130' TERM; sleep 600 & wait ;;
esac
test -f "$MODEL_PATH/config.json" -a -f "$TRAIN_FILE" -a -f "$VAL_FILE"
for i in $(seq "$STEPS"); do printf "$step\\n" "$i"; done > "$OUT_DIR/metrics.jsonl"
"""


def curve(path: Path, rewards: list[float], tokens_a_step: float, grad_norm: float = 1.0) -> None:
    metrics = [
        {"critic/score/mean": reward, "response_length/mean": tokens_a_step, "actor/grad_norm": grad_norm}
        for reward in rewards
    ]
    training.write(path, metrics, rows=1)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_csv_of_a_run(tmp_path):
    step = {"critic/score/mean": 0.25, "response_length/mean": 7.953125, "actor/grad_norm": 0.0112441}
    validated = {"val-aux/tiny/addition/reward/mean@1": 0.75, "val-core/tiny/addition/acc/mean@1": 0.5}
    training.write(tmp_path / "a.csv", [step | {"otb/gradient_power": 2e-5}, step | validated], rows=64)
    first, second = rows(tmp_path / "a.csv")
    assert first == {
        "step": "1", "reward": "0.25", "validation": "", "tokens": "509", "grad_norm": "0.0112441",
        "gradient_power": "2e-05",
    }  # fmt: skip
    assert (second["tokens"], second["validation"], second["gradient_power"]) == ("1018", "0.75", "")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_a_run_that_breaks_off_leaves_no_csv(tmp_path):
    with pytest.raises(KeyError):
        training.write(tmp_path / "a.csv", [{"critic/score/mean": 0.25}], rows=64)
    assert not (tmp_path / "a.csv").exists()


def test_plan_has_every_arm_and_seed_once_with_the_telling_ones_first():
    plan = training.plan()
    assert [run.name for run in plan[:3]] == ["otb-n4-seed0", "grpo-n4-seed0", "rloo-n4-seed0"]
    assert len(plan) == len(set(plan)) == 30
    others = [(arm, n) for arm in ("grpo", "grpo-std", "rloo") for n in (4, 8, 16)]
    for seed in range(3):
        assert sorted((run.arm, run.n) for run in plan if run.seed == seed) == sorted([*others, ("otb", 4)])


def test_all_arms_differ_in_estimator_and_n_only():
    settings = {run.arm: set(training.overrides(run)) for run in training.plan() if (run.n, run.seed) == (4, 1)}
    common = set.intersection(*settings.values())
    assert {"data.seed=1", "actor_rollout_ref.rollout.seed=1", "data.train_batch_size=8"} <= common
    rest = {arm: found - common for arm, found in settings.items()}
    assert rest == {
        "otb": set(),
        "rloo": set(),
        "grpo": {"algorithm.norm_adv_by_std_in_grpo=False"},
        "grpo-std": {"algorithm.norm_adv_by_std_in_grpo=True"},
    }


def test_a_failed_run_is_followed_by_the_next_and_a_kill_leaves_nothing_half(tmp_path):
    script, results, scratch = tmp_path / "script.sh", tmp_path / "results", tmp_path / "scratch"
    script.write_text(SCRIPT)
    scratch.mkdir()
    start = f"import demo_run, training; from pathlib import Path; demo_run.SCRIPT = Path({str(script)!r});"
    start += f"training.LOGS = Path({str(tmp_path / 'logs')!r}); training.main()"
    names = ["rloo-n4-seed2", "otb-n4-seed2", "grpo-n8-seed2"]
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {[str(BENCHMARKS), str(BENCHMARKS / 'variance')]!r}; {start}",
    ]
    command += ["--only", *names, "--steps", "12", "--results", str(results)]
    said = tmp_path / "said"
    with open(said, "w") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "TMPDIR": str(scratch)})
        deadline = time.monotonic() + 120
        while "grpo-n8-seed2: started" not in said.read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM, said.read_text()
    assert [path.name for path in results.iterdir()] == ["otb-n4-seed2.csv"]
    assert rows(results / "otb-n4-seed2.csv")[-1]["tokens"] == str(12 * 80)
    assert (tmp_path / "logs" / "rloo-n4-seed2.log").read_text() == "out of memory\n"
    assert not list(scratch.glob("*seed*"))
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == ["rloo-n4-seed2", "grpo-n8-seed2"]


def test_report_counts_steps_and_tokens_to_a_reward(tmp_path):
    # Ten-step means: 0.3 at step 13, 1.0 from step 20 on.
    curve(tmp_path / "otb-n4-seed0.csv", [0.0] * 10 + [1.0] * 20, 4)
    curve(tmp_path / "otb-n4-seed1.csv", [0.0] * 30, 4)
    (line,) = report.summary(report.read(tmp_path), reward=0.3)
    assert (line["arm"], line["n"], line["seeds"], line["reached"]) == ("otb", 4, 2, 1)
    assert (line["steps_to"], line["tokens_to"], line["tokens"]) == (13, 52, 120)
    assert (line["final_reward"], line["final_reward_min"], line["final_reward_max"]) == (0.5, 0, 1)


@pytest.mark.parametrize(("late", "reached", "share"), [(10, 20, 80 / 320), (15, 25, 100 / 320), (25, "", "")])
def test_report_says_whether_n4_reached_what_n16_did(tmp_path, late, reached, share):
    curve(tmp_path / "otb-n4-seed0.csv", [0.0] * late + [0.5] * (30 - late), 4)
    curve(tmp_path / "grpo-n16-seed0.csv", [0.0] * 10 + [0.5] * 20, 16)
    curve(tmp_path / "grpo-n8-seed0.csv", [0.0] * 30, 8)
    curve(tmp_path / "grpo-n16-seed1.csv", [0.0] * 30, 16)
    (row,) = report.small_against_large(report.read(tmp_path))
    assert (row["small"], row["large"], row["seed"]) == ("otb", "grpo-n16", 0)
    assert (row["reached_step"], row["tokens_share"], row["all_tokens_share"]) == (reached, share, 0.25)
    assert row["at_equal_tokens"] == 0.0  # 120 of its tokens are seven steps
    (pair,) = report.pairs([row])
    assert (pair["seeds"], pair["reached"], pair["ended_level"]) == (1, bool(reached), bool(reached))
    assert (pair["tokens_share"], pair["all_tokens_share"], pair["at_equal_tokens"]) == (share, 0.25, 0.0)


def test_pairs_are_the_means_over_seeds():
    row = {"small": "otb", "large": "grpo-n16", "large_final": 0.5, "all_tokens_share": 0.25, "at_equal_tokens": ""}
    never = row | {"small_final": 0.1, "reached_step": "", "tokens_share": ""}
    once = row | {"small_final": 0.4, "reached_step": 70, "tokens_share": 0.3, "at_equal_tokens": 0.2}
    level = row | {"small_final": 0.5, "reached_step": 90, "tokens_share": 0.5}
    (pair,) = report.pairs([never, once, level])
    assert (pair["seeds"], pair["reached"], pair["ended_level"]) == (3, 2, 1)
    assert (pair["tokens_share"], pair["tokens_share_min"], pair["tokens_share_max"]) == pytest.approx((0.4, 0.3, 0.5))
    assert (pair["small_final"], pair["at_equal_tokens"]) == pytest.approx((1 / 3, 0.2 / 3))


def test_report_compares_at_equal_tokens(tmp_path):
    curve(tmp_path / "otb-n4-seed0.csv", [0.0] * 30, 4)
    curve(tmp_path / "grpo-n16-seed0.csv", [step / 8 for step in range(30)], 15)
    (row,) = report.small_against_large(report.read(tmp_path))
    assert row["at_equal_tokens"] == pytest.approx(3.5 / 8)  # 120 tokens are eight of its steps


def test_report_refuses_runs_that_cannot_be_compared(tmp_path):
    curve(tmp_path / "otb-n4-seed0.csv", [0.0] * 30, 4)
    curve(tmp_path / "grpo-n4-seed0.csv", [0.0] * 20, 4)
    with pytest.raises(ValueError, match=r"different numbers of steps, \[20, 30\]"):
        report.read(tmp_path)


def test_report_of_an_incomplete_set_names_the_missing(tmp_path):
    curve(tmp_path / "otb-n4-seed0.csv", [0.01] * 20, 4)
    curve(tmp_path / "grpo-n16-seed0.csv", [0.01] * 20, 16)
    out = tmp_path / "out"
    command = [sys.executable, BENCHMARKS / "variance" / "training_report.py", "--runs", tmp_path, "--out", out]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert said.startswith("2 runs; missing: grpo-n4-seed0, rloo-n4-seed0,")
    assert len(said.split(",")) == 28
    assert Run("otb", 4, 0).name not in said
    assert {path.name for path in out.iterdir()} == {"training.csv", "training_n4.csv", "training.png"}
