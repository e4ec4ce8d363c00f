"""Engines in separate processes: started once, stopped while another one is measured."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO

import httpx

from dashinfer_vlm_core import EngineConfig

from .client import EngineTarget, HTTPTarget, authorization
from .environments import MNN, OPENVINO, VLLM, OtherEngines, SetupMissing, vllm_environment
from .limits import cores
from .llama_cpp import PRECISIONS, SLOTS, SOURCES, LlamaCpp

VLLM_PRECISIONS = {
    "vllm": "bfloat16",
    "vllm-int8": "text model with weights and activations of 8 bits",
    "vllm-int4": "text model with weights of 4 bits in groups of 128",
}
"""What each of vLLM's names in the table computes with."""

NOT_FOUND = 404

READY = "/health/ready"
"""This project's server lists its model while it still loads."""

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "DASHINFER_VLM_CPU_KERNELS": "avx2",
}
"""Environment variables that keep this engine, torch and oneDNN from using AVX-512."""

MAX_PIXELS = 1_003_520
"""The largest image of the workloads that compare engines."""

START_SECONDS = 900.0
"""vLLM's CPU build compiles for minutes."""
SHUTDOWN_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start an engine.

    Attributes:
        name: its name in the table.
        command: the command of a server with OpenAI's API; `{port}` is replaced by its port.
        environment: additional environment variables.
        note: a remark for the table.
        reuses_connections: whether clients may send several requests on a connection.
        api_key: the API key that it requires, if any.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    reuses_connections: bool = True
    api_key: str = ""


class Server:
    """A running server and all processes that it started.

    Attributes:
        name: the engine's name.
        base: the address of its API.
        api_key: the API key that it requires, if any.
        ready_seconds: seconds from its start until it was ready.
    """

    def __init__(self, launch: Launch, log: Path) -> None:
        self.name = launch.name
        self.api_key = launch.api_key
        self._reuses_connections = launch.reuses_connections
        port = free_port()
        self.base = f"http://127.0.0.1:{port}/v1"
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [part.replace("{port}", str(port)) for part in launch.command]
        # `heavy` schedulers and shells may have set it to less: every engine gets all cores.
        environment = {**os.environ, "OMP_NUM_THREADS": str(cores()), "HF_HUB_OFFLINE": "1", **launch.environment}
        begin = time.perf_counter()
        with log.open("wb") as output:
            self._process = _spawn(command, environment, output)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        self.ready_seconds = time.perf_counter() - begin

    def target(self, model: str = "") -> HTTPTarget:
        """Return a client of one of its models, by default the first."""
        return HTTPTarget(self.base, reuses_connections=self._reuses_connections, api_key=self.api_key, model=model)

    def pause(self) -> None:
        """Stop all of its threads: spinning ones would take the cores from the next engine."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def peak_bytes(self) -> int:
        """Return the sum of its processes' peak resident memory."""
        return sum(_peak(process) for process in members(self._process.pid))

    def resident_bytes(self) -> int:
        """Return the resident memory of its processes; memory that several of them share counts once."""
        return sum(_resident(process) for process in members(self._process.pid))

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time of its running processes by the first word of their command lines."""
        found: dict[str, float] = defaultdict(float)
        for process in members(self._process.pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = Path(f"/proc/{process}/cmdline").read_text().partition("\0")[0]
                found[name] += _cpu_seconds(process)
        return found

    def log_tail(self) -> str:
        """Return the last lines of its output."""
        return "\n" + "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def stop(self) -> None:
        try:
            for number in (signal.SIGCONT, signal.SIGTERM):
                self._signal(number)
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{self.name} does not exit and is killed", flush=True)
        finally:  # also after an interruption
            self._signal(signal.SIGKILL)  # also remaining child processes
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in members(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        address, headers = self.base.removesuffix("/v1"), authorization(self.api_key)
        # One client: creating one per request would take CPU time from the starting engine.
        with httpx.Client(base_url=address, headers=headers, trust_env=False, timeout=5) as client:
            while time.monotonic() < end:
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self.name} ended with {self._process.returncode}: {self.log_tail()}")
                with contextlib.suppress(httpx.TransportError):
                    if _is_available(client, "/v1/models") and _is_available(client, READY, missing=True):
                        return
                time.sleep(0.02)
        raise RuntimeError(f"{self.name} was not ready after {START_SECONDS:.0f} s: {self.log_tail()}")


def _is_available(client: httpx.Client, path: str, *, missing: bool = False) -> bool:
    """Return whether a page is available; `missing` is the result for an unknown page."""
    response = client.get(path)
    return missing if response.status_code == NOT_FOUND else response.is_success


class InProcess:
    """This engine in this process, with the same interface: the difference is the server's overhead.

    Attributes:
        name: its name in the table.
    """

    def __init__(self, name: str, model: str) -> None:
        import torch

        from dashinfer_vlm_core import Engine

        torch.set_num_threads(cores())
        self.name = name
        self._engine = Engine(EngineConfig(model=model)).start()

    def target(self) -> EngineTarget:
        return EngineTarget(self._engine)

    def pause(self) -> None:
        """Do nothing: the engine is idle without requests."""

    def resume(self) -> None:
        """See `pause`."""

    def stop(self) -> None:
        self._engine.close()


Contender = Server | InProcess


def ours(name: str, model: str, *options: str) -> Launch:
    """Return the launch of this environment's server with options of `dashinfer-vlm serve`."""
    program = str(Path(sysconfig.get_path("scripts")) / "dashinfer-vlm")
    return Launch(name=name, command=(program, "serve", "--port", "{port}", "--model", model, *options))


