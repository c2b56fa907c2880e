"""The README's figures of the evidence, and tables of docs/evidence.md, are those of the committed CSVs."""

import csv
import re
from pathlib import Path
from statistics import fmean

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


def over_trainings(row: dict[str, str], name: str) -> str:
    """As the tables of part 4 and the README have it: the mean, and the least and the most."""
    mean, *ends = (f"{float(row[column]):.2f}" for column in (name, f"{name}_min", f"{name}_max"))
    return mean if ends[0] == ends[1] else f"{mean} ({ends[0]} to {ends[1]})"


def test_a_real_model():
    def of(point: str, estimator: str, name: str) -> str:
        (found,) = rows("gradient", point=point, n="4", estimator=estimator)
        assert found["seeds"] == "5"
        return over_trainings(found, name)

    (text,) = [line for line in README.splitlines() if line.startswith("- **The demo's model")]
    assert f"half-way OTB's noise is {of('step 60', 'otb', 'noise_ratio')}." in text
    end = of("step 120", "otb", "shrink"), of("step 120", "otb", "noise_ratio")
    assert f"keeps {end[0]} of the gradient and its noise is {end[1]};" in text
    assert f"the noise is {of('step 120', 'carry_loo', 'noise_ratio')}." in text
    assert len(numbers(text)) == 12


def test_cost():
    of = {row["what"]: row for row in rows("cost")}
    adv, step = of["adv"], of["step"]
    added = (
        f"adds {float(adv['added_ms']):.1f} of {float(step['otb_ms']):,.0f} ms, {float(adv['added_share_of_step']):.1%}"
    )
    assert added in line("A whole step").replace(" %", "%")
    ((_, shown),) = tables("6. Cost")
    assert [cells[0] for cells in shown] == ["step", "gen", "old_log_prob", "adv", "update_actor", "update_weights"]
    for name, *cells in shown:
        row = of[name]
        times = [f"{row[f'{estimator}_ms']} ({row[f'{estimator}_runs_ms']})" for estimator in ("otb", "grpo")]
        assert cells == [*times, row["added_ms"], row["added_share_of_step"]]
    assert {float(of[name]["added_ms"]) for name in ("gen", "update_actor", "old_log_prob")} == set(
        map(float, re.search(r"differ by ([\d.]+) and ([\d.]+) ms.* the ([\d.]+) of Σπ²", PAGE).groups())
    )


