"""Rules 36 and 37: what a hostile file that has taken over a media worker can reach. No model runs."""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.media.image import FORMATS
from dashinfer_vlm_core.media_workers import fork_server
from dashinfer_vlm_core.media_workers.fork_server import FORK_SERVER
from dashinfer_vlm_core.media_workers.pool import is_supported
from dashinfer_vlm_core.media_workers.sandbox import missing_restrictions, readable_paths
from dashinfer_vlm_core.media_workers.seccomp import ARCHITECTURES, build_filter, has_list
from dashinfer_vlm_core.media_workers.self_test import SAMPLES
from dashinfer_vlm_core.protocol.client import Client, current_client
from tests.media_pool import budget, image, run_with_pool, video
from tests.worker_readers import FORBIDDEN_FILES, ActionReader

pytestmark = pytest.mark.skipif(not is_supported(), reason="worker processes need Linux")


@pytest.fixture
def run(tiny_checkpoint):
    return functools.partial(run_with_pool, tiny_checkpoint, readers=[ActionReader()])


async def decoded_before(pool, client):
    """Decode a file for a client; return how many files its worker decoded before."""
    current_client.set(Client(id=client))
    processed = await pool.process(video(min_pixels=784, max_pixels=784), [b"remember"], budget())
    return int(processed.pixels[0, 0]) - 1


def test_security_36_worker_serves_one_client(run):
    async def work(pool):
        files = [await decoded_before(pool, client) for client in "aabbaabcab"]
        assert len(pool._shared.idle) == 2
        assert [worker.client for worker in pool._shared.idle] == ["a", "b"]
        return files

    assert run(work, media_workers=2) == [0, 1, 0, 1, 2, 3, 2, 0, 0, 0]


def test_security_36_workers_of_concurrent_clients_are_separate(run):
    async def work(pool):
        clients = [client for client in "abcd" for _ in range(3)]
        await asyncio.gather(*(decoded_before(pool, client) for client in clients))
        assert len(pool._shared.idle) <= 3
        return pool.stats.started

    assert run(work, media_workers=3) >= 4


def values(run, action, **options):
    """Return the values of the frames that a worker returns for an action."""

    async def work(pool):
        processed = await pool.process(video(min_pixels=784, max_pixels=784), [action], budget())
        return set(processed.pixels.ravel().tolist())

    return run(work, **options)


@pytest.mark.skipif(bool(missing_restrictions()), reason="this kernel lacks a restriction")
def test_security_37_worker_reaches_nothing_but_its_socket(run):
    assert values(run, b"forbidden") == {0}


def test_security_23_address_space_of_a_worker_is_limited(run):
    assert values(run, b"reserve", limits={"media_worker_memory_mib": 256}) == {1}


needs_list = pytest.mark.skipif(not has_list(platform.machine()), reason="there is no list for this machine")


def run_program(program, *arguments):
    """Run a program in a process of its own, which has no threads, and return what it writes into the pipe `output`."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", f"import sys\noutput = {writing}\n{program}", *arguments]
    with subprocess.Popen(command, pass_fds=[writing], cwd=Path(__file__).parents[2]) as process:
        os.close(writing)
        with open(reading) as pipe:  # noqa: PTH123  a descriptor has no Path
            text = pipe.read()
    assert process.returncode == 0
    return text.splitlines()


WITHOUT_LANDLOCK = """
import os
from pathlib import Path
from dashinfer_vlm_core.media_workers.sandbox import Sandbox
from dashinfer_vlm_core.media_workers.seccomp import build_filter
from tests.worker_readers import allowed_actions
Sandbox.prepare(by_list=True)
Sandbox(ruleset=None, filter=build_filter(by_list=bool(sys.argv[1]))).restrict([output], memory_bytes=1 << 30)
status = Path("/proc/self/status").read_text().splitlines()
capabilities = [line for line in status if line.startswith("Cap")]
os.write(output, "\\n".join([*allowed_actions(), *capabilities]).encode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_list", [pytest.param(True, marks=needs_list), False])
def test_security_37_filter_alone_denies_all_but_reading(by_list):
    lines = run_program(WITHOUT_LANDLOCK, "list" if by_list else "")
    assert [line for line in lines if not line.startswith("Cap")] == list(FORBIDDEN_FILES)
    capabilities = dict(line.split(":\t") for line in lines if line.startswith("Cap"))
    dropped = {"CapPrm", "CapEff", "CapInh", "CapAmb", *(["CapBnd"] if os.geteuid() == 0 else [])}
    assert {int(capabilities[name], 16) for name in dropped} == {0}


ONLY_LISTED = """
import os, struct
from dataclasses import replace
from dashinfer_vlm_core.media import READERS
from PIL import Image
from dashinfer_vlm_core.media.readers import DecordReader
from dashinfer_vlm_core.media_workers import self_test
Image.init()
readers = [reader for reader in (*READERS, DecordReader()) if reader.available()]
for reader in readers:
    reader.preload()
sandbox = self_test.Sandbox.prepare(by_list=True)
RETURN, KILL = 0x06, 0x80000000
fatal = replace(sandbox, filter=sandbox.filter[:-8] + struct.pack("<HBBI", RETURN, 0, 0, KILL))
os.write(output, "\\n".join(self_test.undecodable_samples(fatal, readers)).encode())
"""


@needs_list
@pytest.mark.slow
def test_security_37_decoders_call_only_what_is_listed():
    """A call that is neither listed nor denied ends this process. decord reads neither AV1 nor MPEG-TS."""
    assert set(run_program(ONLY_LISTED)) <= {"av1.webm (decord)", "mpeg2.ts (decord)"}


def test_security_37_samples_cover_all_formats():
    suffixes = [file.suffix for file in SAMPLES.iterdir() if file.stem == "image"]
    assert sorted(suffixes) == sorted(f".{codec.lower()}" for codec in FORMATS)


@needs_list
@pytest.mark.slow
def test_security_37_list_that_is_too_short_is_not_used(run, monkeypatch, caplog):
    """Decoders start threads, for which libc protects the end of the stack."""
    shorter = "from dashinfer_vlm_core.media_workers.system_calls import ALLOWED; ALLOWED.pop('mprotect');"
    program = fork_server._PROGRAM.replace(" from", f" {shorter} from", 1)
    monkeypatch.setattr(fork_server, "_PROGRAM", program)
    FORK_SERVER.close()

    async def work(pool):
        for _ in range(2):
            await pool.process(video(), [(SAMPLES / "h264.mp4").read_bytes()], budget())
        processed = await pool.process(image(), [(SAMPLES / "image.webp").read_bytes()], budget())
        return processed.tokens

    try:
        assert run(work, readers=READERS)
    finally:
        FORK_SERVER.close()
    (message,) = [record.getMessage() for record in caplog.records if "list" in record.getMessage()]
    assert "media workers cannot decode" in message
    assert "h264.mp4 (pyav)" in message


def test_security_37_filter_of_every_machine_is_valid():
    """A jump of classic BPF is a byte, and a filter has at most 4,096 instructions of 8 bytes."""
    for machine in ARCHITECTURES:
        for by_list in {False, has_list(machine)}:
            assert 0 < len(build_filter(machine, by_list=by_list)) <= 4096 * 8
    assert build_filter("riscv64", by_list=False) == b""


def test_security_37_repository_is_not_readable():
    repository = Path(__file__).parents[2]
    assert not {str(folder) for folder in (repository, *repository.parents)} & set(readable_paths())