def configured(name: str, config: EngineConfig, folder: Path, *options: str) -> Launch:
    """Return the launch of this environment's server with the options that a configuration sets, written to `folder`.

    Args:
        name: its name in the table.
        config: the model, and the options.
        folder: the folder.
        options: further options, which override the others.
    """
    file = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(config.model_dump_json(exclude_unset=True, exclude={"model"}))
    return ours(name, config.model, "--config", str(file), *options)


def custom(given: str, model: str) -> Launch:
    """Parse NAME=COMMAND, with {model} and {port} in the command, or NAME=--OPTION ... for this project's server."""
    name, _, command = given.partition("=")
    parts = shlex.split(command)
    if not parts or parts[0].startswith("--"):
        return ours(name, model, *parts)
    return Launch(name=name, command=tuple(part.replace("{model}", model) for part in parts))


def other_engine(
    name: str,
    model: Path,
    other_engines: OtherEngines,
    *,
    avx2: bool = False,
    max_pixels: int = MAX_PIXELS,
    slots: int = SLOTS,
) -> Launch:
    """Return the launch of another engine, after installing it and converting the model for it.

    Args:
        name: its name in the table.
        model: the checkpoint's folder.
        other_engines: where it is installed.
        avx2: whether it must not use AVX-512; `AVX2` has to be in the environment, too.
        max_pixels: the largest image; only vLLM requires it.
        slots: maximum number of concurrent requests; only llama.cpp requires it, whose context they share.

    Raises:
        SetupMissing: it cannot be installed here, or it cannot be restricted.
        ValueError: there is no such engine.
    """
    if name in VLLM_PRECISIONS:
        return _vllm(name, model, other_engines, avx2=avx2, max_pixels=max_pixels)
    if name == "transformers":
        script = str(other_engines.script("transformers_server.py"))
        note = (
            f"transformers {version('transformers')}, generate() over the waiting requests, up to 16 at once; the next"
            " batch starts when the last has ended"
        )
        return Launch(name=name, command=(sys.executable, script, str(model), "{port}"), note=note)
    if name.startswith(("llama-", "ik-llama-")):
        return _llama_cpp(name, model, other_engines, avx2=avx2, slots=slots)
    if name.startswith("mnn-"):
        if avx2:
            raise SetupMissing("it chooses instructions by the processor alone")
        return _mnn(name, model, other_engines)
    if not name.startswith("openvino-"):
        raise ValueError(f"there is no engine {name!r}")
    precision = name.removeprefix("openvino-")
    python = other_engines.openvino()
    exported = other_engines.exported(model, precision)
    script = str(other_engines.script("openvino_server.py"))
    # It would choose bfloat16 by the processor, for which oneDNN has no kernels with AVX2.
    hint = ("f32",) if avx2 else ()
    command = (str(python), script, str(exported), "{port}", str(cores()), *hint)
    note = (
        f"{OPENVINO[0]}, VLMPipeline for 1 user, ContinuousBatchingPipeline with prefix cache for more, behind a plain"
        " HTTP server; both are loaded at once, so that its memory holds the weights twice"
    )
    if avx2:
        note += "; oneDNN is restricted to AVX2, MLAS in it is not"
    return Launch(name=name, command=command, note=note)


