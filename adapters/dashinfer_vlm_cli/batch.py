"""`dashinfer-vlm batch`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dashinfer_vlm_core.config.config_file import ConfiguredCommand
from dashinfer_vlm_core.errors import DashInferVLMError

from .batch_files import BatchOutput, Entry, answered, failed, read_body, read_entries
from .engines import EngineSource, engine_options

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

    from .engines import AnyEngine

PAUSE_SECONDS = 1.0
INTERRUPTED = 130
"""Exit code of a run that was ended by Ctrl-C, as shells have it."""


@click.command(cls=ConfiguredCommand)
@click.argument("requests", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="File for the answers.  [default: REQUESTS with .answers.jsonl]")  # fmt: skip
@click.option("--errors", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="File for requests without an answer.  [default: OUTPUT with .errors.jsonl]")  # fmt: skip
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(1, 1024), metavar="INT",
              help="Requests at once.")  # fmt: skip
@click.option("--retries", default=3, show_default=True, type=click.IntRange(min=0), metavar="INT",
              help="Further tries of a request that may succeed later.")  # fmt: skip
@engine_options
def batch(
    *, requests: Path, output: Path | None, errors: Path | None, concurrency: int, retries: int, source: EngineSource
) -> None:
    """Answer a file of requests, in OpenAI's batch format.

    REQUESTS holds one request a line: custom_id, method, url, body. Answers are appended to the output as they come,
    in any order. Run it again to go on after an interruption: what has an answer is not asked again; what failed, or
    was changed since, is.

    Exits with 0 if every request has an answer, with 1 if some have none.
    """
    output = output or requests.with_suffix(".answers.jsonl")
    errors = errors or output.with_suffix(".errors.jsonl")
    entries = read_entries(requests)
    with BatchOutput(output) as answers:
        left = [entry for entry in entries if answers.done.get(entry.custom_id) != entry.line_id]
        changed = sum(entry.custom_id in answers.done for entry in left)
        if changed:
            click.echo(f"Changed since {output} answered them, and asked again: {changed}.", err=True)
        with BatchOutput(errors, fresh=True) as faults:
            job = _Job(requests=requests, answers=answers, faults=faults, retries=retries)
            try:
                _run(job, left, source, concurrency)
            except KeyboardInterrupt:
                click.echo(f"Interrupted. Run it again to go on; what was answered is in {output}.", err=True)
                sys.exit(INTERRUPTED)
        if not job.failed:
            errors.unlink(missing_ok=True)
        if changed or answers.superseded:
            answers.compact()
    told = f"{len(left) - job.failed} answered, {len(entries) - len(left)} were answered before, {job.failed} failed"
    click.echo(f"{told}. Answers: {output}{f'; failures: {errors}' if job.failed else ''}", err=True)
    sys.exit(1 if job.failed else 0)


@dataclass(kw_only=True)
class _Job:
    """One run over a file of requests."""

    requests: Path
    answers: BatchOutput
    faults: BatchOutput
    retries: int
    failed: int = field(default=0, init=False)

    async def answer(self, engine: AnyEngine, entry: Entry) -> None:
        body = read_body(self.requests, entry)
        try:
            completion = await self._try(engine, body)
        except DashInferVLMError as error:
            self.failed += 1
            self.faults.append(failed(entry, error))
        else:
            self.answers.append(answered(entry, completion.model_dump(mode="json", exclude_unset=True)))

    async def _try(self, engine: AnyEngine, body: dict[str, object]) -> ChatCompletion:
        for _ in range(self.retries):
            if (found := await _tried(engine, body)) is not None:
                return found
        return await engine.achat(body)


async def _tried(engine: AnyEngine, body: dict[str, object]) -> ChatCompletion | None:
    """The answer; None, after a pause, if another try may have one."""
    try:
        return await engine.achat(body)
    except DashInferVLMError as error:
        if not error.retryable:
            raise
        await asyncio.sleep(getattr(error, "retry_after", PAUSE_SECONDS))
        return None


def _run(job: _Job, left: list[Entry], source: EngineSource, concurrency: int) -> None:
    from .concurrency import progress, run_concurrently

    if not left:
        return
    with source.open() as engine, progress(len(left), unit="request") as tick:
        asyncio.run(run_concurrently(left, lambda entry: _answer(job, engine, entry, tick), at_once=concurrency))


async def _answer(job: _Job, engine: AnyEngine, entry: Entry, tick: Callable[[], None]) -> None:
    await job.answer(engine, entry)
    tick()