def tables(heading: str) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table under a heading."""
    text = PAGE.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append((header, body))
    return found


def trained() -> tuple[list[dict], list[dict], list[str]]:
    curves = training_report.read(RESULTS / "training")
    against = training_report.small_against_large(curves)
    return training_report.summary(curves, 0.3), against, [run.name for run in plan() if run not in curves]


def test_training_on_the_page():
    """`make evidence-training` brings it up to date."""
    lines, against, missing = trained()
    made = training_page.block(lines, training_report.pairs(against), training_report.NAMES, missing)
    assert made.join(training_page.MARKS) in PAGE


def test_training():
    lines, against, missing = trained()
    assert not missing
    found = {(line["arm"], line["n"]): line for line in lines}
    reward = {name: f"{line['final_reward']:.3f}" for name, line in found.items()}
    text = line("Training the demo")
    std = f"divided by the standard deviation {reward['grpo-std', 4]}"
    assert f"at N = 4 OTB {reward['otb', 4]}, RLOO {reward['rloo', 4]}, GRPO {reward['grpo', 4]}, {std};" in text
    assert f"GRPO at N = 8 {reward['grpo', 8]}, at 16 {reward['grpo', 16]}." in text
    rows = [row for row in against if (row["small"], row["large"]) == ("otb", "grpo-n16")]
    assert [row["small_final"] < row["large_final"] for row in rows] == [True] * 3
    share = f"{found['otb', 4]['tokens'] / found['grpo', 16]['tokens']:.2f}"
    assert f"below it in all three seeds, with {share} of the tokens." in text
    shares = [f"{row['tokens_share']:.2f}" for row in rows if row["reached_step"]]
    assert (
        f"In two of them it came to GRPO's final reward at N = 16 at some time, with {' and '.join(shares)} of" in text
    )
    level = f"{fmean(row['at_equal_tokens'] for row in rows):.3f}"
    assert f"GRPO at N = 16 stood at {level}:" in text
    assert len(numbers(text)) == 10
    # The same on the page, with more.
    otb, rloo = found["otb", 4], found["rloo", 4]
    assert f"({reward['otb', 4]} against {reward['grpo', 16]} in the mean), after {share} of its tokens" in PAGE
    assert f"(OTB {reward['otb', 4]}, GRPO's N = 16 {level})" in PAGE
    steps = [f"after {arm['steps_to_min']} and {arm['steps_to_max']}" for arm in (otb, rloo)]
    assert f"OTB {steps[0]} steps, RLOO {steps[1]};" in PAGE
    assert [found[arm, 4]["reached"] for arm in ("otb", "rloo", "grpo", "grpo-std")] == [2, 2, 1, 0]
    assert f"({rloo['final_reward_min']:.3f}, {otb['final_reward_min']:.3f})" in PAGE
    assert {arm: found[arm, 8]["reached"] for arm in ("grpo", "rloo", "grpo-std")} == {
        "grpo": 3,
        "rloo": 3,
        "grpo-std": 2,
    }
    assert all(found[arm, 16]["reached"] == 3 for arm in ("grpo", "rloo", "grpo-std"))


def test_the_table_of_exact_variances():
    columns = ("path", "scalar", "live", "otb", "carry", "token", "optimum")
    duels = ("otb>mean", "otb>scalar", "otb>carry", "carry>scalar", "token>mean")
    ((_, shown),) = tables("1. Exact")
    assert len(shown) == 14
    for answers, reward, policy, *cells in shown:
        length = {"one length": "fixed", "end token": "ends"}[answers]
        (row,) = rows("exact", sharpness="1", length=length, reward=reward, policy=policy)
        assert cells == [*(f"{float(row[name]):.3f}" for name in columns), *(row[name] for name in duels)]


# What the page calls the estimators of finite_groups.csv and gradient.csv.
NAMES = {
    "no baseline": "none",
    "group mean": "mean",
    "RLOO": "rloo",
    "OPO": "opo",
    "`weight=uniform`": "live",
    "OTB, default": "otb",
    "`handle_zero_tail=false`": "otb_no_zero_tail",
    "`leave_one_out=true`": "otb_loo",
    "`weight=token`": "token",
    "`weight=token`, `handle_zero_tail=false`": "token_no_zero_tail",
    "`weight=token`, `leave_one_out=true`": "token_loo",
    "`finished_rows=carry`": "carry",
    "`finished_rows=carry`, `leave_one_out=true`": "carry_loo",
    "OTB, true norms": "otb_true_norms",
    "`weight=token`, true norms": "token_true_norms",
}


def test_the_tables_of_finite_groups():
    first, second = tables("2. Groups")
    assert (len(first[1]), len(second[1])) == (11, 11)
    for sharpness, (header, body) in (("1", first), ("2", second)):
        for name, *cells in body:
            for column, cell in zip(header[1:], cells, strict=True):
                size, figure = (column[4:], "noise") if column.startswith("N = ") else ("4", "shrink")
                assert column in (f"N = {size}", "shrink at 4")
                about = {"sharpness": sharpness, "length": "ends", "N": size.replace("∞", "inf")}
                found = {row["reward"]: row for row in rows("finite_groups", estimator=NAMES[name], **about)}
                figures = [f"{float(found[reward][figure]):.2f}" for reward in ("binary", "likely", "length")]
                assert cell == " / ".join(figures), (sharpness, name, column)


def test_the_table_of_the_options():
    ((header, body),) = tables("3. The options")
    assert len(body) == 7
    rivals = {"default": "otb", "RLOO": "rloo"}
    for name, *cells in body:
        for column, cell in zip(header[1:], cells, strict=True):
            n, rival = re.fullmatch(r"N = (\d+), over (\w+)", column).groups()
            found = {
                estimator: [
                    float(row["noise"]) for row in rows("finite_groups", length="ends", N=n, estimator=estimator)
                ]
                for estimator in (NAMES[name], rivals[rival])
            }
            assert len(found[NAMES[name]]) == 6
            ratios = [ours / theirs for ours, theirs in zip(*found.values(), strict=True)]
            assert cell == f"{min(ratios):.2f} to {max(ratios):.2f}", (name, column)


def test_the_tables_of_a_real_model_s_gradient():
    columns = {"Var": "var_ratio", "shrink": "shrink", "noise": "noise_ratio"}
    first, second = tables("4. A real")
    for header, body in (first, second):
        assert len(body) == 13
        for name, *cells in body:
            for column, cell in zip(header[1:], cells, strict=True):
                (point,) = re.findall(r"step \d+", column)
                size = re.search(r"N = (\d+)", column)
                figure = "noise" if size else column.split(",")[0]
                (row,) = rows("gradient", point=point, n=size[1] if size else "4", estimator=NAMES[name])
                assert cell == over_trainings(row, columns[figure]), (name, column)


def test_what_is_said_of_the_trainings_one_by_one():
    def noise(point: str, n: str, estimator: str) -> list[float]:
        found = rows("gradient_seeds", point=point, n=n, estimator=estimator)
        assert len(found) == 5
        return [float(row["noise_ratio"]) for row in found]

    options = ("otb", "otb_no_zero_tail", "otb_loo", "carry", "carry_loo", "token", "token_loo")
    assert all(max(noise("step 60", n, name)) < 1 for name in options for n in ("4", "8", "16"))
    assert all(min(noise("step 120", n, "otb")) > 1 for n in ("4", "8"))
    assert all(
        min(noise("step 120", n, "carry_loo")) < 1 < max(noise("step 120", n, "carry_loo")) for n in ("4", "8", "16")
    )


def test_correlations_of_the_proxy():
    text = re.sub(r"\s+", " ", PAGE.split("**The proxy.**", 1)[1])
    for point, what, column in [
        ("step 0", "path", "2"), ("step 60", "path", "1"), ("step 60", "path", "2"), ("step 60", "path", "8"),
        ("step 120", "path", "1"), ("step 120", "path", "2"), ("step 60", "token", "2"),
    ]:  # fmt: skip
        (row,) = rows("gradient_proxy", point=point, what=what, column=column)
        assert f"{over_trainings(row, 'mean')} at t = {column}" in text
    together = [
        rows("gradient_proxy", point=f"step {step}", what="path", column="all")[0]["mean"] for step in (0, 60, 120)
    ]
    assert "{:.2f}, {:.2f} and {:.2f} at the three points".format(*map(float, together)) in text
