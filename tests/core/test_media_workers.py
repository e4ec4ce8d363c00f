"""Media workers: the same patches and errors as threads; a worker that is hostile or dies costs one request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import signal
import socket
import struct
import termios
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image as PILImage

from dashinfer_vlm_core.concurrency.fair_slots import FairSlots
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineClosed,
    EngineError,
    MediaTooLarge,
    MediaUndecodable,
    RequestError,
)
from dashinfer_vlm_core.media_workers import (
    MediaThreads,
    MediaWorkerPool,
    MediaWorkerStats,
    WorkerLimit,
    wire,
    worker_process,
)
from dashinfer_vlm_core.media_workers.fork_server import FORK_SERVER, ForkServer
from dashinfer_vlm_core.media_workers.sandbox import missing_restrictions
from dashinfer_vlm_core.media_workers.shared_memory import SharedMemory
from dashinfer_vlm_core.media_workers.worker import Job, MediaWorker, WorkerConfig
from dashinfer_vlm_core.media_workers.worker_process import reference_to
from dashinfer_vlm_core.protocol import DocumentPart, MediaPart
from dashinfer_vlm_core.protocol.client import Client, current_client
from tests.clock import ManualClock
from tests.media_pool import FAMILY, PATH, budget, image, make_executor, run_with_pool, video
from tests.samples import encode, encode_video, noise
from tests.waiting import HANG, auntil, until
from tests.worker_readers import ACTIONS, FORBIDDEN, FORBIDDEN_FILES, ActionReader, allowed_actions


@pytest.fixture
def run(tiny_checkpoint):
    return functools.partial(run_with_pool, tiny_checkpoint)


def process(run, part, data, *, tokens=100_000, **options):
    return run(lambda executor: executor.process(part, data, budget(tokens)), **options)


def hostile(run, action, **options):
    """Decode a file with which the decoder does `action`."""
    return process(run, video(), [action], readers=[ActionReader()], **options)


def workers(pool):
    """Return the process ids of a pool's workers that run."""
    pids = [worker.pid for worker in (*pool._shared.idle, *pool._busy) if worker.pid]
    return [pid for pid in pids if exists(pid)]


def exists(pid):
    """Whether a process exists; one that ended does, until the fork server has noticed it."""
    return Path(f"/proc/{pid}").exists()


def unread_bytes(sock):
    """Return how many bytes have been sent that the other end has not received."""
    return struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


PICTURE = noise(61, 83)
CASES = {
    "png": (image(), [encode(PICTURE)]),
    "jpeg": (image(min_pixels=784, max_pixels=3000), [encode(PICTURE, "JPEG")]),
    "transparent": (image(background=(1, 2, 3)), [encode(PILImage.new("RGBA", (40, 30), (9, 9, 9, 100)))]),
    "uuid": (image(uuid="name"), [encode(PICTURE)]),
    "video": (video(num_frames=4), [encode_video(12)]),
    "uuid of video": (video(uuid="name", total_pixels=50_000), [encode_video(12)]),
    "frames": (video(2, min_pixels=784), [encode(PICTURE), encode(noise(61, 83, 1))]),
}


@pytest.mark.parametrize("case", CASES)
def test_workers_equal_threads(run, case):
    part, data = CASES[case]
    ours = process(run, part, data)
    theirs = process(run, part, data, media_workers=0)
    np.testing.assert_array_equal(ours.pixels, theirs.pixels)
    assert ours.shared_fields() == theirs.shared_fields()
    assert len(ours.digest) == 32
    assert bool(ours.source_digest) == (part.uuid is not None)


