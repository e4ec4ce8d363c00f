"""Measure how many characters and lines are read correctly: `python -m training.reading.evaluate CHECKPOINT`.

Pages are sent to this project's engine as PNG files, as clients send them. Those of the rows of held-out fonts are
printed in fonts that do not occur in training.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dashinfer_vlm_core import Engine, EngineConfig
from tests.conversations import as_openai
from training.compose import choose
from training.reading import batches, fonts, prompts
from training.reading.batches import LINE_GRIDS, PAGE_GRIDS, PART_GRIDS, Pages, Reading

FIRST_SEED = 1_000_000


def _rows() -> Mapping[str, Pages]:
    """Return the composition of each row of the table."""
    families = {"training fonts": batches.FAMILIES, "held-out fonts": fonts.HELD_OUT}
    kinds = {
        "lines": Pages(grids=LINE_GRIDS),
        "parts of pages": Pages(grids=PART_GRIDS),
        "pages": Pages(grids=PAGE_GRIDS, receipts=0),
        "receipts": Pages(grids=PAGE_GRIDS, receipts=1),
        "totals of receipts": Pages(grids=PAGE_GRIDS, receipts=1, totals=1),
    }
    rows = {
        f"{kind}, {name}": replace(pages, families=chosen)
        for kind, pages in kinds.items()
        for name, chosen in families.items()
    }
    return rows | {"no text, or not readable": Pages(grids=PAGE_GRIDS, unreadable=1)}


ROWS = _rows()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Shares of correct characters (1 - edit distance / length) and of correct responses; lines are those of texts."""

    name: str
    characters: float
    lines: float
    exact: float
    wrong: tuple[tuple[str, str], ...]
    """Expected and given responses."""


def distance(first: str, second: str) -> int:
    """Return the Levenshtein distance."""
    row = list(range(len(second) + 1))
    for index, left in enumerate(first, 1):
        previous, row[0] = row[0], index
        for column, right in enumerate(second, 1):
            changed = previous + (left != right)
            previous = row[column]
            row[column] = min(changed, previous + 1, row[column - 1] + 1)
    return row[-1]


def evaluate(checkpoint: Path, count: int, names: Sequence[str] = ()) -> Iterator[Result]:
    """Yield the result of each row, `count` pages each; `names` selects rows."""
    with Engine(EngineConfig(model=str(checkpoint), dtype="float32", max_waiting=100_000)) as engine:
        for name in names or ROWS:
            readings = [_reading(name, index) for index in range(count)]
            yield grade(name, readings, asyncio.run(_respond(engine, readings)))


def grade(name: str, readings: Sequence[Reading], responses: Sequence[str]) -> Result:
    """Compare responses with what is on the pages."""
    pairs = [(reading.response, response) for reading, response in zip(readings, responses, strict=True)]
    length = sum(len(expected) for expected, _ in pairs)
    lines = [line in response.split("\n") for expected, response in pairs for line in expected.split("\n")]
    return Result(
        name=name,
        characters=1 - sum(min(distance(*pair), len(pair[0])) for pair in pairs) / length,
        lines=sum(lines) / len(lines),
        exact=sum(expected == response for expected, response in pairs) / len(pairs),
        wrong=tuple(pair for pair in pairs if pair[0] != pair[1]),
    )


def table(results: Sequence[Result]) -> str:
    """Format the results as a Markdown table."""
    lines = ["| pages | characters | lines | whole pages |", "|---|---|---|---|"]
    lines += [f"| {each.name} | {each.characters:.1%} | {each.lines:.1%} | {each.exact:.1%} |" for each in results]
    return "\n".join(lines)


def _reading(name: str, index: int) -> Reading:
    rng = random.Random(f"evaluate reading {name} {FIRST_SEED + index}")
    pages = ROWS[name]
    while True:
        reading = batches.make(rng, choose(rng, pages.grids), pages)
        if not pages.totals or reading.prompt in prompts.TOTAL:
            return reading


async def _respond(engine: Engine, readings: Sequence[Reading]) -> list[str]:
    async def respond(reading: Reading) -> str:
        content = [{"type": "image", "image": reading.page.image}, {"type": "text", "text": reading.prompt}]
        messages = as_openai([{"role": "user", "content": content}])
        completion = await engine.achat({"messages": messages, "temperature": 0})
        return completion.choices[0].message.content or ""

    return await asyncio.gather(*(respond(reading) for reading in readings))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.reading.evaluate", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--n", type=int, default=200, help="pages per row")
    parser.add_argument("--row", action="append", choices=ROWS, help="only this row; may be given more than once")
    parser.add_argument("--wrong", type=int, default=0, help="number of wrong responses to show per row")
    options = parser.parse_args(arguments)
    if options.n < 1:
        parser.error("--n: at least one page")
    results = []
    for result in evaluate(options.checkpoint, options.n, options.row or ()):
        results.append(result)
        print(f"{result.name:40} {result.characters:.3f} {result.lines:.3f} {result.exact:.3f}", flush=True)
        for expected, response in result.wrong[: options.wrong]:
            print(f"    expected {expected!r}\n    response {response!r}")
    print("\n" + table(results))


if __name__ == "__main__":
    main()
