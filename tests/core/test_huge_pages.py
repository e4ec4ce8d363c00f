"""Memory for weights: exclusive, aligned and freed."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_cpu import huge_pages
from tests.waiting import HANG, until

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_buffers(monkeypatch):
    """Isolate the test from other tests' buffers and pages that are being collapsed."""
    until(lambda: not collapsing())
    monkeypatch.setattr(huge_pages, "_ALLOCATOR", huge_pages._ChunkAllocator())


def collapsing():
    return any(thread.name == "dashinfer-vlm-huge-pages" for thread in threading.enumerate())


def test_tensors_do_not_overlap_and_start_at_cache_lines():
    counts = [1, 63, 64, 65, 5 * MIB, 5 * MIB + 1, 7 * MIB, 3, 20 * MIB, 2 * MIB]
    tensors = [huge_pages.empty(count, torch.uint8) for count in counts]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, count) in enumerate(zip(tensors, counts, strict=True)):
        assert len(tensor) == count
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())


def test_multi_byte_dtypes():
    tensor = huge_pages.empty(1000, torch.bfloat16).fill_(1.5)
    assert tensor.dtype == torch.bfloat16
    assert float(tensor.float().sum()) == 1500


def test_empty_tensor():
    assert huge_pages.empty(0, torch.uint8).shape == (0,)


def mapping(address):
    """Return Linux's description of the mapping at an address."""
    found = False
    reported = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            found = begin <= address < end
        elif found:
            reported[name] = values
    return reported


def huge_page_bytes(address):
    """Return the bytes in huge pages of the mapping at an address."""
    return int(mapping(address)["AnonHugePages:"][0]) * 1024