WRONG = {
    "not an image": (image(), [b"no image"]),
    "truncated": (image(), [encode(noise(90, 90))[:-40]]),
    "too many pixels": (image(), [encode(noise(200, 200))]),
    "thin": (image(), [encode(noise(1, 50))]),
    "limits": (image(min_pixels=100_000_000), [encode(PICTURE)]),
    "not a video": (video(), [b"no video"]),
    "empty": (video(), [b""]),
    "too many frames": (video(num_frames=400), [encode_video(12)]),
    "sizes of frames": (video(2), [encode(noise(28, 28)), encode(noise(28, 56))]),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_equal_those_of_threads(run, case):
    part, data = WRONG[case]
    errors = []
    for count in (None, 0):
        with pytest.raises(RequestError) as caught:
            process(run, part, data, media_workers=count, limits={"max_decoded_pixels": 30_000})
        errors.append((type(caught.value), caught.value.message, caught.value.param, caught.value.code))
    assert errors[0] == errors[1]
    assert errors[0][2].startswith(PATH)


def test_python_objects_are_processed_in_this_process(run):
    part = MediaPart(kind="image", path=PATH, content=PILImage.fromarray(PICTURE))

    async def work(pool):
        processed = await pool.process(part, [], budget())
        assert pool._shared.idle == []
        return processed

    ours = run(work)
    np.testing.assert_array_equal(ours.pixels, process(run, image(), [encode(PICTURE)]).pixels)


def test_item_over_the_token_budget_is_not_processed(run):
    data = [encode(noise(280, 280))]
    tokens = process(run, image(), data).tokens
    assert process(run, image(), data, tokens=tokens).tokens == tokens
    with pytest.raises(ContextLengthExceeded) as caught:
        process(run, image(), data, tokens=tokens - 1)
    assert caught.value.prompt_tokens == tokens


@pytest.mark.parametrize("action", ["crash", "leave"])
def test_crash_of_a_worker_fails_its_request_only(run, action):
    async def work(pool):
        good = [pool.process(image(), [encode(PICTURE)], budget()) for _ in range(4)]
        bad = pool.process(video(), [action.encode()], budget())
        return await asyncio.gather(bad, *good, return_exceptions=True)

    bad, *good = run(work, readers=[ActionReader()])
    assert isinstance(bad, MediaUndecodable)
    assert bad.param == PATH
    assert "ended unexpectedly" in bad.message
    assert all(item.tokens for item in good)


def test_memory_of_a_worker_is_limited(run):
    with pytest.raises(MediaTooLarge, match="needs more memory than is allowed") as caught:
        hostile(run, b"allocate", limits={"media_worker_memory_mib": 256})
    assert caught.value.param == PATH


def test_file_larger_than_the_memory_of_a_worker_is_too_large(run):
    """The worker receives all of it: the rest is not its next job."""

    async def work(pool):
        with pytest.raises(MediaTooLarge, match="needs more memory than is allowed"):
            await pool.process(image(), [bytes(128 << 20)], budget())
        assert (await pool.process(image(), [encode(PICTURE)], budget())).tokens
        return pool.stats.crashed

    assert run(work, limits={"media_worker_memory_mib": 64, "image_decode_timeout": HANG}) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seconds"), [("video", 0.1), ("image", 0.001)])
def test_work_beyond_its_time_is_ended(run, kind, seconds):
    """The other kind has time: a busy machine may need longer than the limit for any job."""
    jobs = {"video": (video(), [b"sleep"]), "image": (image(), [encode(noise(3000, 3000), "JPEG")])}
    others = {"video": (image(), [encode(PICTURE)]), "image": (video(), [b"warn"])}

    async def work(pool):
        with pytest.raises(MediaTooLarge, match=f"Decoding the {kind} takes more than") as caught:
            await pool.process(*jobs[kind], budget())
        assert caught.value.param == PATH
        return await pool.process(*others[kind], budget())

    limits = {"video_decode_timeout": HANG, "image_decode_timeout": HANG, f"{kind}_decode_timeout": seconds}
    assert run(work, readers=[ActionReader()], limits=limits)


def test_cancellation_ends_the_worker(run):
    async def work(pool):
        task = asyncio.ensure_future(pool.process(video(), [b"sleep"], budget()))
        await asyncio.to_thread(until, lambda: workers(pool))
        (worker,) = workers(pool)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(until, lambda: not exists(worker))
        assert task.cancelled()
        return await pool.process(image(), [encode(PICTURE)], budget())

    assert run(work, readers=[ActionReader()]).tokens


def test_canceled_worker_is_closed_after_its_thread(run, monkeypatch):
    may_end, closed = threading.Event(), []
    monkeypatch.setattr(MediaWorker, "run", lambda worker, job: may_end.wait(HANG))
    monkeypatch.setattr(MediaWorker, "close", lambda worker: closed.append(may_end.is_set()))

    async def work(pool):
        task = asyncio.ensure_future(pool.process(image(), [b""], budget()))
        await auntil(lambda: pool._busy)
        for _ in range(2):
            task.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    run(work)
    assert closed == [True]


def test_close_ends_running_and_waiting_work(run):
    async def work(pool):
        tasks = [asyncio.ensure_future(pool.process(video(), [b"sleep"], budget())) for _ in range(3)]
        await asyncio.to_thread(until, lambda: len(workers(pool)) == 2 and pool.stats.waiting == 1)
        running = workers(pool)
        await pool.close()
        until(lambda: not any(map(exists, running)))
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = run(work, readers=[ActionReader()], media_workers=2)
    assert {(type(error), error.to_be_started) for error in errors} == {(EngineClosed, True)}


def test_worker_killed_while_idle_is_replaced(run):
    async def work(pool):
        await pool.process(image(), [encode(PICTURE)], budget())
        (worker,) = workers(pool)
        os.kill(worker, signal.SIGKILL)
        until(lambda: not exists(worker))
        return await pool.process(image(), [encode(PICTURE)], budget())

    assert run(work).tokens


@pytest.mark.parametrize("padding", [0, 10_000_000])
def test_file_that_a_worker_has_not_received_is_processed_by_another(run, padding):
    """A small file is in the socket when the worker ends; a large one is being sent."""

    async def work(pool):
        expected = await pool.process(image(), [encode(PICTURE)], budget())
        (worker,) = pool._shared.idle
        os.kill(worker.pid, signal.SIGSTOP)
        task = asyncio.ensure_future(pool.process(image(), [encode(PICTURE) + bytes(padding)], budget()))
        await asyncio.to_thread(until, lambda: unread_bytes(worker._sock))
        os.kill(worker.pid, signal.SIGKILL)
        assert (await task).digest == expected.digest
        return pool.stats

    assert run(work, limits={"image_decode_timeout": HANG}) == MediaWorkerStats(started=2, crashed=1)


@pytest.mark.parametrize("action", ["crash", "leave"])
def test_file_that_ends_a_worker_is_not_processed_again(run, action):
    async def work(pool):
        await pool.process(image(), [encode(PICTURE)], budget())
        with pytest.raises(MediaUndecodable, match="ended unexpectedly"):
            await pool.process(video(), [action.encode()], budget())
        return pool.stats

    assert run(work, readers=[ActionReader()]) == MediaWorkerStats(started=1, crashed=1)


@pytest.mark.slow
def test_killed_workers_leave_nothing_behind(run):
    async def work(pool):
        await pool.process(image(), [encode(PICTURE)], budget())
        files, killed = open_files(), set()

        def kill():
            for worker in workers(pool):
                killed.add(worker)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)

        for _ in range(50):
            task = asyncio.ensure_future(pool.process(video(), [b"sleep"], budget()))
            while not task.done():  # another worker runs it if one did not receive it
                kill()
                await asyncio.sleep(0.002)
            with pytest.raises(MediaUndecodable, match="ended unexpectedly"):
                await task
            assert (await pool.process(image(), [encode(PICTURE)], budget())).tokens
            kill()  # while it is idle; it may still receive the next job
            assert (await pool.process(image(), [encode(PICTURE)], budget())).tokens
        until(lambda: not any(map(exists, killed)))
        assert len(killed) >= 100
        return open_files() - files

    assert run(work, readers=[ActionReader()]) <= 0


