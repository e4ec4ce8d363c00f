"""The results as a table, as raw data, and as plots."""

from __future__ import annotations

import platform
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dashinfer_vlm_core import __version__

from .limits import Rates, cores
from .workloads import Run, workloads

LIMIT = "limit, 16 bits"
"""The machine's limit with weights of 16 bits, shown as another engine in the table."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        workload: the workload's name.
        title: its title.
        metric: the metric with its unit.
        higher: whether higher is better.
    """

    workload: str
    title: str
    metric: str
    higher: bool = False


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of the base's value to another engine's: median, minimum and maximum of the rounds."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.least:.2f} to {self.most:.2f})"


@dataclass(kw_only=True)
class Results:
    """Measured values by row, engine and round.

    Attributes:
        model: the model's name.
        base: the engine that the others are compared with.
        rates: the machine's throughput in each round.
        notes: remarks on the table.
        runs: every response of every run, for the raw file.
    """

    model: str
    base: str = ""
    rates: list[Rates] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[Row, dict[str, dict[int, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )

    @property
    def engines(self) -> list[str]:
        """Return the engines: the base first, the limit last."""
        names = dict.fromkeys(name for row in self.figures.values() for name in row)
        return sorted(names, key=lambda name: (name == LIMIT) - (name == self.base))

    @property
    def rows(self) -> list[Row]:
        """Return the rows in the order of the workloads, other measurements last."""
        order = [*workloads(), "memory", "ready"]
        return sorted(self.figures, key=lambda row: order.index(row.workload))

    def add(self, row: Row, engine: str, number: int, value: float) -> None:
        self.figures[row][engine][number] = value

    def keep(self, engine: str, workload: str, number: int, run: Run) -> None:
        """Record every response of a run; errors are noted."""
        samples = [*run.samples, *run.background]
        responses = [
            {
                "tokens": sample.tokens,
                "prompt_tokens": sample.prompt_tokens,
                "fault": sample.fault,
                **({"ttft": sample.ttft, "tpot": sample.tpot} if sample.arrivals else {}),
            }
            for sample in samples
        ]
        self.runs.append(
            {"engine": engine, "workload": workload, "round": number, "seconds": run.seconds, "answers": responses}
        )
        faults = [sample.fault for sample in samples if sample.fault]
        if faults:
            self.notes.append(
                f"{engine}, {workload}, round {number + 1}: {len(faults)} of {len(samples)} responses failed, so the"
                f" run does not count ({faults[0][:200]})"
            )

    def prompt_tokens(self, workload: str) -> int:
        """Return the length of the longest prompt of a workload."""
        runs = [run for run in self.runs if run["workload"] == workload]
        return max((response["prompt_tokens"] for run in runs for response in run["answers"]), default=0)

    def middle(self, row: Row, engine: str) -> float | None:
        values = self.figures[row].get(engine)
        return statistics.median(values.values()) if values else None

    def ratio(self, row: Row, engine: str) -> Ratio | None:
        """Return the ratio over the rounds in which both were measured."""
        ours, theirs = self.figures[row].get(self.base, {}), self.figures[row].get(engine, {})
        ratios = [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def markdown(results: Results) -> str:
    """One table: of each row the base's median, and for each other engine its median and the base's ratio to it."""
    others = [name for name in results.engines if name != results.base]
    head = ["workload", "figure", results.base, *(f"{name}: {results.base} over it" for name in others)]
    lines = [head, ["---"] * len(head)]
    lines += [_line(results, row, others) for row in results.rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([_heading(results), table, *(f"* {note}" for note in results.notes)]) + "\n"


def _line(results: Results, row: Row, others: list[str]) -> list[str]:
    better = "more is better" if row.higher else "less is better"
    cells = [f"{row.workload}: {row.title}", f"{row.metric} ({better})", _figure(results.middle(row, results.base))]
    for name in others:
        ratio = results.ratio(row, name)
        cells.append(f"{_figure(results.middle(row, name))}: {ratio}" if ratio else _figure(results.middle(row, name)))
    return cells


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _heading(results: Results) -> str:
    reads = _spread([rates.read_gb_s for rates in results.rates])
    products = _spread([rates.bf16_gflop_s for rates in results.rates])
    kernels = ", ".join(sorted({rates.kernels for rates in results.rates}))
    return (
        f"Model {results.model}; {len(results.rates)} rounds; {cores()} cores, {_processor()};"
        f" torch {torch.__version__}, version {__version__}. The machine in the same rounds: memory reads {reads} GB/s,"
        f" bfloat16 products {products} GFLOP/s ({kernels}).\n\n"
        f"Each cell: the median of the engine, then the ratio of {results.base} to it: the median of the rounds, and"
        " the least and largest."
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def raw(results: Results) -> dict[str, Any]:
    figures = [{**asdict(row), "engines": engines} for row, engines in results.figures.items()]
    return {
        "model": results.model,
        "base": results.base,
        "version": __version__,
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": cores(),
        "rates": [asdict(rates) for rates in results.rates],
        "notes": results.notes,
        "figures": figures,
        "runs": results.runs,
    }
