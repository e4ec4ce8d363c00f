"""`dashinfer-vlm embed`."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.terminal import counted
from dashinfer_vlm_core.concurrency.tasks import run_concurrently
from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError, InvalidParameter

from .embed_files import Content, Row, VectorsFile
from .engines import INTERRUPTED, EngineSource, engine_source_options, with_retries
from .rate_progress import RateProgress

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import PoolingResult

    from .engines import AnyEngine

MAX_REQUESTS = 16
"""Requests at the same time, for one embedding each."""

MAX_PAGES = 8
"""The same for the pages of a document."""

MAX_PAGE_NUMBER = 9_999_999
"""The largest that `pages` of a document accepts."""

_NUM_PAGES = re.compile(r"but the document has ([0-9]+)\.")

EMBEDDING_MODEL = "Qwen/Qwen3-VL-Embedding-2B"


@click.command(cls=EngineCommand)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.npy",
              help="File for the vectors, in NumPy's format.")  # fmt: skip
@click.option("--text", "texts", multiple=True, metavar="TEXT", help="A text to embed, such as a query. Repeatable.")
@click.option("--instruction", metavar="TEXT", help="What the embeddings are for.  [default: the model's]")
@click.option("--dimensions", type=click.IntRange(min=1), metavar="INT",
              help="Fewer dimensions than the model's, if it was trained for them.")  # fmt: skip
@engine_source_options
def embed(
    *,
    files: tuple[Path, ...],
    output: Path,
    texts: tuple[str, ...],
    instruction: str | None,
    dimensions: int | None,
    source: EngineSource,
) -> None:
    """Compute embeddings of images, videos, PDFs and text files.

    Each of FILES becomes a row of a matrix, and each page of a PDF. A file of the same name with the suffix .jsonl says
    what each row is. Rows are appended as they finish. To resume after an interruption, run the command again: it
    computes the rows that are missing.

    Exits with 0 if everything has its embedding, with 1 if something has none.
    """
    if not files and not texts:
        raise click.UsageError("There is nothing to embed. Pass FILES or --text.")
    if not all(texts):
        raise click.UsageError("A --text is empty. Write a text, or leave it out.")
    if source.config.task == "auto":
        source = replace(source, config=source.config.model_copy(update={"task": "embed"}))
    with VectorsFile(output) as vectors:
        if source.api_base is None:  # only a server knows the name of its model
            vectors.check_model(source.config.name)
        if dimensions is not None:
            vectors.check_dimensions(dimensions)
        options = {"instruction": instruction, "dimensions": dimensions}
        job = _Job(vectors=vectors, options={name: value for name, value in options.items() if value is not None})
        try:
            _run(job, [*dict.fromkeys(files), *dict.fromkeys(texts)], source)
        except KeyboardInterrupt:
            click.echo(f"Interrupted. The rows so far are in {output}. Run the command again to resume.", err=True)
            sys.exit(INTERRUPTED)
    for problem in job.problems:
        click.echo(f"dashinfer-vlm: {problem}", err=True)
    counts = f"{counted(job.num_embedded, 'row')} computed, {len(job.problems)} failed."
    click.echo(f"{counts} Rows: {vectors.path}" if vectors.path.exists() else counts, err=True)
    sys.exit(1 if job.problems else 0)


class ItemProgress(RateProgress):
    """Progress of files and texts, with the rows per minute of this run."""

    noun: ClassVar[str] = "items"

    def __init__(self, total: int, job: _Job) -> None:
        self._job = job
        super().__init__(total=total, desc="Embeddings")

    @property
    def num_done(self) -> int:
        return self._job.num_embedded


@dataclass(kw_only=True)
class _Job:
    """One run.

    Attributes:
        vectors: the rows so far.
        options: fields of all requests.
        problems: a line for each file, page and text that failed.
        num_embedded: number of rows of this run.
    """

    vectors: VectorsFile
    options: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    num_embedded: int = 0
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_REQUESTS))

    def is_done(self, source: Path | str) -> bool:
        """Whether a text or file has its row, or a document those of all pages."""
        if isinstance(source, str):
            return self._text_row(source) in self.vectors
        try:
            content = Content.read(source)
        except DashInferVLMError:  # `process` reports it
            return False
        if self.vectors.has_other_version(str(source), content.digest):
            return False
        if content.kind != "file":
            return self._row(content) in self.vectors
        pages = self.vectors.num_pages(str(source))
        return bool(pages) and all(self._row(content, page) in self.vectors for page in range(1, pages + 1))

    async def process(self, engine: AnyEngine, source: Path | str) -> None:
        if isinstance(source, str):
            await self._embed(engine, self._text_row(source), lambda: {"input": source})
            return
        try:
            content = await asyncio.to_thread(Content.read, source)
        except DashInferVLMError as error:
            self.problems.append(error.message)
            return
        if self.vectors.has_other_version(str(source), content.digest):
            self.problems.append(f"{source} has changed since its rows were computed. Choose another `--output`.")
        elif content.kind == "file":
            await self._embed_pages(engine, content)
        else:
            await self._embed(engine, self._row(content), content.inputs, digest=content.digest)

    async def _embed_pages(self, engine: AnyEngine, content: Content) -> None:
        try:
            pages = self.vectors.num_pages(str(content.path)) or await self._count_pages(engine, content)
        except DashInferVLMError as error:
            self._report(self._row(content), error)
            return

        async def work(page: int) -> None:
            inputs = partial(content.inputs, page)
            await self._embed(engine, self._row(content, page), inputs, digest=content.digest, pages=pages)

        await run_concurrently(range(1, pages + 1), work, max_concurrency=MAX_PAGES)

    async def _count_pages(self, engine: AnyEngine, content: Content) -> int:
        # Only media workers of an engine open documents. The error for a page that does not exist names the number.
        try:
            await self._request(engine, partial(content.inputs, MAX_PAGE_NUMBER))
        except InvalidParameter as error:
            if found := _NUM_PAGES.search(error.message):
                return int(found[1])
            raise
        return MAX_PAGE_NUMBER

    async def _embed(
        self,
        engine: AnyEngine,
        row: Row,
        inputs: Callable[[], dict[str, Any]],
        *,
        digest: str | None = None,
        pages: int | None = None,
    ) -> None:
        if row in self.vectors:
            return
        try:
            result = await self._request(engine, inputs)
        except DashInferVLMError as error:
            self._report(row, error)
        else:
            self.vectors.add(row, digest, result, pages=pages)
            self.num_embedded += 1

    async def _request(self, engine: AnyEngine, inputs: Callable[[], dict[str, Any]]) -> PoolingResult:
        request = await asyncio.to_thread(inputs) | self.options
        async with self._slots:
            return await with_retries(engine, lambda each: each.aembed(request))

    def _text_row(self, text: str) -> Row:
        return Row(text=text, instruction=self.options.get("instruction"))

    def _row(self, content: Content, page: int | None = None) -> Row:
        return Row(file=str(content.path), page=page, instruction=self.options.get("instruction"))

    def _report(self, row: Row, error: DashInferVLMError) -> None:
        _check_options(error)
        message = error.message.removeprefix(f"`{error.param}`: ")  # the request is not the user's
        self.problems.append(f"{row}: {message}")


def _check_options(error: DashInferVLMError) -> None:
    """Raise ConfigError if no request with these options can succeed."""
    if error.code == "wrong_task":
        model = error.message.partition(" (")[0]
        raise ConfigError(
            f"{model}, so it has no embeddings. Load it with `--task embed`, the server included, or use a model that"
            f" was trained for embeddings, such as {EMBEDDING_MODEL}.",
            param="task",
        )
    if error.param == "dimensions":
        raise ConfigError(error.message.replace("`dimensions`", "`--dimensions`", 1), param="dimensions")


def _run(job: _Job, given: Sequence[Path | str], source: EngineSource) -> None:
    sources = [each for each in given if not job.is_done(each)]
    if not sources:
        return
    with source.open() as engine, ItemProgress(len(sources), job) as progress:

        async def work(each: Path | str) -> None:
            await job.process(engine, each)
            progress.update()

        asyncio.run(run_concurrently(sources, work, max_concurrency=MAX_REQUESTS))