@pytest.mark.slow
def test_fork_server_that_ended_is_replaced(run):
    async def work(pool):
        await pool.process(image(), [encode(PICTURE)], budget())
        FORK_SERVER._process.kill()  # the kernel kills its workers then
        until(lambda: not pool._shared.idle[0].alive)
        return await pool.process(image(), [encode(PICTURE)], budget())

    assert run(work).tokens


def test_worker_is_forked_again_if_the_fork_server_ends(run, monkeypatch):
    def lose(setup, memory):
        monkeypatch.undo()
        ours, theirs = socket.socketpair()
        theirs.close()
        return 0, ours

    async def work(pool):
        monkeypatch.setattr(FORK_SERVER, "fork", lose)
        return await pool.process(image(), [encode(PICTURE)], budget())

    assert run(work).tokens


@pytest.fixture
def fork_server_here():
    """The object that serves in the fork server's process."""
    ours, theirs = socket.socketpair()
    handler = signal.getsignal(signal.SIGCHLD)
    wakeup = signal.set_wakeup_fd(-1)
    with ours, theirs:
        server = worker_process._ForkServer(theirs)
        yield server
        os.close(signal.set_wakeup_fd(wakeup))
        os.close(server._wakeup)
        signal.signal(signal.SIGCHLD, handler)