def _vllm(name: str, model: Path, other_engines: OtherEngines, *, avx2: bool, max_pixels: int) -> Launch:
    python = other_engines.vllm()
    if name != "vllm":
        model = other_engines.quantized_for_vllm(model, name.removeprefix("vllm-"))
    command = (
        str(python.parent / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", "{port}",
        "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-batched-tokens", "2048",
        "--served-model-name", "model", "--limit-mm-per-prompt", '{"image": 8, "video": 0}',
        "--mm-processor-kwargs", f'{{"max_pixels": {max_pixels}}}', "--skip-mm-profiling",
    )  # fmt: skip
    environment = vllm_environment(python)
    if avx2:
        environment = {**environment, "PYTHONPATH": str(other_engines.script("avx2"))}
    note = f"{VLLM[0]}, {VLLM_PRECISIONS[name]}, prefix cache on"
    return Launch(name=name, command=command, environment=environment, note=note)


def _llama_cpp(name: str, model: Path, other_engines: OtherEngines, *, avx2: bool, slots: int) -> Launch:
    program, _, precision = name.rpartition("-")
    text = PRECISIONS[precision] or precision
    return Launch(
        name=name,
        command=LlamaCpp(other_engines, program, avx2=avx2).command(model, precision, cores(), slots),
        note=f"{SOURCES[program].package}, text model in {text}, vision encoder in bfloat16",
        reuses_connections=False,
    )


def _mnn(name: str, model: Path, other_engines: OtherEngines) -> Launch:
    bits = int(name.removeprefix("mnn-int"))
    python = str(other_engines.mnn())  # creating the environment deletes what is in its folder
    arguments = (str(other_engines.script("mnn_server.py")), str(other_engines.exported_for_mnn(model, bits)), "{port}")
    command = (python, *arguments, str(cores()), str(model))
    note = f"{MNN[0]}, text model in {bits} bits, encoder in its exporter's default format, one request at a time"
    return Launch(name=name, command=command, note=note)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def end_with_us() -> Iterator[None]:
    """Turn SIGTERM (for example of `timeout`) and SIGHUP into SystemExit, so that no paused engine is left behind."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as SIGHUP by `nohup`
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _spawn(command: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def members(session: int) -> Iterator[int]:
    """Yield the processes of a session, including those in separate process groups."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(folder.name)) == session:
                yield int(folder.name)


def _peak(process: int) -> int:
    """Return the peak resident memory of a process in bytes.

    Memory that forked processes share counts in proportion, as it is shared now; mapped files count in full, since
    several engines may use the same ones.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
        now = Path(f"/proc/{process}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return _kib(status, "VmHWM") - _kib(now, "Anonymous") + _kib(now, "Pss_Anon")


def _resident(process: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _kib(Path(f"/proc/{process}/smaps_rollup").read_text(), "Pss")
    return 0


def _cpu_seconds(process: int) -> float:
    """Return the CPU time of a process and of its children that ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    children = sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
    try:
        # The id of the process's clock, as by clock_getcpuclockid(3): `stat` counts in steps of 10 ms.
        return time.clock_gettime(~process << 3 | 2) + children
    except OSError as error:
        raise ProcessLookupError(process) from error


def _kib(fields: str, name: str) -> int:
    """Return a field of a file in /proc in bytes; 0 if it is missing."""
    return sum(1024 * int(line.split()[1]) for line in fields.splitlines() if line.startswith(f"{name}:"))
