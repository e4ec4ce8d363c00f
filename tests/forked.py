"""Start Python programs from a process that has imported PyTorch, openai and the engine, by forking it.

A start and exit take 0.3 s; 3 to 5 s otherwise, which is most of what a test of a command takes. The program gets the
arguments, environment, folder, standard streams and signals of its caller, and returns its exit code. Not for tests of
imports, of the interpreter's options, or of variables that libraries read when they are imported.

    subprocess.run([*forked(), "-c", program, *arguments])

Its first element is the interpreter; the rest is this file as a client, which sends all that to the server and waits.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from typing import NoReturn

PRELOADED = ("torch", "openai", "fastapi", "uvicorn", "dashinfer_vlm_core.engine", "dashinfer_vlm_core.cli.main")
LOST = 70
"""The exit code if the server could not run the program."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@functools.cache
def forked() -> tuple[str, ...]:
    """Return the command of a Python interpreter that is forked; the server starts with the first call."""
    import shutil  # not in the client, which is to start quickly
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp()
    path = f"{folder}/socket"
    command = [sys.executable, "-m", __name__, path]
    root = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - as below
    server = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server of tests/forked.py has ended"
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.communicate)  # it ends when its input is closed
    return (sys.executable, "-I", "-S", __file__, path)


def request(path: str, arguments: list[str]) -> int:
    """Run a program in a fork of the server: forward signals to it, and return its exit code."""
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)  # a handler alone would miss a signal right before the process waits
    for number in FORWARDED:
        signal.signal(number, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        folder = os.getcwd()  # noqa: PTH109 - to import pathlib takes longer than the rest of a client
        call = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": folder}).encode()
        socket.send_fds(server, [len(call).to_bytes(8, "little")], [0, 1, 2])
        server.sendall(call)
        for number in (0, 1, 2):
            os.close(number)  # a pipe ends with the program, and not with this process
        while server not in select.select([server, signals], [], [])[0]:
            server.sendall(os.read(signals, 64))
        answer = server.recv(8)
    code = int.from_bytes(answer, "little", signed=True) if answer else LOST
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def serve(path: str) -> list[str]:
    """Import libraries and fork for each request. Return the program's arguments, in its process only."""
    for name in PRELOADED:
        __import__(name)
    assert "huggingface_hub" not in sys.modules, "it would not read the variables of the programs"
    gc.freeze()  # an exit, which collects garbage, takes 0.3 s instead of 0.8
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks are not waited for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                os._exit(0)
            connection, _ = listener.accept()
            if not os.fork():
                listener.close()
                return _attend(connection)
            connection.close()


def _attend(client: socket.socket) -> list[str]:
    """Run a request's program in another fork, where this function returns; end with it, or end it with its client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, *_ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as stream:
        call = json.loads(stream.read(int.from_bytes(size, "little")))
    if child := os.fork():
        for number in (*streams, 0, 1, 2):
            os.close(number)
        _forward(client, child)
    client.close()
    _become(call["environment"], call["folder"], streams)
    return call["arguments"]


def _forward(client: socket.socket, child: int) -> NoReturn:
    """Send signals from the client to the program, and then its exit code to the client; if that ends, kill it."""
    ended = os.pidfd_open(child)
    while ended not in select.select([client, ended], [], [])[0]:
        for number in client.recv(64) or [signal.SIGKILL]:
            os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(code.to_bytes(8, "little", signed=True))
    os._exit(0)


def _become(environment: dict[str, str], folder: str, streams: list[int]) -> None:
    """Take over a client's environment, folder and standard streams, as if started by it."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    _, path, *rest = sys.argv
    if rest:
        sys.exit(request(path, rest))
    sys.argv = serve(path)
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    if sys.argv[0] == "-c":
        exec(sys.argv.pop(1), program.__dict__)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
