"""The pictures of a report. The only module that knows matplotlib; it draws on figures, and opens no window."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl_otb.report.data import POWER, REWARD, Group, Metrics

_LINES = ("#1f5fa8", "#d9730d", "#2f8f4e", "#8a4fb0", "#b8342b", "#6b6b6b", "#c9a400", "#1fa0a8")
_GREY = "#c9c9c9"  # tokens that are not trained on
_SMOOTH_FROM = 20  # steps
_MANY_ROWS = 24
_WIDE_RANGE = 30  # largest over smallest value, from which the axis is logarithmic

_POWER_OF_MEAN, _RATIO = "otb/gradient_power_group_mean", "otb/gradient_power_vs_group_mean"
_HELD_OUT = "otb/held_out_power_vs_group_mean"


@dataclass(frozen=True)
class Picture:
    """A picture: what it shows in one sentence, and how it is drawn on a figure or a part of one."""

    title: str
    caption: str
    draw: Callable[[Any], None]
    height: float = 3.2  # inches
    width: float = 7.5


def of_runs(runs: list[Metrics]) -> list[Picture]:
    """Over steps: those that at least one of the runs has the metrics for."""
    window = max((len(run.series(*REWARD)[0]) for run in runs), default=0) // 10
    smoothed = f" Bold: mean of the last {window} steps." if window * 10 >= _SMOOTH_FROM else ""
    pictures = [
        (
            REWARD,
            "Reward",
            f"Mean score of the step's responses; higher is better.{smoothed}",
            lambda figure: _draw_steps(figure, runs, REWARD, "mean score", window),
        ),
        (
            (POWER,),
            "Gradient power",
            "ρ²A²w, mean over trained tokens: how hard a token pushes the logits, squared; less is less noise. "
            "Dashed: on the same batch with the group's mean reward for a baseline.",
            lambda figure: _draw_steps(
                figure, runs, (POWER,), "gradient power (reward²)", window, (_POWER_OF_MEAN, "group mean")
            ),
        ),
        (
            (_HELD_OUT,),
            "Held-out power, OTB ÷ group mean",
            "OTB's power divided by the group mean's, both baselines without the response's own reward: below 1 OTB's "
            "is the better one. Dashed: with it, as in the picture before, which flatters OTB.",
            lambda figure: _draw_steps(
                figure, runs, (_HELD_OUT,), "OTB ÷ group mean", window, (_RATIO, "own reward in both"), level=1.0
            ),
        ),
    ]
    return [
        Picture(title, caption, draw)
        for keys, title, caption, draw in pictures
        if any(np.isfinite(run.series(*keys)[1]).any() for run in runs)
    ]


def of_group(group: Group) -> list[Picture]:
    rows = len(group.score)
    place = "position" if group.method.align == "position" else "k-th generated token"
    of_each = " (the mean of the responses' own: leave_one_out)" if group.method.leave_one_out else ""
    weight = group.method.weight
    weighs = "The weight of a response in the baseline" if weight == "realized" else f"Not the weight here ({weight})"
    return [
        Picture(
            "Advantages A = G − B of each token",
            "Each row is a response to the same prompt, best score on top. Blue tokens are made more likely, red ones "
            "less, the deeper the more; white ones stay. Grey: not trained on (tool output, or after the end).",
            lambda figure: _draw_advantages(figure, group),
            height=min(8.0, 1.5 + 0.22 * rows),
            width=12.0,
        ),
        Picture(
            "What is still to come (G) and the baseline (B)",
            f"Thin: each response's reward-to-go G, a dot at its end. Bold: OTB's baseline B{of_each}, of its own "
            f"at each {place}; dashed: the one number that a group mean would take instead.",
            lambda figure: _draw_baseline(figure, group),
        ),
        Picture(
            "Realized energy W of each response",
            f"{weighs}: how much its tokens so far could have moved the policy. Steep "
            "where the policy was undecided, flat where it was sure.",
            lambda figure: _draw_energy(figure, group),
        ),
    ]


def _draw_steps(
    figure: Any,
    runs: list[Metrics],
    keys: tuple[str, ...],
    label: str,
    window: int,
    dashed: tuple[str, str] | None = None,
    level: float | None = None,
) -> None:
    axes = figure.subplots()
    smooth = window * 10 >= _SMOOTH_FROM
    everything = []
    for number, run in enumerate(runs):
        color = _LINES[number % len(_LINES)]
        lines = [(keys, _as_it_is(run.name), "-", 1.8)]
        if dashed:
            lines.append((dashed[:1], _as_it_is(f"{run.name}, {dashed[1]}"), "--", 1.1))
        for of_what, name, style, width in lines:
            steps, values = run.series(*of_what)
            if not np.isfinite(values).any():
                continue
            everything.append(values[np.isfinite(values)])
            if smooth:
                axes.plot(steps, values, style, color=color, alpha=0.25, linewidth=0.8)
                values = _running_mean(values, window)
            marker = "o" if len(steps) < _SMOOTH_FROM else None
            axes.plot(steps, values, style, color=color, linewidth=width, label=name, marker=marker, markersize=3)
    if level is not None:
        axes.axhline(level, color="black", linewidth=0.8)
    values = np.concatenate(everything)
    if POWER in keys and values.min() > 0 and values.max() > _WIDE_RANGE * values.min():
        axes.set_yscale("log")
    axes.set_xlabel("training step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    _legend(figure, max(1, 66 // (max(len(run.name) for run in runs) + (20 if dashed else 8))))


def _legend(figure: Any, columns: int) -> None:
    """Below the axes, where it hides nothing."""
    figure.legend(fontsize=8, loc="outside lower center", ncols=columns, frameon=False)


def _as_it_is(text: str) -> str:
    """Text that matplotlib is to show: dollars are formulas to it, and a label that begins with _ is hidden."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values that are there, at each."""
    return np.array(
        [
            np.mean(part[np.isfinite(part)]) if np.isfinite(part).any() else np.nan
            for part in (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
        ]
    )


def _draw_advantages(figure: Any, group: Group) -> None:
    axes = figure.subplots()
    advantages = np.ma.masked_array(group.advantages, ~group.mask)
    most = float(np.abs(group.advantages).max()) or 1.0
    colors = colormaps["RdBu"].with_extremes(bad=_GREY)
    tokens = group.mask.shape[1]
    image = axes.imshow(
        advantages,
        cmap=colors,
        norm=TwoSlopeNorm(0.0, -most, most),
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, tokens + 0.5, len(group.score) - 0.5, -0.5),
    )
    figure.colorbar(image, ax=axes, label="advantage (reward)", pad=0.01, extend="neither")
    each = max(1, -(-len(group.score) // _MANY_ROWS))
    axes.set_yticks(range(0, len(group.score), each), [f"score {score:.3g}" for score in group.score[::each]])
    if tokens <= 60 and len(group.score) <= _MANY_ROWS:  # thin lines between the cells, where they are wide enough
        axes.set_xticks(np.arange(0.5, tokens + 1), minor=True)
        axes.set_yticks(np.arange(-0.5, len(group.score)), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("position in the response (tokens)")


def _by_score(figure: Any, axes: Any, group: Group) -> list[Any]:
    """A colour for each row, and a bar that says which."""
    low, high = float(group.score.min()), float(group.score.max())
    norm = Normalize(low, high if high > low else low + 1)
    colors = colormaps["viridis"].resampled(256)
    scale = ScalarMappable(norm, colors)
    figure.colorbar(scale, ax=axes, label="score of the response", pad=0.02)
    return [colors(norm(score) * 0.9) for score in group.score]


def _draw_rows(axes: Any, group: Group, values: np.ndarray, colors: list[Any], labelled: str) -> None:
    columns = group.by_column(values)
    places = np.arange(1, columns.shape[1] + 1)
    for row, color in zip(columns, colors, strict=True):
        axes.plot(places, row, color=color, linewidth=1.2, alpha=0.75)
        last = np.flatnonzero(~np.ma.getmaskarray(row))
        if len(last):
            axes.plot(places[last[-1]], row[last[-1]], "o", color=color, markersize=4)
    axes.plot([], [], "-o", color="#777777", linewidth=1.2, markersize=4, label=labelled)
    axes.set_xlabel("position in the response (tokens)" if group.method.align == "position" else "k-th generated token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)


def _draw_baseline(figure: Any, group: Group) -> None:
    axes = figure.subplots()
    _draw_rows(axes, group, group.returns, _by_score(figure, axes, group), "G, each response")
    baseline = group.by_column(group.baseline)  # of the rows that have the column
    places = np.arange(1, baseline.shape[1] + 1)
    marker = "." if len(places) <= 60 else None
    axes.plot(places, baseline.mean(0), color="#c2185b", linewidth=2.4, marker=marker, label="B, OTB's baseline")
    axes.axhline(group.score.mean(), color="black", linestyle="--", linewidth=1.2, label="group mean")
    axes.set_ylabel("reward")
    axes.margins(y=0.12)
    _legend(figure, 3)


def _draw_energy(figure: Any, group: Group) -> None:
    axes = figure.subplots()
    _draw_rows(axes, group, group.realized_energy, _by_score(figure, axes, group), "W, each response")
    axes.set_ylabel("realized energy W")
    axes.set_ylim(bottom=0)
    _legend(figure, 3)


def png(picture: Picture) -> bytes:
    """The picture alone, without its title and caption."""
    figure = Figure(figsize=(picture.width, picture.height), layout="constrained")
    picture.draw(figure)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def sheet(title: str, rows: list[list[Picture]], notes: list[str]) -> bytes:
    """All pictures on one sheet as a PNG, each under its title and caption; notes at the foot."""
    notes = [line for note in notes for line in textwrap.wrap(f"Not here: {note}", 180)]
    heights = [max(picture.height for picture in row) + 0.75 for row in rows]
    foot = 0.3 + 0.22 * len(notes)
    figure = Figure(figsize=(15, sum(heights) + foot + 0.4), layout="constrained")
    figure.suptitle(_as_it_is(title), fontsize=13, fontweight="bold", x=0.01, ha="left")
    parts = figure.subfigures(len(rows) + 1, 1, height_ratios=[*heights, foot], squeeze=False)[:, 0]
    for part, row in zip(parts[:-1], rows, strict=True):
        captions = [textwrap.wrap(picture.caption, 200 // len(row) - 8) for picture in row]
        lines = max(map(len, captions))  # the same for all, so that the pictures of a row are of one height
        for cell, picture, caption in zip(part.subfigures(1, len(row), squeeze=False)[0], row, captions, strict=True):
            picture.draw(cell)
            axes = cell.axes[0]
            axes.set_title(
                "\n".join([*caption, *[""] * (lines - len(caption))]), fontsize=8.5, color="#444", loc="left"
            )
            above = {"xytext": (0, 9 + 11.5 * lines), "textcoords": "offset points", "annotation_clip": False}
            axes.annotate(picture.title, (0, 1), xycoords="axes fraction", fontsize=11, fontweight="bold", **above)
    parts[-1].text(0.01, 0.9, _as_it_is("\n".join(notes)), fontsize=9, color="#a03000", va="top")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100)
    return out.getvalue()
