"""The embeddings per second of engines, as a table and as raw data."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .report import LIMIT, Ratio

Rounds = dict[int, float]


@dataclass(kw_only=True)
class Table:
    """Measured values, and notes on what an engine could not do.

    Attributes:
        base: the engine that others are compared with.
        rates: embeddings per second by model, engine, workload and round.
        agreement: the least cosine similarity with the base, by model, engine and workload.
        peaks: the peak memory in bytes by model and engine.
    """

    base: str
    rates: dict[tuple[str, str, str], Rounds] = field(default_factory=lambda: defaultdict(dict))
    agreement: dict[tuple[str, str, str], float] = field(default_factory=dict)
    peaks: dict[tuple[str, str], int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_agreement(self, key: tuple[str, str, str], value: float) -> None:
        self.agreement[key] = min(value, self.agreement.get(key, 1.0))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def lines(self) -> Iterator[str]:
        """Yield the rows of a Markdown table with the medians of the rounds, ratios, and notes."""
        workloads = list(dict.fromkeys(workload for _, _, workload in self.rates))
        yield "| model | engine |" + "".join(f" {name} per s (cosine) |" for name in workloads) + " memory, GB |"
        yield "|---" * (len(workloads) + 3) + "|"
        for model, engine in sorted(
            dict.fromkeys((model, engine) for model, engine, _ in self.rates), key=lambda row: row[1] == LIMIT
        ):
            cells = [model, engine, *(self._cell((model, engine, name)) for name in workloads)]
            peak = self.peaks.get((model, engine))
            yield f"| {' | '.join([*cells, f'{peak / 1e9:.2f}' if peak else ''])} |"
        yield ""
        yield from (f"* {line}" for line in (*self._ratios(), *self.notes))

    def raw(self) -> list[dict[str, Any]]:
        return [
            {
                "model": model,
                "engine": engine,
                "workload": workload,
                "per_second": rounds,
                "cosine": self.agreement.get((model, engine, workload)),
                "peak_bytes": self.peaks.get((model, engine)),
            }
            for (model, engine, workload), rounds in self.rates.items()
        ]

    def ratio(self, model: str, workload: str, other: str) -> Ratio | None:
        """Return the ratio of the base to another engine over the rounds in which both were measured."""
        ours, theirs = (self.rates.get((model, name, workload), {}) for name in (self.base, other))
        ratios = [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None

    def _cell(self, key: tuple[str, str, str]) -> str:
        if key not in self.rates:
            return ""
        rates = self.rates[key].values()
        cosine = f" ({self.agreement[key]:.4f})" if key in self.agreement else ""
        return f"{statistics.median(rates):.3g}, {min(rates):.3g} to {max(rates):.3g}{cosine}"

    def _ratios(self) -> Iterator[str]:
        """Yield the ratio of the base to the best other engine in each workload."""
        for model, workload in dict.fromkeys((model, workload) for model, _, workload in self.rates):
            found = [name for each, name, work in self.rates if (each, work) == (model, workload)]
            others = [name for name in found if name not in (self.base, LIMIT)]
            best = max(others, key=lambda name: self._median(model, name, workload), default=LIMIT)
            if ratio := self.ratio(model, workload, best):
                yield f"{model}, {workload}: {self.base} over {best}: {ratio}"

    def _median(self, *key: str) -> float:
        model, engine, workload = key
        return statistics.median(self.rates[model, engine, workload].values())
