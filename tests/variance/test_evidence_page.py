"""The README's figures of the evidence, and tables of docs/evidence.md, are those of the committed CSVs."""

import csv
import re
from pathlib import Path
from statistics import fmean

import pytest
import training_page
import training_report
from training import plan

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "variance" / "results"
README = (ROOT / "README.md").read_text().split("## What the evidence says", 1)[1].split("\n## ", 1)[0]
PAGE = (ROOT / "docs" / "evidence.md").read_text()


def rows(name: str, **wanted: str) -> list[dict[str, str]]:
    with open(RESULTS / f"{name}.csv", newline="") as file:
        found = [row for row in csv.DictReader(file) if wanted.items() <= row.items()]
    assert found, (name, wanted)
    return found


def span(values: list[str]) -> str:
    numbers = [float(value) for value in values]
    return f"{min(numbers):.2f} to {max(numbers):.2f}"


def line(start: str) -> str:
    (found,) = [text for text in README.splitlines() if text.startswith(f"- **{start}")]
    return re.sub(r"\(.*?\)", "", found)


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+\.\d+", text)


def test_exact():
    ends = rows("exact", sharpness="1", length="ends")
    fixed = rows("exact", sharpness="1", length="fixed")
    apart = [row["otb"] for row in ends if row["reward"] != "length"]
    expected = [span(apart), span([row["otb"] for row in ends if row["reward"] == "length"])]
    expected.append(span([row["otb"] for row in fixed]))
    text = line("Exactly")
    for part in expected:
        assert part in text
    assert len(numbers(text)) == 6
    losses = [int(row["otb>mean"]) for row in (*ends, *fixed)]
    assert f"it loses in {min(losses)} to {max(losses)}" in text


def test_groups():
    def noise(estimator: str, n: int) -> str:
        found = rows("finite_groups", sharpness="1", length="ends", N=str(n), estimator=estimator)
        assert [row["reward"] for row in found] == ["binary", "likely", "length"]
        return " / ".join(f"{float(row['noise']):.2f}" for row in found)

    text = line("In groups")
    assert f"at N = 4 is {noise('otb', 4)} with OTB, {noise('otb_no_zero_tail', 4)} without its zero tail" in text
    assert f"{noise('mean', 4)} with the group mean; at N = 16 {noise('otb', 16)} with OTB" in text
    assert f"{noise('mean', 16)} with the mean" in text
    assert len(numbers(text)) == 15


def test_a_real_model():
    def of(point: str, estimator: str) -> dict[str, str]:
        (found,) = rows("gradient", point=point, n="4", estimator=estimator)
        return found

    middle, end, without = of("step 60", "otb"), of("step 120", "otb"), of("step 120", "otb_loo")
    text = line("The demo's model")
    expected = (middle["noise_ratio"], end["shrink"], end["noise_ratio"], without["noise_ratio"])
    assert numbers(text) == [f"{float(value):.2f}" for value in expected]
    assert float(without["shrink"]) == pytest.approx(1, abs=2 * float(without["shrink_se"]))


def test_cost():
    of = {row["what"]: row for row in rows("cost")}
    own, step = of["OTB's own"], of["step"]
    text = line("A whole step")
    assert f"is {own['added_ms']} of {float(step['otb_ms']):,.0f} ms, {float(own['added_share_of_step']):.1%}" in (
        text.replace(" %", "%")
    )
    assert f"metrics {float(of['adv']['added_ms']):.1f}, Σπ² {of['old_log_prob']['added_ms']}" in README
    shown = table("6. Cost", "")
    assert [cells[0] for cells in shown] == ["step", "old_log_prob", "adv", "OTB's own"]
    for name, *cells in shown:
        row = of[name]
        assert cells == [row[key] for key in ("otb_ms", "grpo_ms", "added_ms", "added_share_of_step")]


def trained() -> tuple[list[dict], list[dict], list[str]]:
    curves = training_report.read(RESULTS / "training")
    against = training_report.small_against_large(curves)
    return training_report.summary(curves, 0.3), against, [run.name for run in plan() if run not in curves]


def test_training_on_the_page():
    """`make evidence-training` brings it up to date."""
    lines, against, missing = trained()
    made = training_page.block(lines, training_report.NAMES, training_report.statements(against), missing)
    assert made.join(training_page.MARKS) in PAGE


def test_training():
    lines, against, missing = trained()
    found = {(line["arm"], line["n"]): line for line in lines}
    reward = {name: f"{line['final_reward']:.3f}" for name, line in found.items()}
    text = line("Training the demo")
    assert f"{30 - len(missing)} of 30 runs" in README
    assert f"OTB at N = 4 {reward['otb', 4]}" in text
    assert f"RLOO at N = 4 {reward['rloo', 4]}" in text
    assert f"GRPO at N = 4 {reward['grpo', 4]}, at 8 {reward['grpo', 8]}, at 16 {reward['grpo', 16]}" in text
    share = found["otb", 4]["tokens"] / found["grpo", 16]["tokens"]
    assert f"{share:.2f} of the tokens" in text
    of_grpo = [row for row in against if (row["small"], row["large"]) == ("otb", "grpo-n16")]
    assert f"GRPO at N = 16 stood at {fmean(row['at_equal_tokens'] for row in of_grpo):.3f}." in text
    assert len(numbers(text)) == 7


def table(heading: str, first: str) -> list[list[str]]:
    """The rows of the first table under a heading whose first column is called so."""
    text = PAGE.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    text = text[text.index(f"\n| {first} |".replace("|  |", "| |")) + 1 :].split("\n\n", 1)[0]
    return [[cell.strip() for cell in text_line.strip("|").split("|")] for text_line in text.splitlines()[2:]]


def test_the_table_of_exact_variances():
    columns = ("path", "scalar", "live", "otb", "carry", "token", "optimum")
    duels = ("otb>mean", "otb>scalar", "otb>carry", "carry>scalar", "token>mean")
    shown = table("1. Exact", "answers")
    assert len(shown) == 14
    for answers, reward, policy, *cells in shown:
        length = {"one length": "fixed", "end token": "ends"}[answers]
        (row,) = rows("exact", sharpness="1", length=length, reward=reward, policy=policy)
        assert cells == [*(f"{float(row[name]):.3f}" for name in columns), *(row[name] for name in duels)]