@pytest.mark.parametrize("is_canceled", [False, True])
def test_fork_that_fails_does_not_end_the_fork_server(fork_server_here, monkeypatch, is_canceled):
    def fail(*_):
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(os, "fork", fail)
    fork_server_here._setups["{}"] = None
    ours, theirs = socket.socketpair()
    with ours:
        if is_canceled:
            ours.close()
        fork_server_here._handle({"fork": 1, "setup": {}}, [theirs.detach(), os.memfd_create("pixels")])
        assert is_canceled or b"too many processes" in ours.recv(10_000)


@pytest.mark.slow
def test_closed_fork_server_leaves_no_worker():
    server = ForkServer()
    memory = SharedMemory.create()
    _, sock = server.fork({"config": {}}, memory.file)
    assert b"failed" in sock.recv(10_000)
    server.close()
    assert server._process is None
    memory.close()
    sock.close()


def test_worker_that_cannot_be_set_up_is_reported(run, tiny_checkpoint, tmp_path, caplog):
    async def work(pool):
        pool._worker_config.setup["folder"] = str(tmp_path)
        await pool.process(image(), [encode(PICTURE)], budget())

    with pytest.raises(EngineError, match="could not be started"):
        run(work)
    assert "config.json" in caplog.text


@pytest.mark.parametrize(("owner", "name"), [(SharedMemory, "create"), (FORK_SERVER, "fork")])
def test_worker_without_memory_or_process_is_an_error(run, monkeypatch, caplog, owner, name):
    def fail(*_):
        raise OSError("too many open files")

    async def work(pool):
        monkeypatch.setattr(owner, name, fail)
        for _ in range(2):
            with pytest.raises(EngineError, match="could not be started"):
                await pool.process(image(), [encode(PICTURE)], budget())
        monkeypatch.undo()
        assert (await pool.process(image(), [encode(PICTURE)], budget())).tokens
        return pool._shared.num_busy

    assert run(work, media_workers=1) == 0
    assert "too many open files" in caplog.text


def test_logs_of_a_worker_are_bounded(run, caplog):
    assert hostile(run, b"warn").tokens
    messages = [record.getMessage() for record in caplog.records if PATH in record.getMessage()]
    assert messages[0] == f"{PATH}: decoder: tag 0 is damaged"
    assert messages[-1] == f"{PATH}: 995 more warnings"
    assert len(messages) == 6


@pytest.mark.slow
def test_workers_do_not_inherit_secrets(run, monkeypatch):
    monkeypatch.setenv("DASHINFER_VLM_API_KEY", "secret")
    FORK_SERVER.close()
    assert {int(value) for value in hostile(run, b"environment").pixels.ravel()} == {1}