def collapses_pages():
    """Return whether this system collapses pages on request; older ones do not, and others did it earlier."""
    memory = mmap.mmap(-1, 3 * huge_pages.HUGE_PAGE_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = bytes(len(memory))
    page = huge_pages._address(memory) + huge_pages.HUGE_PAGE_SIZE
    before = huge_page_bytes(page)
    huge_pages.collapse(weakref.ref(memory), len(memory))
    return huge_page_bytes(page) > before


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports resident memory")


@pytest.fixture
def mappings(monkeypatch):
    """Collect weak references to all mappings made from now on. Python unmaps unreferenced ones; the resident
    memory of the process would depend on other tests too."""
    made, new_memory = [], huge_pages._new_memory

    def recorded(size):
        memory, start = new_memory(size)
        made.append(weakref.ref(memory))
        return memory, start

    monkeypatch.setattr(huge_pages, "_new_memory", recorded)
    monkeypatch.setattr(huge_pages, "_ALLOCATOR", huge_pages._ChunkAllocator())
    return made


def held(mappings):
    return [memory for reference in mappings if (memory := reference())]


def test_memory_is_unmapped_with_last_tensor(mappings):
    tensors = [huge_pages.empty(size * MIB, torch.uint8).zero_() for size in (5, 5, 5, 5, 40, 5)]
    assert sum(map(len, held(mappings))) > 60 * MIB
    first, last = tensors[0], tensors.pop()
    del tensors
    until(lambda: len(held(mappings)) == 2)  # pages may be collapsed right now
    assert not first.any()
    assert not last.any()
    del first, last
    until(lambda: not held(mappings))


@needs_linux
def test_pages_are_collapsed_after_loading_and_keep_content():
    if not collapses_pages():
        pytest.skip("this Linux does not join pages when it is asked to")
    tensors = [huge_pages.empty(6 * MIB, torch.uint8).fill_(number) for number in range(8)]
    inner = [tensor.data_ptr() + 2 * MIB for tensor in (tensors[0], tensors[3], tensors[5])]
    until(lambda: all(huge_page_bytes(address) >= 4 * MIB for address in inner))
    assert [int(tensor.sum()) for tensor in tensors] == [number * 6 * MIB for number in range(8)]


@needs_linux
def test_pages_waiting_for_collapse_are_freed_if_unused(monkeypatch, mappings):
    begun, go_on = threading.Event(), threading.Event()

    def collapse(memory, end):
        begun.set()
        go_on.wait(timeout=HANG)

    monkeypatch.setattr(huge_pages, "collapse", collapse)
    tensors = [huge_pages.empty(20 * MIB, torch.uint8).zero_() for _ in range(4)]
    assert begun.wait(timeout=HANG)
    del tensors
    assert not held(mappings)
    go_on.set()


@needs_linux
def test_memory_is_freed_while_its_pages_wait_for_steps():
    """Each range is a task of the compute thread; between two, the memory can be freed."""
    memory = mmap.mmap(-1, 4 * huge_pages.HUGE_PAGE_SIZE)
    kept, begun, go = weakref.ref(memory), threading.Event(), threading.Event()
    step = threading.Thread(target=CPU_EXECUTOR.run, args=(lambda: (begun.set(), go.wait(timeout=HANG)),))
    step.start()
    assert begun.wait(timeout=HANG)
    collapsing = threading.Thread(target=huge_pages.collapse, args=(kept, len(memory)))
    collapsing.start()
    until(lambda: CPU_EXECUTOR.waiting == 1)
    del memory
    assert kept() is None
    go.set()
    for thread in (step, collapsing):
        thread.join(timeout=HANG)
        assert not thread.is_alive()


def test_requests_lose_a_small_share_of_the_compute_thread():
    assert huge_pages.pause_after(waited=0.0, took=0.005) == 0
    pause = huge_pages.pause_after(waited=0.01, took=0.005)
    assert 0.005 / (0.005 + pause) == pytest.approx(huge_pages.BUSY_SHARE)
    assert huge_pages.pause_after(waited=0.01, took=300.0) == huge_pages.MAX_PAUSE_SECONDS  # the process was stopped


def test_ranges_pause_next_to_requests(monkeypatch):
    waits = []
    monkeypatch.setattr(huge_pages, "pause_after", lambda *, waited, took: waits.append(waited) or 0.01)
    memory = mmap.mmap(-1, 4 * huge_pages.HUGE_PAGE_SIZE)
    begun, go = threading.Event(), threading.Event()
    step = threading.Thread(target=CPU_EXECUTOR.run, args=(lambda: (begun.set(), go.wait(timeout=HANG)),))
    collapsing = threading.Thread(target=huge_pages.collapse, args=(weakref.ref(memory), len(memory)))
    step.start()
    assert begun.wait(timeout=HANG)
    collapsing.start()
    until(lambda: CPU_EXECUTOR.waiting == 1)
    started = time.monotonic()
    until(lambda: time.monotonic() > started + 2 * huge_pages.IDLE_SECONDS)
    go.set()
    for thread in (step, collapsing):
        thread.join(timeout=HANG)
        assert not thread.is_alive()
    assert len(waits) >= 3
    assert waits[0] > huge_pages.IDLE_SECONDS
    assert time.monotonic() - started >= 0.01 * len(waits)


def test_partial_page_is_not_collapsed():
    if not collapses_pages():
        pytest.skip("this Linux does not join pages when it is asked to")
    first, last = (huge_pages.empty(size, torch.uint8).zero_() for size in (17 * MIB, 20 * MIB + 4096))
    until(lambda: not collapsing())
    assert "hg" in mapping(first.data_ptr())["VmFlags:"]
    assert "hg" in mapping(last.data_ptr() + 19 * MIB)["VmFlags:"]
    assert "hg" not in mapping(last.data_ptr() + 20 * MIB)["VmFlags:"]


@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # of later Python versions; forking is the point of this test
def test_child_process_allocates_its_own_memory(monkeypatch):
    monkeypatch.undo()
    with huge_pages._ALLOCATOR._lock:  # as if another thread of the parent held it
        child = os.fork()
        if not child:
            signal.alarm(int(HANG))  # in case it hangs
            os._exit(len(huge_pages.empty(1000, torch.uint8)) != 1000)
    assert os.waitpid(child, 0)[1] == 0
