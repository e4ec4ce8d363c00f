"""Plots of the table (SVG); requires matplotlib from the dependency group `bench`."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("svg")

from matplotlib import pyplot as plt

from .report import LIMIT, Results, Row


def draw(results: Results, folder: Path) -> None:
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text, which is a fifth of the size
    _ratios(results, folder / "ratios.svg")
    _growth(results, folder / "users.svg")


def _ratios(results: Results, file: Path) -> None:
    """Plot how many times better the base is than each other engine, by the first metric of each workload."""
    rows = list({row.workload: row for row in reversed(results.rows)}.values())[::-1]
    others = [name for name in results.engines if name not in (results.base, LIMIT)]
    if not others:
        return
    figure, axes = plt.subplots(figsize=(9, 1 + 0.25 * len(rows) * len(others)), layout="constrained")
    height = 0.8 / len(others)
    for index, name in enumerate(others):
        bars = {place: times for place, row in enumerate(rows) if (times := _times_better(results, row, name))}
        low, middle, high = np.array([*bars.values()]).reshape(-1, 3).T
        places = np.array([*bars]) + index * height
        axes.barh(places, middle - 1, height, left=1, xerr=(middle - low, high - middle), color=f"C{index}", label=name)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(
        np.arange(len(rows)) + 0.4 - height / 2, [f"{row.title}, {row.metric.split(',')[0]}" for row in rows]
    )
    axes.invert_yaxis()
    axes.set_xlabel(f"how many times better {results.base} is (range of the rounds)")
    axes.legend()
    figure.savefig(file)
    plt.close(figure)


def _times_better(results: Results, row: Row, name: str) -> tuple[float, float, float] | None:
    """Return the minimum, median and maximum; None where it was not measured."""
    ratio = results.ratio(row, name)
    if ratio is None:
        return None
    if row.higher:
        return ratio.least, ratio.middle, ratio.most
    return 1 / ratio.most, 1 / ratio.middle, 1 / ratio.least


def _growth(results: Results, file: Path) -> None:
    """Plot requests per second by the number of users with new images."""
    rows = {int(row.workload.removeprefix("fresh-")): row for row in results.figures if _is_rate(row)}
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in results.engines:
        points = [(users, results.middle(row, name)) for users, row in sorted(rows.items())]
        known = [(users, value) for users, value in points if value is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o", label=name)
    axes.set(xlabel="users, each with a new image", ylabel="requests per second", xticks=sorted(rows), ylim=(0, None))
    axes.legend()
    figure.savefig(file)
    plt.close(figure)


def _is_rate(row: Row) -> bool:
    return row.workload.startswith("fresh-") and row.metric == "req/s"
