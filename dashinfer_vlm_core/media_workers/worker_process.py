"""The program of the fork server and of its children, the media workers.

The fork server has imported the decoders and has no threads. A worker therefore starts in milliseconds, shares its
memory, and inherits no state of the engine or of an earlier file. Messages to the fork server, each a packet with JSON:

    {"prepare": {...}}              load this setup, and test its sandbox
    {"fork": id, "setup": {...}}    with the worker's end of a pair of sockets, and its shared memory
    {"kill": id}
    {"lower_priority": id}
    {"test": [...]}                 with a socket for the sandbox's warning: test the sandbox with these video readers

It ends when the engine closes the connection, or after a minute without workers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cachetools import LRUCache
from PIL import Image as PILImage

from ..config import EngineConfig
from ..errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from ..media.decoder import MediaDecoder
from ..media.image import out_of_memory_error
from ..media.types import Embeddings, Image, Media, OpenVideo, VideoReader
from ..models.interface import ImageProcessor
from ..models.patches import least_tokens
from ..protocol import DocumentPart, MediaPart
from . import wire
from .sandbox import Sandbox, lower_memory_limit, readable_paths
from .self_test import prepare_tested_sandbox
from .shared_memory import SharedMemory
from .threads import process_media
from .wire import Disconnected, ErrorResponse, JobRequest, PageResponse, PatchesResponse, Started, WorkerResponse

MAX_PACKET_BYTES = 1 << 17
IDLE_SECONDS = 60
MAX_LOG_RECORDS = 5
LOW_PRIORITY = 19
PIECE_BYTES = 1 << 16
HEADER_BYTES = 128 << 20
"""Memory in which a video is opened, and the size of its file: tables of a few bytes can claim millions of samples.
FFmpeg's tables of 3.5 million samples fit. A video of ten minutes has 144,000 at 240 frames per second; one in 8K is
opened in 16 MiB."""

_SANDBOXES: dict[object, tuple[Sandbox, str]] = {}
"""By the readers that were tested and the packages that were imported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What the workers of one engine use.

    Attributes:
        decoder: decodes files.
        processor: processes images and videos.
        sandbox: restricts them.
        warning: how it is less strict than it should be, if it is.
        memory_bytes: how much memory a worker may allocate.
    """

    decoder: MediaDecoder
    processor: ImageProcessor
    sandbox: Sandbox
    warning: str
    memory_bytes: int


class HeaderLimitedReader(VideoReader):
    """A video reader that opens files in little memory, and decodes their frames in all memory of the worker.

    Args:
        reader: opens the files.
        memory_bytes: how much memory the worker may allocate.
    """

    def __init__(self, reader: VideoReader, memory_bytes: int) -> None:
        self._reader = reader
        self._memory_bytes = memory_bytes
        self.name = reader.name

    def available(self) -> bool:
        return self._reader.available()

    def open(self, data: bytes) -> OpenVideo:
        with lower_memory_limit(self._memory_bytes - HEADER_BYTES - len(data)):
            return self._reader.open(data)


def main(control: int) -> None:
    """Serve the engine that has the other end of `control`."""
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the engine, which then ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    PILImage.init()  # imports all codecs now, rather than when the first image of a format is opened
    _ForkServer(socket.socket(fileno=control)).serve()


class _ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}
        self._setups: LRUCache[str, WorkerSetup] = LRUCache(8)
        self._wakeup, wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            ready = [file for file, _ in poll.poll(IDLE_SECONDS * 1000)]
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
            self._reap()
            if self._control.fileno() in ready:
                packet, files, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 2)
                if not packet:
                    break
                self._handle(json.loads(packet), files)
            if not ready and not self._children:
                break
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        # A process id stays reserved until here, so `_handle` reaches no other process.
        for worker, pid in list(self._children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._children[worker]

    def _handle(self, message: Mapping[str, Any], files: list[int]) -> None:
        if "fork" in message:
            sock = socket.socket(fileno=files[0])
            memory = SharedMemory(files[1])
            try:
                self._fork(message["fork"], message["setup"], sock, memory)
            finally:
                sock.close()
                memory.close()
        elif "prepare" in message:
            with contextlib.suppress(Exception):  # reported for the first file
                self._setup(message["prepare"])
        elif "test" in message:
            with socket.socket(fileno=files[0]) as sock:
                _send_started(sock, Started(warning=_tested_sandbox(message["test"])[1]))
        elif (pid := self._children.get(message.get("kill", message.get("lower_priority")))) is None:
            pass  # it has ended
        elif "kill" in message:
            os.kill(pid, signal.SIGKILL)
        else:
            os.setpriority(os.PRIO_PROCESS, pid, LOW_PRIORITY)

    def _fork(self, worker: int, setup: dict[str, Any], sock: socket.socket, memory: SharedMemory) -> None:
        try:
            made = self._setup(setup)
            pid = os.fork()
        except Exception:  # noqa: BLE001  reported to the engine
            _send_started(sock, Started(failed=traceback.format_exc(limit=-3)[:4000]))
            return
        if pid == 0:
            _run_worker(sock, memory, made)
        self._children[worker] = pid

    def _setup(self, setup: dict[str, Any]) -> WorkerSetup:
        key = json.dumps(setup, sort_keys=True)
        if key not in self._setups:
            self._setups[key] = _load_setup(setup)
            gc.freeze()  # a collection in a child would copy the pages that both share
        return self._setups[key]


def _send_started(sock: socket.socket, started: Started) -> None:
    with contextlib.suppress(ConnectionError):  # the request was canceled
        wire.send(sock, started)


def _load_setup(setup: Mapping[str, Any]) -> WorkerSetup:
    config = EngineConfig(**setup["config"])
    family = resolve_reference(setup["family"])
    spec = family.load_spec(Path(setup["folder"]))
    memory_bytes: int = setup["memory_bytes"]
    readers = [HeaderLimitedReader(resolve_reference(reader), memory_bytes) for reader in setup["readers"]]
    processor = family.image_processor(spec, config)
    sandbox, warning = _tested_sandbox(setup["readers"])  # after all imports
    return WorkerSetup(
        decoder=MediaDecoder(config=config, readers=readers, policy=spec.video.with_config(config)),
        processor=processor,
        sandbox=sandbox,
        warning=warning,
        memory_bytes=memory_bytes,
    )


def _tested_sandbox(readers: Sequence[Sequence[str]]) -> tuple[Sandbox, str]:
    installed = [reader for reader in map(resolve_reference, readers) if reader.available()]
    for reader in installed:
        with contextlib.suppress(ImportError, OSError):  # reported for the first video
            reader.preload()
    importlib.import_module("dashinfer_vlm_core.media.pdf")  # not before: PDFium is loaded in workers only
    key = (tuple(map(tuple, readers)), tuple(readable_paths()))
    if key not in _SANDBOXES:
        _SANDBOXES[key] = prepare_tested_sandbox(installed)
    return _SANDBOXES[key]


def resolve_reference(reference: Sequence[str]) -> Any:
    """Return the object that `reference_to` describes."""
    module, name, kind = reference
    found = getattr(importlib.import_module(module), name)
    return found() if kind == "class" else found


def reference_to(item: object) -> tuple[str, str, str] | None:
    """Describe an object so that another process can import it: a global, or an instance of a class without state.

    Returns:
        (module, name, "object" or "class"), or None if it can only be used in this process.
    """
    kind = type(item)
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "__main__":
        return None
    for name, value in vars(module).items():
        if value is item:
            return kind.__module__, name, "object"
    is_global = getattr(module, kind.__qualname__, None) is kind
    if not is_global or getattr(item, "__dict__", None) or kind.__init__ is not object.__init__:
        return None
    return kind.__module__, kind.__qualname__, "class"


def _run_worker(sock: socket.socket, memory: SharedMemory, setup: WorkerSetup) -> None:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        setup.sandbox.restrict([sock.fileno(), memory.file], memory_bytes=setup.memory_bytes)
        logs = _LogCollector()
        logging.basicConfig(handlers=[logs], level=logging.WARNING, format="%(name)s: %(message)s", force=True)
        logging.captureWarnings(capture=True)
        wire.send(sock, Started(ready=os.getpid(), warning=setup.warning))
        while True:
            _serve_job(sock, memory, setup, logs)
    except (Disconnected, ConnectionError):
        pass
    except BaseException:  # noqa: BLE001  also the exceptions that would end a program, which runs in the parent's stack
        os._exit(1)
    os._exit(0)


def _serve_job(sock: socket.socket, memory: SharedMemory, setup: WorkerSetup, logs: _LogCollector) -> None:
    job = JobRequest.model_validate_json(wire.receive_head(sock))
    try:
        data = _receive_files(sock, job.sizes)
        response = _process(job, data, setup, memory)
    except (InvalidParameter, MediaTooLarge, MediaUndecodable) as error:
        response = WorkerResponse(error=ErrorResponse.of(error))
    except MemoryError:
        response = WorkerResponse(error=ErrorResponse.of(out_of_memory_error(job.part.subject, job.part.path)))
    except (Disconnected, ConnectionError):
        raise
    except Exception:  # noqa: BLE001  reported to the engine
        response = WorkerResponse(exception=traceback.format_exc(limit=-5)[:8000])
    wire.send(sock, response.model_copy(update={"logs": logs.take()}))


def _receive_files(sock: socket.socket, sizes: Sequence[int]) -> list[bytes]:
    files: list[bytes] = []
    rest = sum(sizes)
    try:
        for size in sizes:
            files.append(wire.receive(sock, size))
            rest -= size
    except MemoryError:  # nothing of that file was received: `recv` allocates first
        files.clear()
        while rest:  # it would be read as the next job
            rest -= len(wire.receive(sock, min(rest, PIECE_BYTES)))
        raise
    return files


def _process(job: JobRequest, data: Sequence[bytes], setup: WorkerSetup, memory: SharedMemory) -> WorkerResponse:
    part = job.part
    if isinstance(part, DocumentPart):
        return _read_document(part, data[0], setup, memory)
    media: Media
    if part.page is not None:
        media = _render_page(part, data[0], setup.processor)
    else:
        media = setup.decoder.decode(part, data, lambda: None, setup.processor.frame_resizer)
    assert not isinstance(media, Embeddings)
    tokens = setup.processor.count_tokens(media)
    if least_tokens(tokens, part).exceeds(job.max_tokens):
        return WorkerResponse(tokens=tokens)
    patches = process_media(setup.processor, media)
    memory.write(patches.pixels)
    return WorkerResponse(patches=PatchesResponse.model_validate(patches, from_attributes=True))


def _read_document(part: DocumentPart, data: bytes, setup: WorkerSetup, memory: SharedMemory) -> WorkerResponse:
    from ..media import pdf

    pages = pdf.read_pages(part, data, setup.decoder.config.limits)
    texts = [page.text.encode() for page in pages]
    if any(texts):
        memory.write(np.frombuffer(b"".join(texts), np.uint8))
    return WorkerResponse(
        pages=tuple(
            PageResponse(
                number=page.number,
                width=page.width,
                height=page.height,
                text_bytes=len(text),
                error=ErrorResponse.of(page.error) if page.error else None,
            )
            for page, text in zip(pages, texts, strict=True)
        )
    )


def _render_page(part: MediaPart, data: bytes, processor: ImageProcessor) -> Image:
    from ..media import pdf

    size = processor.size(Image.of_page(part))
    return Image.of_page(part, pdf.render_page(part, data, size))


class _LogCollector(logging.Handler):
    """Collects the first warnings of a job, so that a file cannot flood the engine's log."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[str] = []
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._records) < MAX_LOG_RECORDS:
            text = self.format(record)[:500]
            self._records.append("".join(character if character.isprintable() else " " for character in text))
        else:
            self._dropped += 1

    def take(self) -> tuple[str, ...]:
        """Return and forget the collected messages."""
        records = self._records
        if self._dropped:
            records.append(f"{self._dropped} more warnings")
        self._records = []
        self._dropped = 0
        return tuple(records)
