"""`dashinfer-vlm ocr`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.terminal import counted
from dashinfer_vlm_core.concurrency.tasks import run_concurrently
from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError, MediaTooLarge
from dashinfer_vlm_core.protocol.ocr import MAX_INDICES

from .engines import INTERRUPTED, EngineSource, engine_source_options, with_retries
from .ocr_files import PAGES_FILE, PagesFile, Source, digest_of, find_sources
from .rate_progress import RateProgress

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import ChatEngine

    from .engines import AnyEngine

MAX_FILES = 16
"""Files that are converted at the same time, so that many files of one page fill a batch."""

_NUM_PAGES = re.compile(r"pages can be read for a request, got ([0-9]+)\.")


@click.command(cls=EngineCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Folder for the Markdown files.")  # fmt: skip
@engine_source_options
def ocr(*, files: tuple[Path, ...], output: Path, source: EngineSource) -> None:
    """Convert PDFs and images to Markdown.

    Each of FILES becomes a file of the same name with the suffix .md; one that this command did not write is kept, and
    is an error. Pages are also appended to pages.jsonl in the folder as they finish. To resume after an interruption,
    run the command again: it converts the pages that are missing or failed. To convert all with another model or
    prompt, choose another folder.

    Exits with 0 if every page has its text, with 1 if some have none.
    """
    sources = find_sources(files, output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{output} cannot be created: {error.strerror}. Choose another folder.") from error
    with PagesFile(output / PAGES_FILE) as pages:
        pages.check_outputs(sources)
        job = _Job(pages=pages)
        try:
            _run(job, sources, source)
        except KeyboardInterrupt:
            click.echo(f"Interrupted. The pages so far are in {pages.path}. Run the command again to resume.", err=True)
            sys.exit(INTERRUPTED)
    for problem in job.problems:
        click.echo(f"dashinfer-vlm: {problem}", err=True)
    click.echo(f"{counted(job.num_converted, 'page')} converted, {len(job.problems)} failed. Files: {output}", err=True)
    sys.exit(1 if job.problems else 0)


class PageProgress(RateProgress):
    """Progress with the pages per minute of this run.

    Args:
        files: number of files; of those that are not open yet, as many pages are expected as of the others.
    """

    noun: ClassVar[str] = "pages"

    def __init__(self, files: int) -> None:
        self._files = files
        self._pages: list[int] = []
        super().__init__(total=files, desc="Pages")

    def open_file(self, pages: int) -> None:
        """Count the pages that a file needs."""
        self._pages.append(pages)
        self.total = round(sum(self._pages) * self._files / len(self._pages))

    def skip_file(self) -> None:
        """Leave out a file that needs no pages."""
        self._files -= 1


@dataclass(kw_only=True)
class _Job:
    """One run.

    Attributes:
        pages: the pages so far.
        problems: a line for each file and each page that failed.
        num_converted: the number of pages with text.
    """

    pages: PagesFile
    problems: list[str] = field(default_factory=list)
    num_converted: int = 0

    async def process(self, engine: AnyEngine, source: Source, progress: PageProgress) -> None:
        try:
            data = await asyncio.to_thread(source.read)
        except DashInferVLMError as error:
            self.problems.append(error.message)
            progress.skip_file()
            return
        digest = await asyncio.to_thread(digest_of, data)
        if self.pages.is_complete(digest):
            progress.skip_file()
        else:
            await self._convert(engine, source, data, digest, progress)
        self.pages.add_name(source, digest)
        if text := self.pages.markdown(digest):
            source.write(text)

    async def _convert(
        self, engine: AnyEngine, source: Source, data: bytes, digest: str, progress: PageProgress
    ) -> None:
        document = await asyncio.to_thread(source.document, data)
        before = self.pages.errors(digest)
        reported: list[tuple[int, str]] = []

        async def convert(each: ChatEngine) -> None:
            await self._convert_missing(each, source, document, digest, progress)

        try:
            await with_retries(engine, convert)
        except DashInferVLMError as error:
            self.problems.append(f"{source.path}: {error.message}")
            reported = before
        errors = [error for error in self.pages.errors(digest) if error not in reported]
        self.problems += [f"{source.path}, page {index + 1}: {message}" for index, message in errors]

    async def _convert_missing(
        self, engine: ChatEngine, source: Source, document: dict[str, Any], digest: str, progress: PageProgress
    ) -> None:
        total = self.pages.total(digest)
        missing = self.pages.missing(digest)
        try:
            if total is None:
                await self._request(engine, source, {"document": document}, digest, progress)
        except MediaTooLarge as error:
            if not (found := _NUM_PAGES.search(error.message)):
                raise
            total = int(found[1])
            missing = list(range(total))
        if missing:
            progress.open_file(len(missing))
        for start in range(0, len(missing), MAX_INDICES):
            request = {"document": document, "pages": missing[start : start + MAX_INDICES]}
            await self._request(engine, source, request, digest, progress, total=total)

    async def _request(
        self,
        engine: ChatEngine,
        source: Source,
        request: dict[str, Any],
        digest: str,
        progress: PageProgress,
        *,
        total: int | None = None,
    ) -> None:
        async with contextlib.aclosing(engine.aocr(request)) as chunks:
            async for chunk in chunks:
                if total is None:
                    total = chunk.total_pages
                    progress.open_file(total)
                self.pages.add(source, digest, chunk.page, total)
                progress.update()
                self.num_converted += chunk.page.error is None


def _run(job: _Job, sources: Sequence[Source], source: EngineSource) -> None:
    with source.open() as engine, PageProgress(len(sources)) as progress:

        async def work(each: Source) -> None:
            await job.process(engine, each, progress)

        asyncio.run(run_concurrently(sources, work, max_concurrency=MAX_FILES))
