"""The figures of a report, drawn with matplotlib. A label has one colour and dash in all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from rlkit.comparison import Estimate, Row, band, finals
from rlkit.interquartile import interquartile_mean
from rlkit.recorded import Curve, Group

# Okabe and Ito's palette, told apart by readers of any colour vision; the dashes tell lines apart in black and white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
DASHES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
INK, FAINT = "#222222", "#8a8a8a"
WIDTH = 9.2  # inches; the page shows a figure as wide as its text
PANELS_ABREAST = 3
KL_RANGE = 1e3  # a KL this much smaller than the greatest has the darkest colour
OVERVIEW = {
    "eval/return": "Return, deterministic policy",
    "kl/old": "KL to the policy at collection (nats)",
    "ratio/clipped": "Share of ratios clipped",
    "entropy/mean": "Entropy (nats)",
}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.color": INK,
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "svg.hashsalt": "rlkit",  # the same runs give the same file
}


@dataclass(frozen=True)
class Look:
    """How a label is drawn."""

    colour: str
    dash: Any  # a name, or (offset, lengths of strokes and gaps in points)


def looks(groups: Sequence[Group]) -> dict[str, Look]:
    """A look for each label, in the order of appearance."""
    labels = dict.fromkeys(group.label for group in groups)
    return {
        label: Look(COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)])
        for k, label in enumerate(labels)
    }


@contextmanager
def style() -> Iterator[None]:
    """Draw and save with the report's look, whatever matplotlib is set to."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def learning(groups: Sequence[Group], results: Sequence[Row], look: dict[str, Look]) -> Figure:
    """Learning curves of one environment, and the final return of each seed with its interval."""
    labels = [group.label for group in groups]
    short = len(labels) <= 4 and max(map(len, labels)) <= 40 / len(labels)
    figure = Figure(figsize=(WIDTH, 3.3 + _legend_height(labels)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    curves(left, groups, "eval/return", look)
    left.set_title("Return of the deterministic policy")
    threshold = results[0].threshold
    if threshold is not None:
        for axis in (left, right):
            axis.axhline(threshold, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    right.set_title("Final return of each seed, mean of 100 episodes")
    for place, (group, row) in enumerate(zip(groups, results, strict=True)):
        _final_returns(right, place, finals(group), row.final_return, look[group.label].colour)
    right.set_xticks(range(len(labels)), labels if short else [str(k + 1) for k in range(len(labels))])
    right.set_xlim(-0.6, len(labels) - 0.4)
    right.grid(axis="x", visible=False)
    right.tick_params(axis="x", length=0)
    right.yaxis.set_major_locator(_ticks())
    _legend(figure, left, numbered=not short)
    return figure


def _final_returns(axis: Axes, place: int, values: np.ndarray, middle: Estimate, colour: str) -> None:
    """Draw a column of the panel: a dot for each seed, left of them the interquartile mean and its interval."""
    axis.plot([place - 0.36] * 2, [middle.low, middle.high], color=INK, linewidth=1.4, solid_capstyle="butt")
    axis.plot(place - 0.36, middle.value, marker="D", markersize=4.5, color=INK)
    axis.scatter(place + 0.1 + swarm(values), values, s=14, color=colour, alpha=0.7, linewidth=0, zorder=3)


def swarm(values: np.ndarray, width: float = 0.68, bins: int = 30) -> np.ndarray:
    """Offsets around 0 that put values which lie close together beside each other, so that all are seen, [S].

    Args:
        values: [S].
        width: the widest row of equal values.
        bins: how many rows of values are told apart.
    """
    rows = np.round((values - values.min()) / (np.ptp(values) or 1.0) * bins)
    _, row, counts = np.unique(rows, return_inverse=True, return_counts=True)
    offset = np.zeros(len(values))
    for k, count in enumerate(counts):
        offset[row == k] = np.arange(count) - (count - 1) / 2
    return np.asarray(offset * min(width / max(counts.max() - 1, 1), 0.07))


def health(groups: Sequence[Group], look: dict[str, Look]) -> Figure | None:
    """KL, share of clipped ratios and entropy over training; None where nothing was logged."""
    if all(group.curve(name) is None for group in groups for name in OVERVIEW if name != "eval/return"):
        return None
    figure = Figure(figsize=(WIDTH, 2.6 + _legend_height([group.label for group in groups])), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, (name, title) in zip(axes, list(OVERVIEW.items())[1:], strict=True):
        curves(axis, groups, name, look)
        axis.set_title(title)
    _legend(figure, axes[0])
    return figure


def kl_heat_map(groups: Sequence[Group]) -> Figure | None:
    """KL by iteration and epoch, a panel for each label; None where no run logged it."""
    maps = [(group, found) for group in groups if (found := kl_by_epoch(group)) is not None]
    positive = np.concatenate([values[values > 0] for _, (_, values) in maps]) if maps else np.zeros(0)
    if not positive.size:
        return None
    top = float(positive.max())
    norm = LogNorm(top / KL_RANGE, top, clip=True)
    longest = horizon(groups)
    figure, axes = _panels(len(maps), 2.3, sharey=False)
    for axis, (group, (steps, values)) in zip(axes, maps, strict=True):
        epochs = np.arange(len(values) + 1) + 0.5
        colours = np.maximum(values, top / KL_RANGE)
        mesh = axis.pcolormesh(edges(steps) / _unit(longest)[0], epochs, colours, norm=norm, cmap="cividis")
        mesh.set_rasterized(True)  # a browser shows seams between thousands of little rectangles
        axis.grid(visible=False)
        axis.set_title(textwrap.fill(group.label, 36))
        axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        _label_steps(axis, longest)
    axes[0].set_ylabel("epoch of the update")
    bar = figure.colorbar(mesh, ax=axes, pad=0.015, aspect=18, extend="min", extendfrac=0.04)
    bar.set_label("KL (nats)")
    bar.ax.yaxis.set_major_formatter(_plain_powers())
    return figure


def kl_by_epoch(group: Group) -> Curve | None:
    """Steps [L] and the interquartile mean over seeds of the KL in each epoch, [E, L]; None where it was not logged."""
    found: list[Curve] = []
    while (curve := group.curve(f"kl/epoch_{len(found)}")) is not None:
        found.append(curve)
    if not found:
        return None
    steps = found[0][0]
    table = np.full((len(found), len(steps)), np.nan)
    for epoch, (at, values) in enumerate(found):  # an epoch that no seed reached has no entry
        table[epoch, np.searchsorted(steps, at).clip(max=len(steps) - 1)] = interquartile_mean(values)
    return steps, table


def edges(steps: np.ndarray) -> np.ndarray:
    """Bounds of the columns of a heat map, half way between entries, [L + 1]."""
    between = (steps[1:] + steps[:-1]) / 2
    first = 2 * steps[0] - between[0] if len(between) else steps[0] - 0.5
    last = 2 * steps[-1] - between[-1] if len(between) else steps[0] + 0.5
    return np.concatenate([[max(first, 0)], between, [last]])


def gradient_norms(groups: Sequence[Group], look: dict[str, Look]) -> Figure | None:
    """Distribution over seeds of the gradient norm before clipping, a panel for each label; None if not logged."""
    fans = [(group, found) for group in groups if (found := quantiles(group, "grad_norm/before")) is not None]
    positive = np.concatenate([fan[fan > 0] for _, (_, fan) in fans]) if fans else np.zeros(0)
    if not positive.size:
        return None
    floor, top, longest = float(positive.min()) / 1.3, float(positive.max()) * 1.3, horizon(groups)
    figure, axes = _panels(len(fans), 2.3, sharey=True)
    for axis, (group, (steps, fan)) in zip(axes, fans, strict=True):
        x, colour = steps / _unit(longest)[0], look[group.label].colour
        low, quarter, median, third, high = np.maximum(fan, floor)  # a norm of 0 lies on the lower edge
        axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        axis.fill_between(x, quarter, third, color=colour, alpha=0.35, linewidth=0)
        axis.plot(x, median, color=colour, linewidth=1.5)
        limit = group.settings.get("algo.max_grad_norm")
        if limit is not None:
            axis.axhline(limit, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.set_yscale("log")
        axis.set_ylim(floor, top)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 100 * floor else (1,)))
        axis.yaxis.set_major_formatter(_plain_powers())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_title(textwrap.fill(group.label, 36))
        _label_steps(axis, longest)
    for axis in axes[::PANELS_ABREAST]:
        axis.set_ylabel("gradient norm")
    return figure


def quantiles(group: Group, name: str) -> Curve | None:
    """Steps [L] at which some seed measured a scalar, and its quantiles over seeds (5, 25, 50, 75, 95 %), [5, L]."""
    curve = group.curve(name)
    if curve is None:
        return None
    steps, values = curve
    known = ~np.isnan(values).all(1)
    return (steps[known], np.nanpercentile(values[known], [5, 25, 50, 75, 95], axis=1)) if known.any() else None


def overview(groups: Sequence[Group]) -> Figure:
    """Return, KL, share of clipped ratios and entropy side by side, a row for each environment."""
    envs = list(dict.fromkeys(group.env for group in groups))
    with style():
        height = 3.2 * len(envs) + _legend_height(list(looks(groups)), 15)
        figure = Figure(figsize=(15, height), layout=ConstrainedLayoutEngine(h_pad=0.08))
        grid = figure.subplots(len(envs), len(OVERVIEW), squeeze=False)
        for line, env in zip(grid, envs, strict=True):
            for axis, (name, title) in zip(line, OVERVIEW.items(), strict=True):
                curves(axis, [group for group in groups if group.env == env], name, looks(groups))
                axis.set_title(title if len(envs) == 1 or name != "eval/return" else f"{env}: return")
        _legend(figure, grid[0, 0])
    return figure


def curves(axis: Axes, groups: Sequence[Group], name: str, look: dict[str, Look]) -> None:
    """Draw a scalar of each group: the interquartile mean over seeds and its bootstrap band."""
    found = [(group, curve) for group in groups if (curve := group.curve(name)) is not None]
    longest = horizon(groups)
    unit, _ = _unit(longest)
    for group, (steps, values) in found:
        shape = look[group.label]
        marker = "o" if len(steps) == 1 else None
        middle, ends = interquartile_mean(values), band(values)
        if name == "eval/return" and len(steps) > 2:  # the last one is of other, and more, episodes: not of the curve
            axis.plot(steps[-1:] / unit, middle[-1:], color=shape.colour, marker="D", markersize=4, clip_on=False)
            steps, middle, ends = steps[:-1], middle[:-1], ends[:-1]
        (line,) = axis.plot(steps / unit, middle, label=group.label, color=shape.colour, linewidth=1.6, marker=marker)
        line.set_linestyle(shape.dash)
        alpha = 0.18 if len(found) <= 4 else 0.08  # many bands cover each other
        axis.fill_between(steps / unit, ends[:, 0], ends[:, 1], color=shape.colour, alpha=alpha, linewidth=0)
    _label_steps(axis, longest)
    axis.yaxis.set_major_locator(_ticks())
    if name != "eval/return" and axis.dataLim.ymin >= 0:
        axis.set_ylim(bottom=0)


def _panels(count: int, height: float, *, sharey: bool) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, at most three abreast."""
    abreast = min(count, PANELS_ABREAST)
    down = -(-count // abreast)
    width = WIDTH if count > 1 else WIDTH * 0.62
    figure = Figure(figsize=(width, 0.35 + height * down), layout="constrained")
    axes = figure.subplots(down, abreast, sharey=sharey, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def _legend(figure: Figure, axis: Axes, numbered: bool = False) -> None:
    """The lines of an axis in rows above the figure; with `numbered` each has the number of its row in the table."""
    handles, labels = axis.get_legend_handles_labels()
    if labels:
        names = [f"{k}  {label}" if numbered else label for k, label in enumerate(labels, 1)]
        abreast = _abreast(labels, figure.get_figwidth())
        figure.legend(handles, names, loc="outside upper left", ncols=abreast, handlelength=2.6, borderaxespad=0.2)


def _abreast(labels: Sequence[str], width: float) -> int:
    """How many labels stand side by side in a legend of `width` inches."""
    return max(1, min(len(labels), int(width / (0.8 + 0.075 * max(map(len, labels))))))


def _legend_height(labels: Sequence[str], width: float = WIDTH) -> float:
    """Inches that the legend takes."""
    return 0.19 * -(-len(labels) // _abreast(labels, width))


def horizon(groups: Sequence[Group]) -> int:
    """Where the axes of steps end: the steps of the seed that made most."""
    return max(int(steps) for group in groups for steps in group.column("env_steps"))


def _unit(steps: float) -> tuple[float, str]:
    """What steps are counted in on an axis that ends there."""
    return (1e6, "millions") if steps >= 2e6 else (1e3, "thousands") if steps >= 2e3 else (1.0, "")


def _label_steps(axis: Axes, steps: float) -> None:
    """Name the axis of steps, and let it run from 0 to `steps`."""
    unit, name = _unit(steps)
    axis.set_xlabel("environment steps" + (f" ({name})" if name else ""))
    axis.set_xlim(0, steps / unit * 1.01)
    axis.xaxis.set_major_locator(_ticks())


def _ticks() -> MaxNLocator:
    return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])


def _plain_powers() -> FuncFormatter:
    """0.01 rather than a power of ten in mathematical type, whose width a page's font would change."""
    return FuncFormatter(lambda value, _: f"{value:g}")
