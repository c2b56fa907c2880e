"""What the pictures of a report are drawn from, and that they show it."""

import numpy as np
import pytest
from definition import define
from made_run import put_dump, put_metrics
from matplotlib.figure import Figure

from verl_otb.errors import VerlOtbError
from verl_otb.report.data import Metrics, choose_group, find_dump, names_of, read_metrics
from verl_otb.report.pictures import of_group, of_runs


def test_which_group(tmp_path):
    """The one whose scores differ most, of the latest step that has such a one."""
    for step, spread in ((1, 1.0), (2, 1.0), (3, 0.5)):
        put_dump(tmp_path, step, spread)
    files = find_dump(tmp_path)
    group = choose_group(files)
    assert (group.step, group.number, group.uid) == (2, 1, "b")
    assert group.score.tolist() == [1.0, 0.5, 0.0]
    assert (choose_group(files, step=3).step, choose_group(files, step=3).uid) == (3, "b")
    for name in ("2", "a"):
        chosen = choose_group(files, 1, name)
        assert (chosen.step, chosen.number, chosen.uid) == (1, 2, "a")
    with pytest.raises(VerlOtbError, match="no step 9; it has 1, 2, 3"):
        choose_group(files, 9)
    with pytest.raises(VerlOtbError, match=r"step 1 of the dump has no group c; it has 1 \(uid b\), 2 \(uid a\)"):
        choose_group(files, 1, "c")


@pytest.mark.parametrize("align", ["position", "token"])
def test_the_pictures_show_the_definition_s_numbers(tmp_path, align):
    tensors, index = put_dump(tmp_path, align=align)
    names = ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared")
    defined = define(*(tensors[name].double().tolist() for name in names), index, align=align)
    rows = [4, 5, 3]  # of the batch: group b by falling score
    live = tensors["response_mask"][rows].bool().numpy()
    axes = []
    for picture in of_group(choose_group(find_dump(tmp_path))):
        figure = Figure()
        picture.draw(figure)
        axes.append(figure.axes[0])
    image = axes[0].images[0]
    shown = image.get_array()
    assert np.array_equal(~np.ma.getmaskarray(shown), live)
    advantages = np.array(defined.advantages)[rows]
    np.testing.assert_allclose(shown.data[live], advantages[live], atol=1e-6)
    assert image.norm.vcenter == 0
    assert -image.norm.vmin == image.norm.vmax == pytest.approx(np.abs(advantages).max(), abs=1e-6)
    assert (
        image.cmap(image.norm(image.norm.vmax))[2] > image.cmap(image.norm(image.norm.vmax))[0]
    )  # blue is more likely
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["score 1", "score 0.5", "score 0"]

    def in_columns(matrix):
        values = np.array(matrix)[rows]
        if align == "position":
            return [dict(zip(np.flatnonzero(m) + 1, v[m], strict=True)) for v, m in zip(values, live, strict=True)]
        return [dict(enumerate(v[m], 1)) for v, m in zip(values, live, strict=True)]

    def drawn(line):
        values = np.ma.masked_invalid(line.get_ydata())
        return {int(x): y for x, y in zip(line.get_xdata(), values, strict=True) if y is not np.ma.masked}

    for axis, matrix in ((axes[1], defined.returns), (axes[2], defined.realized_energy)):
        long = [line for line in axis.lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 1]
        for line, wanted in zip(long[:3], in_columns(matrix), strict=True):
            assert drawn(line) == pytest.approx(wanted, abs=1e-6)
    lines = {line.get_label(): line for line in axes[1].lines}
    of_columns = {column: b for row in in_columns(defined.baseline) for column, b in row.items()}
    assert drawn(lines["B, OTB's baseline"]) == pytest.approx(of_columns, abs=1e-6)
    assert set(lines["group mean"].get_ydata()) == {0.5}


def test_the_pictures_over_steps(tmp_path):
    runs = [
        read_metrics(put_metrics(tmp_path / "a", steps=10) / "metrics.jsonl", "a"),
        read_metrics(put_metrics(tmp_path / "b", steps=5, otb=False) / "metrics.jsonl", "b"),
    ]
    shown = []
    for picture in of_runs(runs):
        figure = Figure()
        picture.draw(figure)
        shown.append({line.get_label(): line for line in figure.axes[0].lines})
    reward, power, ratio = shown
    assert np.array_equal(reward["a"].get_ydata(), np.arange(1, 11) / 10)
    assert reward["b"].get_xdata().tolist() == [1, 2, 3, 4, 5]
    assert set(power) == {"a", "a, group mean"}
    assert np.allclose(power["a, group mean"].get_ydata(), 2 * power["a"].get_ydata())
    assert np.isnan(ratio["a"].get_ydata()[0])
    assert set(ratio["a"].get_ydata()[1:]) == {0.9}
    assert set(ratio["a, own reward in both"].get_ydata()[1:]) == {0.5}


def test_a_long_run_is_smoothed(tmp_path):
    run = read_metrics(put_metrics(tmp_path, steps=40) / "metrics.jsonl", "a")
    figure = Figure()
    of_runs([run])[0].draw(figure)
    faint, bold = figure.axes[0].lines
    assert np.allclose(faint.get_ydata(), np.arange(1, 41) / 40)
    assert bold.get_ydata()[-1] == pytest.approx(np.mean([37, 38, 39, 40]) / 40)
    assert bold.get_ydata()[0] == pytest.approx(1 / 40)


def test_series():
    run = Metrics("a", [(1, {"x": 1}), (2, {}), (3, {"x": None, "y": 2}), (4, {"x": float("inf")})])
    steps, values = run.series("x")
    assert steps.tolist() == [1, 3, 4]
    assert values[0] == 1
    assert np.isnan(values[1:]).all()
    assert run.series("z", "y")[1].tolist() == [2]
    assert len(run.series("z")[0]) == 0


def test_names(tmp_path):
    assert names_of([tmp_path / "a", tmp_path / "b" / "metrics.jsonl"]) == ["a", "b"]
    assert names_of([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]
    assert len(set(names_of([tmp_path, tmp_path]))) == 2