def test_actions_do_what_their_names_say(monkeypatch):
    """Outside of a worker, nothing denies them: the tests above would pass if they failed for another reason."""
    monkeypatch.setenv("DASHINFER_VLM_API_KEY", "secret")
    assert ACTIONS[b"environment"]().values == [255] * 4
    root_only = set() if os.geteuid() == 0 else {"root folder"}
    assert set(allowed_actions()) >= {*FORBIDDEN, *FORBIDDEN_FILES} - root_only


def test_only_importable_readers_are_used_in_workers(run, caplog):
    class Local(ActionReader):
        pass

    async def kind(executor):
        return type(executor)

    assert run(kind) is MediaWorkerPool
    assert run(kind, readers=[Local()]) is MediaThreads
    assert "not importable" in caplog.text
    assert run(kind, media_workers=0) is MediaThreads
    assert reference_to(ActionReader()) == ("tests.worker_readers", "ActionReader", "class")
    assert reference_to(FORK_SERVER)[1:] == ("FORK_SERVER", "object")
    assert reference_to(Client()) is None


def test_negative_number_of_workers_is_invalid():
    with pytest.raises(ConfigError, match="media_workers"):
        EngineConfig(media_workers=-1)


def test_client_with_a_key_leaves_a_worker_to_others(run):
    async def work(pool):
        token = current_client.set(Client(id="a"))
        greedy = [asyncio.ensure_future(pool.process(video(), [b"sleep"], budget())) for _ in range(5)]
        current_client.reset(token)
        await asyncio.to_thread(until, lambda: len(pool._busy) == 2)
        token = current_client.set(Client(id="b"))
        processed = await asyncio.wait_for(pool.process(image(), [encode(PICTURE)], budget()), HANG)
        current_client.reset(token)
        assert len(pool._busy) == 2
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        return processed

    assert run(work, readers=[ActionReader()], media_workers=3, limits={"video_decode_timeout": HANG}).tokens


class Slots:
    """FairSlots with tasks that hold a slot until they are released."""

    def __init__(self, limit):
        self.slots, self.held, self.tasks = FairSlots(limit), [], {}

    async def acquire(self, name, client, limit=9):
        self.tasks[name] = asyncio.ensure_future(self._hold(name, client, limit))
        await self.settle()

    async def release(self, name):
        self.tasks.pop(name).cancel()
        await self.settle()

    async def _hold(self, name, client, limit):
        async with self.slots.slot(client, limit=limit):
            self.held.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                self.held.remove(name)

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)


