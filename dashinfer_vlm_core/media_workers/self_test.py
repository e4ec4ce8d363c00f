"""Whether decoders work in a sandbox: sample files are decoded in a process that is restricted by it."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..config.limits import Limits
from ..media.documents import Document
from ..media.image import decode_image
from ..media.types import VideoReader
from ..media.video import undecodable_error
from ..protocol import DocumentPart
from .sandbox import Sandbox
from .seccomp import build_filter, has_list

SAMPLES: Path = Path(__file__).with_name("samples")
"""A file of each image format and each video codec, and a document; `python -m tests.media_samples` writes them."""
MEMORY_BYTES = 512 << 20
MAX_SECONDS = 20
"""After this time, the process ends, and the samples that are left count as not decoded."""


def prepare_tested_sandbox(readers: Sequence[VideoReader]) -> tuple[Sandbox, str]:
    """Return the strictest sandbox in which the samples are decoded, and a warning if it is not the strictest one.

    This process must have imported the decoders, and have no threads.

    Args:
        readers: the video readers that are installed.
    """
    by_list = has_list(platform.machine())
    sandbox = Sandbox.prepare(by_list=by_list)
    denying = replace(sandbox, filter=build_filter(by_list=False))
    failed = undecodable_samples(sandbox, readers) if by_list else set()
    if failed:
        failed -= undecodable_samples(denying, readers)  # a library may lack a codec
    if not failed:
        return sandbox, ""
    return denying, (
        f"With the system calls of the list, media workers cannot decode {', '.join(sorted(failed))}. They may use all"
        " calls that are not denied instead. Report this, with the versions of Pillow, the video library and libc."
    )


def undecodable_samples(sandbox: Sandbox, readers: Sequence[VideoReader]) -> set[str]:
    """Return which samples cannot be decoded in a process that is restricted by `sandbox`."""
    decoders = _decoders(readers)
    output, pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(sandbox, decoders, pipe)
    os.close(pipe)
    with open(output) as file:  # noqa: PTH123  a descriptor has no Path
        decoded = file.read()
    os.waitpid(pid, 0)
    return set(decoders) - set(decoded.splitlines())


def _decoders(readers: Sequence[VideoReader]) -> Mapping[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for file in sorted(SAMPLES.iterdir()):
        data = file.read_bytes()
        if file.name.startswith("image."):
            found[file.name] = partial(decode_image, data, path="", max_pixels=10_000, background=(0, 0, 0))
        elif file.suffix == ".pdf":
            found[file.name] = partial(_render_document, data)
        else:
            found |= {f"{file.name} ({reader.name})": partial(_decode_video, reader, data) for reader in readers}
    return found


def _decode_video(reader: VideoReader, data: bytes) -> None:
    video = reader.open(data)
    if len(list(video.frames([0, video.info.frames - 1], lambda: None))) < 2:
        raise undecodable_error()


def _render_document(data: bytes) -> None:
    from ..media import pdf  # PDFium is loaded in workers only

    document = DocumentPart(path="", url="")
    (page,) = pdf.read_pages(document, data, Limits())
    (image,) = Document(file=data, pages=(page,)).images(document)
    if not page.text or pdf.render_page(image, data, (16, 16)).getextrema() == ((255, 255),) * 3:
        raise undecodable_error()


def _run(sandbox: Sandbox, decoders: Mapping[str, Callable[[], object]], output: int) -> None:
    signal.alarm(MAX_SECONDS)  # its default action ends the process
    try:
        sandbox.restrict([output], memory_bytes=MEMORY_BYTES)
        for name, decode in decoders.items():
            with contextlib.suppress(Exception):  # a library can raise anything if a system call is denied
                decode()
                os.write(output, f"{name}\n".encode())
    finally:
        os._exit(0)
