"""Run DashInfer in a separate process under its own interpreter, so that a crash affects only its requests.

    python -I worker.py serve FD    serve the parent, which has the other end of the socket FD
    python -I worker.py check       load DashInfer and print the findings as JSON

This file imports nothing from this package. It requires only numpy and DashInfer's extension, neither torch nor
transformers, and is compatible with Python 3.8. The parent imports `pack` and `head_length` from here, so that both
ends use the same frame format.

Frames. In both directions, a frame is: uint32 (little endian), the length of the head; the head, a JSON object in
UTF-8; then the bytes of the arrays that `head["arrays"]` lists as [numpy dtype, shape], in that order.

    parent -> worker
        {"do": "load", "model": AsModelConfig's arguments}
        {"do": "start", "id": n, "options": generate_config, "keys": [placeholder, ...]}
            arrays: token ids int64 [1, length]; and if there are keys: positions int32 [3, 1, length], then for each
            key the embedding of its span float32 [rows, hidden_size] and the content digest int32 [8]
        {"do": "stop", "id": n}
    worker -> parent
        {"is": "ready", "version": text}
        {"is": "tokens", "of": [[n, [token id, ...], [[logprob, [[id, logprob], ...]], ...] or null, cached], ...]}
        {"is": "failed", "id": n, "why": text}      rejected or aborted by DashInfer
        {"is": "released", "id": n}                 the last frame of a request: its slot is free

Lifecycle. When the parent's thread that started it ends, however it died, the kernel kills the process, even while
DashInfer loads and holds the GIL.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.machinery
import importlib.util
import json
import math
import os
import queue
import signal
import socket
import struct
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterable

if TYPE_CHECKING:
    import numpy.typing as npt

HEAD = struct.Struct("<I")
MAX_HEAD_BYTES = 1 << 28
NAME = "model"
POLL_SECONDS = 0.001
PR_SET_PDEATHSIG = 1  # linux/prctl.h

DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
CUDA_LIBRARIES = (
    "libcudart.so.12",
    "libcublasLt.so.12",
    "libcublas.so.12",
    "libnvJitLink.so.12",
    "libcusparse.so.12",
    "libnccl.so.2",
)
"""In the order of their dependencies; once loaded, a library is found by its name."""

STUBS = "cpu-only"
"""Folder of the environment with stub libraries: of the driver's libraries if there is no driver, or of all of these
libraries if DashInfer was installed for the CPU only."""


# Frames


def pack(head: dict[str, Any], arrays: Iterable[npt.NDArray[Any]] = ()) -> list[bytes | memoryview]:
    """Serialize `head` (a dict) and C-contiguous numpy arrays to a frame, as a list of bytes-like pieces."""
    listed = [[array.dtype.str, list(array.shape)] for array in arrays]
    body = json.dumps({**head, "arrays": listed} if listed else head).encode()
    return [HEAD.pack(len(body)), body, *(array.data.cast("B") for array in arrays if array.size)]


def head_length(prefix: bytes | bytearray) -> int:
    length: int = HEAD.unpack(prefix)[0]
    if length > MAX_HEAD_BYTES:
        raise ValueError("a frame's head of %d bytes" % length)
    return length


class Connection:
    """The worker's end of the socket; `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, head: dict[str, Any]) -> None:
        with self._lock:
            self._sock.sendall(b"".join(pack(head)))

    def receive(self) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
        """Receive the next frame as (head, arrays). The arrays are writable, as DLPack requires. EOFError at the
        end."""
        import numpy

        head = json.loads(self._read(head_length(self._read(HEAD.size))))
        arrays = []
        for dtype, shape in head.pop("arrays", ()):
            size = numpy.dtype(dtype).itemsize * math.prod(shape)
            arrays.append(numpy.frombuffer(self._read(size), dtype=dtype).reshape(shape))
        return head, arrays

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        if self._file.readinto(data) < size:
            raise EOFError
        return data


# DashInfer