def test_slots_are_shared_between_event_loops():
    slots = FairSlots(1)
    order = []

    async def use(name, held, may_end):
        async with slots.slot(name, limit=1):
            order.append(name)
            held.set()
            await asyncio.to_thread(may_end.wait, HANG)

    async def cancel():
        waiting = asyncio.create_task(use("canceled", threading.Event(), threading.Event()))
        await auntil(lambda: slots.waiting == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    events = {name: (threading.Event(), threading.Event()) for name in "ab"}
    threads = {name: threading.Thread(target=lambda name=name: asyncio.run(use(name, *events[name]))) for name in "ab"}
    threads["a"].start()
    assert events["a"][0].wait(HANG)
    asyncio.run(cancel())
    assert slots.waiting == 0
    threads["b"].start()
    until(lambda: slots.waiting == 1)
    for name, thread in threads.items():
        events[name][1].set()
        thread.join(HANG)
    assert order == ["a", "b"]


def test_models_share_their_workers(tiny_checkpoint):
    """With one worker for two models, the idle one of the first makes way for one of the second."""
    limit = WorkerLimit(1)

    async def process(pool):
        assert (await pool.process(image(), [encode(PICTURE)], budget())).tokens
        return list(limit.idle)

    async def main():
        pools = [make_executor(tiny_checkpoint, limit=limit) for _ in range(2)]
        try:
            return [await process(pool) for pool in (*pools, pools[1])], [pool.stats.started for pool in pools]
        finally:
            for pool in pools:
                await pool.close()

    (first, second, third), started = asyncio.run(main())
    assert started == [1, 1]
    assert second == third != first
    assert (limit.idle, limit.num_busy) == ([], 0)


def test_slots_are_shared_fairly():
    async def work():
        slots = Slots(2)
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            await slots.acquire(name, name[0])
        assert slots.held == ["a1", "a2"]
        await slots.release("a1")
        assert slots.held == ["a2", "b1"]  # b has no slot yet
        await slots.release("a2")
        assert slots.held == ["b1", "a3"]  # neither a nor c has one; a waits longer
        await slots.release("a3")
        assert slots.held == ["b1", "c1"]
        await slots.release("b2")  # it was waiting
        await slots.acquire("c2", "c")
        await slots.release("b1")
        assert slots.held == ["c1", "c2"]
        for name in ("c1", "c2"):
            await slots.release(name)
        assert (slots.slots._free, dict(slots.slots._used)) == (2, {})

    asyncio.run(work())


def test_client_never_gets_more_slots_than_its_limit():
    async def work():
        slots = Slots(3)
        for name in ("a1", "a2", "a3"):
            await slots.acquire(name, "a", limit=2)
        assert slots.held == ["a1", "a2"]
        await slots.acquire("b1", "b")
        assert slots.held == ["a1", "a2", "b1"]
        await slots.release("a1")
        assert slots.held == ["a2", "b1", "a3"]
        for name in ("a2", "a3", "b1"):
            await slots.release(name)

    asyncio.run(work())


def test_shared_memory_grows_and_cannot_shrink():
    memory = SharedMemory.create()
    for pixels in (noise(5, 6), noise(2000, 3000), noise(7, 8)):
        memory.write(pixels)
        np.testing.assert_array_equal(memory.read(pixels.shape), pixels)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.file, 1)
    with pytest.raises(ValueError, match="smaller"):
        memory.read((4000, 3000, 3))
    memory.close()


@pytest.mark.slow
def test_frames_are_resized_while_they_are_decoded(run):
    """At full size, these frames do not fit into the memory of a worker."""
    data = encode_video(96, height=720, width=960, container="avi")
    assert 96 * 720 * 960 * 3 > 160 << 20
    processed = process(
        run, video(num_frames=96), [data], limits={"media_worker_memory_mib": 160}, video_total_pixels=1_000_000
    )
    assert processed.source_size == (960, 720)
    assert processed.grid.t == 48
    assert processed.grid.h * 14 < 720


def test_statistics_count_workers_and_why_they_ended(run, monkeypatch):
    async def work(pool):
        await pool.process(image(), [encode(PICTURE)], budget())
        for action, seconds in ((b"leave", HANG), (b"sleep", 0.1)):
            monkeypatch.setattr(pool, "_seconds", lambda part, seconds=seconds: seconds)
            with pytest.raises(RequestError):
                await pool.process(video(), [action], budget())
        monkeypatch.undo()
        task = asyncio.ensure_future(pool.process(video(), [b"sleep"], budget()))
        await asyncio.to_thread(until, lambda: workers(pool))
        assert pool.stats.busy == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return pool.stats

    stats = run(work, readers=[ActionReader()], limits={"video_decode_timeout": HANG})
    assert stats == MediaWorkerStats(started=3, crashed=1, timed_out=1, canceled=1)


def test_limit_of_a_client_applies(run):
    async def work(pool):
        clients = [Client(), Client(id="a"), Client(id="a", media_workers=2), Client(id="a", media_workers=9)]
        assert list(map(pool._limit, clients)) == [4, 3, 2, 3]
        return (await pool.process(image(), [encode(PICTURE)], budget())).tokens

    assert run(work, media_workers=4)


