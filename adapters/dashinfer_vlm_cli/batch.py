"""`dashinfer-vlm batch`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.errors import DashInferVLMError

from .batch_files import BatchOutput, Entry, error_line, read_body, read_entries, response_line
from .engines import INTERRUPTED, RETRIES, EngineSource, engine_source_options, with_retries

if TYPE_CHECKING:
    from .engines import AnyEngine


@click.command(cls=EngineCommand)
@click.argument("requests", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="File for the responses.  [default: REQUESTS with .responses.jsonl]")  # fmt: skip
@click.option("--errors", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="File for failed requests.  [default: OUTPUT with .errors.jsonl]")  # fmt: skip
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(1, 1024), metavar="INT",
              help="Maximum number of concurrent requests.")  # fmt: skip
@click.option("--retries", default=RETRIES, show_default=True, type=click.IntRange(min=0), metavar="INT",
              help="Retries of a request after a transient error.")  # fmt: skip
@engine_source_options
def batch(
    *, requests: Path, output: Path | None, errors: Path | None, concurrency: int, retries: int, source: EngineSource
) -> None:
    """Run a file of requests in OpenAI's batch format.

    REQUESTS contains one request per line: custom_id, method, url, body. Responses are appended to the output as they
    finish, in any order. To resume after an interruption, run the command again: it skips requests that have a
    response, and sends those that failed or have changed.

    Exits with 0 if every request has a response, with 1 if some have none.
    """
    output = output or requests.with_suffix(".responses.jsonl")
    errors = errors or output.with_suffix(".errors.jsonl")
    entries = read_entries(requests)
    with BatchOutput(output) as responses, BatchOutput(errors, overwrite=True) as failures:
        pending = [entry for entry in entries if responses.completed.get(entry.custom_id) != entry.line_id]
        _report_changes(pending, responses)
        job = _Job(requests=requests, responses=responses, failures=failures, retries=retries)
        try:
            _run(job, pending, source, concurrency)
        except KeyboardInterrupt:
            click.echo(f"Interrupted. The responses so far are in {output}. Run the command again to resume.", err=True)
            sys.exit(INTERRUPTED)
    if not job.num_failed:
        errors.unlink(missing_ok=True)
    counts = f"{len(pending) - job.num_failed} completed, {len(entries) - len(pending)} completed before"
    files = f"Responses: {output}{f'; failures: {errors}' if job.num_failed else ''}"
    click.echo(f"{counts}, {job.num_failed} failed. {files}", err=True)
    sys.exit(1 if job.num_failed else 0)


def _report_changes(pending: list[Entry], responses: BatchOutput) -> None:
    if changed := sum(entry.custom_id in responses.completed for entry in pending):
        click.echo(
            f"{changed} requests changed after their responses were written to {responses.path} and are sent again.",
            err=True,
        )


@dataclass(kw_only=True)
class _Job:
    """One run over a file of requests."""

    requests: Path
    responses: BatchOutput
    failures: BatchOutput
    retries: int
    num_failed: int = field(default=0, init=False)

    async def process(self, engine: AnyEngine, entry: Entry) -> None:
        body = read_body(self.requests, entry)
        try:
            completion = await with_retries(engine, lambda each: each.achat(body), max_retries=self.retries)
        except DashInferVLMError as error:
            self.num_failed += 1
            self.failures.append(error_line(entry, error))
        else:
            self.responses.append(response_line(entry, completion.model_dump(mode="json", exclude_unset=True)))


def _run(job: _Job, pending: list[Entry], source: EngineSource, concurrency: int) -> None:
    from dashinfer_vlm_core.concurrency.tasks import run_concurrently
    from dashinfer_vlm_core.progress import Progress

    if not pending:
        return
    with source.open() as engine, Progress(total=len(pending), desc="Requests", unit="") as progress:

        async def work(entry: Entry) -> None:
            await job.process(engine, entry)
            progress.update()

        asyncio.run(run_concurrently(pending, work, max_concurrency=concurrency))