def load_libraries() -> None:
    """Load by path the libraries that DashInfer's extension links, so that no LD_LIBRARY_PATH is needed.

    A CPU-only environment loads only its stub libraries, whatever the machine has. They define few functions, so these
    are resolved when they are first called.
    """
    folders = [sysconfig.get_config_var("LIBDIR") or "", os.path.join(sys.base_prefix, "lib"), None]
    _preload("libpython%d.%d.so.1.0" % sys.version_info[:2], folders)
    stubs = os.path.join(sys.prefix, STUBS)
    for name in (*DRIVER_LIBRARIES, *CUDA_LIBRARIES):
        installed = [os.path.dirname(path) for path in _find("nvidia/*/lib/" + name)]
        _preload(name, [stubs] if is_cpu_only() else [*installed, None, *glob.glob(stubs)])
    sys.setdlopenflags(os.RTLD_LAZY)


def is_cpu_only() -> bool:
    """Whether this interpreter's environment was installed for the CPU only."""
    return os.path.exists(os.path.join(sys.prefix, STUBS, CUDA_LIBRARIES[0]))


def load_extension() -> Any:
    """DashInfer's extension module, without its Python package, which would import torch."""
    load_libraries()
    paths = _find("dashinfer/allspark/_allspark.cpython-*.so")
    if not paths:
        raise ImportError("dashinfer is not installed here")
    loader = importlib.machinery.ExtensionFileLoader("_allspark", paths[0])
    spec = importlib.util.spec_from_loader("_allspark", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _preload(name: str, folders: Iterable[str | None]) -> ctypes.CDLL:
    """Load a library from the first folder that has it (None: the system's search path), or raise the last error."""
    error = ImportError("%s was not found" % name)
    for folder in folders:
        try:
            return ctypes.CDLL(os.path.join(folder, name) if folder else name, ctypes.RTLD_GLOBAL)
        except OSError as failure:
            error = ImportError(str(failure))
    raise error


def _find(pattern: str) -> list[str]:
    return [path for folder in sys.path if folder for path in sorted(glob.glob(os.path.join(folder, pattern)))]


@dataclass
class ActiveRequest:
    """A request in DashInfer. Its capsules and arrays are kept, since DashInfer reads them without a copy."""

    number: int
    handle: Any
    results: Any
    kept: list[Any]
    logprobs: bool
    status: Any = None


def contents_by_key(keys: list[int], arrays: list[npt.NDArray[Any]]) -> dict[str, list[Any]]:
    """The contents of MultiMediaInfo for placeholder spans in prompt order; each key is a placeholder's token id."""
    if not keys:
        return {}
    capsules = [array.__dlpack__() for array in arrays]
    contents: dict[str, list[Any]] = {"positions": capsules[:1], "hash_input": capsules[2::2]}
    for key, embedding in zip(keys, capsules[1::2]):
        contents.setdefault(str(key), []).append(embedding)
    return contents


class Service:
    """Runs requests in three threads: the main thread starts them, `_pump` sends tokens, and `_reap` stops and releases
    them, which waits for DashInfer's step. Only `_pump` reads a request, and `_reap` gets it only after that.
    """

    def __init__(self, extension: Any, connection: Connection, model: dict[str, Any]) -> None:
        self._extension = extension
        self._connection = connection
        self._engine = extension.AsEngine()
        self._engine._build_model_from_as_model_config(extension.AsModelConfig(model_name=NAME, **model))
        self._check(self._engine._start_model(NAME))
        self._end_statuses = (
            extension.GenerateRequestStatus.GenerateFinished,
            extension.GenerateRequestStatus.GenerateInterrupted,
        )
        self._changed = threading.Condition()
        self._requests: dict[int, ActiveRequest] = {}
        self._stops: set[int] = set()
        self._finished: queue.Queue[ActiveRequest] = queue.Queue()
        for work in (self._pump, self._reap):
            threading.Thread(target=_exit_on_error, args=(work,), daemon=True).start()

    @property
    def version(self) -> str:
        return str(self._engine.get_version_full())

    def start(self, head: dict[str, Any], arrays: list[npt.NDArray[Any]]) -> None:
        try:
            request = self._start(head, arrays)
        except Exception as error:  # any error must fail only this request
            self._connection.send({"is": "failed", "id": head["id"], "why": str(error)})
            self._connection.send({"is": "released", "id": head["id"]})
            return
        with self._changed:
            self._requests[request.number] = request
            self._changed.notify()

    def stop(self, number: int) -> None:
        with self._changed:
            self._stops.add(number)
            self._changed.notify()

    def _start(self, head: dict[str, Any], arrays: list[npt.NDArray[Any]]) -> ActiveRequest:
        import numpy

        mask = numpy.ones_like(arrays[0])
        inputs = {"input_ids": arrays[0].__dlpack__(), "attention_mask": mask.__dlpack__()}
        options = dict(head["options"])
        contents = contents_by_key(head["keys"], arrays[1:])
        if contents:
            options["mm_info"] = self._media(contents)
        status, handle, results = self._engine._start_request(NAME, inputs, options)
        self._check(status)
        kept = [arrays, mask, inputs, options, contents]
        return ActiveRequest(head["id"], handle, results, kept, options["logprobs"])

    def _media(self, contents: dict[str, list[Any]]) -> Any:
        info = self._extension.MultiMediaInfo()
        info.set_multimedia_type(0)
        for key, capsules in contents.items():
            info.add_multimedia_content(key, capsules)
        return info

    def _check(self, status: Any) -> None:
        if status != self._extension.AsStatus.ALLSPARK_SUCCESS:
            raise RuntimeError(str(status))

    def _pump(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests)
                requests = list(self._requests.values())
                stops = self._stops & set(self._requests)
                self._stops.clear()
            outputs = [self._read_tokens(request) for request in requests if request.number not in stops]
            outputs = list(filter(None, outputs))
            if outputs:
                self._connection.send({"is": "tokens", "of": outputs})
            done = [request for request in requests if request.number in stops or request.status in self._end_statuses]
            for request in done:
                with self._changed:
                    del self._requests[request.number]
                self._finished.put(request)
            if not outputs and not done:
                time.sleep(POLL_SECONDS)

    def _read_tokens(self, request: ActiveRequest) -> list[Any] | None:
        """Read the new tokens of a request. The status is read first: a request may be finished while tokens are still
        queued, and has ended only if none were left after that.
        """
        status = request.results.GenerateStatus()
        element = request.results.GetNoWait()
        ids = list(element.ids_from_generate) if element is not None else []
        if not ids:
            request.status = status
            return None
        logprobs = None
        if request.logprobs:
            logprobs = list(zip(element.token_logprobs_list, element.log_probs_list))
        return [request.number, ids, logprobs, element.prefix_cache_len]

    def _reap(self) -> None:
        while True:
            request = self._finished.get()
            self._engine._stop_request(NAME, request.handle)
            self._engine._release_request(NAME, request.handle)
            if request.status == self._extension.GenerateRequestStatus.GenerateInterrupted:
                self._connection.send({"is": "failed", "id": request.number, "why": str(request.status)})
            self._connection.send({"is": "released", "id": request.number})
            del request


def _exit_on_error(work: Callable[[], None]) -> None:
    # Otherwise requests would wait forever; the parent starts another process.
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def serve(descriptor: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)  # DashInfer prints to stdout; all of it goes to the log
    os.environ.setdefault("GLOG_minloglevel", "2")
    connection = Connection(socket.socket(fileno=descriptor))
    load, _ = connection.receive()
    if is_cpu_only() and not load["model"]["compute_unit"].startswith("CPU"):
        raise RuntimeError("DashInfer is installed for the CPU only: run `dashinfer-vlm dashinfer install` for a GPU.")
    service = Service(load_extension(), connection, load["model"])
    connection.send({"is": "ready", "version": service.version})
    while True:
        head, arrays = connection.receive()
        if head["do"] == "start":
            service.start(head, arrays)
        else:
            service.stop(head["id"])


def check() -> None:
    os.environ.setdefault("GLOG_minloglevel", "2")
    findings = {"python": "%d.%d.%d" % sys.version_info[:3]}
    try:
        findings["version"] = load_extension().AsEngine().get_version_full()
    except Exception as error:
        findings["problem"] = str(error)
    print(json.dumps(findings), flush=True)


def main() -> None:
    if sys.argv[1] == "check":
        check()
        return
    try:
        serve(int(sys.argv[2]))
    except (EOFError, OSError):  # the parent closed its end, or died
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)  # a regular exit would stop DashInfer, which aborts while requests run


if __name__ == "__main__":
    main()