PATCHES = {"grid": [1, 2, 2], "times": [], "sampled_fps": None, "source_size": [28, 28]}
ERROR = {"type": "MediaTooLarge", "message": "It is too large.", "param": PATH, "code": None}
ANSWERS = {
    "no JSON": b"{",
    "nested": b"[" * 100_000,
    "no object": b"[]",
    "no answer": b'{"logs": []}',
    "logs of another type": b'{"logs": 5, "tokens": 200}',
    "many logs": json.dumps({"logs": ["a"] * 1000, "tokens": 200}).encode(),
    "two lines": json.dumps({"logs": ["a\nERROR b"], "tokens": 200}).encode(),
    "few tokens": b'{"logs": [], "tokens": 3}',
    **{
        f"error {number}": json.dumps({"logs": [], "error": ERROR | change}).encode()
        for number, change in enumerate(
            (
                {"type": "SystemExit"},
                {"message": "a\nb"},
                {"param": "messages[9]"},
                {"param": {}},
                {"code": ["x"]},
                {"x": 1},
            )
        )
    },
    **{
        f"patches {number}": json.dumps({"logs": [], "patches": PATCHES | change}).encode()
        for number, change in enumerate(
            (
                {"shape": [4, 1176]},
                {"grid": [1, 2, 3]},
                {"grid": [2, 2, 2]},
                {"grid": [1, 200, 200]},
                {"grid": [1, 2.0, 2]},
                {"times": [float("nan")]},
                {"sampled_fps": 0.0},
                {"source_size": [10**30, 1]},
                {},  # the shared memory is empty
            )
        )
    },
}


@pytest.fixture
def answer_with(tiny_checkpoint):
    """Run a job whose worker sends `answer`; return the worker."""
    ends = []

    def answer_with(answer):
        spec = FAMILY.load_spec(tiny_checkpoint)
        processor = FAMILY.image_processor(spec, EngineConfig())
        worker = MediaWorker(WorkerConfig(setup={}, processor=processor, pixels=spec.pixels), client="")
        worker._memory = SharedMemory.create()
        worker._sock, theirs = socket.socketpair()
        theirs.sendall(wire.LENGTH.pack(len(answer)) + answer)
        ends.extend([worker, theirs])
        return worker

    yield answer_with
    for end in ends:
        end.close()


JOB = Job(part=image(), data=[], budget=budget(100), seconds=HANG)


@pytest.mark.parametrize("name", ANSWERS)
def test_invalid_answer_of_a_worker_ends_it(answer_with, name):
    worker = answer_with(ANSWERS[name])
    with pytest.raises(MediaUndecodable, match="ended unexpectedly") as caught:
        worker.run(JOB)
    assert caught.value.param == PATH
    assert not worker.reusable


PAGE = {"number": 1, "width": 612.0, "height": 792.0, "text_bytes": 4}
DOCUMENT = dataclasses.replace(JOB, part=DocumentPart(path=PATH, url="data:"), data=[b"%PDF-"])
PAGES = {
    "no pages": ([], b"text"),
    "an unknown field": ([PAGE | {"x": 1}], b"text"),
    "page 0": ([PAGE | {"number": 0}], b"text"),
    "a page without area": ([PAGE | {"width": 0.0}], b"text"),
    "an endless page": ([PAGE | {"height": 1e300}], b"text"),
    "no text in the shared memory": ([PAGE], b""),
    "text that is not UTF-8": ([PAGE], b"\xff\xfe\x00\x00"),
    "too much text": ([PAGE | {"text_bytes": 300}, PAGE | {"text_bytes": 101}], b"x" * 500),
}


@pytest.mark.parametrize("name", PAGES)
def test_invalid_pages_of_a_worker_end_it(answer_with, name):
    pages, text = PAGES[name]
    worker = answer_with(json.dumps({"logs": [], "pages": pages}).encode())
    if text:
        worker._memory.write(np.frombuffer(text, np.uint8))
    with pytest.raises(MediaUndecodable, match="ended unexpectedly"):
        worker.run(DOCUMENT)
    assert not worker.reusable


def test_patches_are_no_answer_to_a_document_nor_pages_to_an_image(answer_with):
    for answer, job in (({"pages": [PAGE]}, JOB), ({"patches": PATCHES}, DOCUMENT)):
        with pytest.raises(MediaUndecodable, match="ended unexpectedly"):
            answer_with(json.dumps({"logs": [], **answer}).encode()).run(job)


def test_valid_answers_of_a_worker(answer_with):
    with pytest.raises(ContextLengthExceeded) as caught:
        answer_with(b'{"logs": [], "tokens": 200}').run(dataclasses.replace(JOB, budget=budget(100)))
    assert caught.value.prompt_tokens == 200
    worker = answer_with(json.dumps({"logs": [], "pages": [PAGE, PAGE | {"text_bytes": 3}]}).encode())
    worker._memory.write(np.frombuffer("text€".encode(), np.uint8))
    assert [page.text for page in worker.run(DOCUMENT).pages] == ["text", "€"]
    worker = answer_with(json.dumps({"logs": [], "patches": PATCHES}).encode())
    worker._memory.write(np.ones((4, 1176), np.uint8))
    assert worker.run(JOB).pixels.sum() == 4 * 1176
    with pytest.raises(MediaTooLarge) as caught:
        answer_with(json.dumps({"logs": [], "error": ERROR}).encode()).run(JOB)
    assert caught.value.param == PATH
    assert worker.reusable


class SlowSocket:
    """A socket whose other end takes a second for each call."""

    def __init__(self, clock):
        self.clock = clock
        self.timeout = None

    def settimeout(self, seconds):
        self.timeout = seconds

    def recv(self, size, flags):
        self.clock.advance(1)
        return b"x"

    def sendall(self, data):
        self.clock.advance(1)


def test_security_25_worker_that_reads_or_sends_slowly_gets_no_more_time(monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=clock))
    sock = SlowSocket(clock)
    for work in (
        lambda end: wire.receive(sock, 1000, end=end),
        lambda end: wire.send(sock, wire.Started(), [bytes(wire.SMALL_BYTES)] * 1000, end=end),
    ):
        end = clock() + 10
        with pytest.raises(TimeoutError):
            work(end)
        assert (clock(), sock.timeout) == (end, 1)


LINES = "a\n2026-01-01 ERROR b\r\x1b[2K\x9b\u2028c"
LOGGED = "    a\n    2026-01-01 ERROR b\\r\\x1b[2K\\x9b\\u2028c"


def test_traceback_of_a_worker_is_logged_escaped_and_indented(answer_with, caplog):
    with pytest.raises(EngineError):
        answer_with(json.dumps({"logs": [], "exception": LINES}).encode()).run(JOB)
    assert caplog.text.rstrip().endswith(f"A media worker failed:\n{LOGGED}")


def test_reason_why_a_worker_cannot_start_is_logged_escaped(tiny_checkpoint, monkeypatch, caplog):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(FORK_SERVER, "fork", lambda setup, memory: (1, ours))
    monkeypatch.setattr(FORK_SERVER, "kill", lambda worker: None)
    wire.send(theirs, wire.Started(failed=LINES))
    spec = FAMILY.load_spec(tiny_checkpoint)
    processor = FAMILY.image_processor(spec, EngineConfig())
    worker = MediaWorker(WorkerConfig(setup={}, processor=processor, pixels=spec.pixels), client="")
    with pytest.raises(EngineError, match="could not be started"):
        worker.start()
    assert caplog.text.rstrip().endswith(f"could not be started:\n{LOGGED}")
    worker.close()
    theirs.close()


def test_restrictions_that_a_machine_lacks_are_named():
    here = [restriction.name for restriction in missing_restrictions()]
    other = [restriction.name for restriction in missing_restrictions("riscv64")]
    assert "the seccomp filter" in other
    assert {*here, "the seccomp filter"} == set(other)
