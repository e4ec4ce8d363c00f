"""Mixed traffic with faults: every request has exactly one outcome, and no resources leak.

The decoder dies now and then, the image server goes down, clients disconnect in the middle of responses, and there are
more clients than the queue accepts.
"""

from __future__ import annotations

import gc
import itertools
import logging
import random
import resource
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.plugins import load_plugins
from tests.core.test_supervisor import FaultInjector
from tests.samples import encode, noise
from tests.server.conftest import serving
from tests.soak.traffic import CHAT, Clients, Ledger
from tests.waiting import until
from tests.web import body, serve

CLIENTS = 12
FAULT_REQUESTS = 80
WARM_UP = 1 / 3
"""Share of the soak after which memory should stop growing: caches are full and allocator arenas are warm."""

GROWTH = 1.05
SPARE = 4
"""Extra descriptors allowed at the end, for kept-alive connections to the image server; fewer than the restarts."""
MEDIA_WORKERS = 2
FILES_PER_WORKER = 3
"""A socket, the shared memory, and its mapping."""
OPTIONS = {
    "max_batch_size": 4,
    "max_waiting": 4,
    "vision_cache_mib": 1,
    "limits": {"decoder_restarts": 10_000},
    "media_workers": MEDIA_WORKERS,
}


@pytest.fixture
def unlogged():
    """Disable logging: pytest keeps log records whose tracebacks would keep a dead decoder's memory alive."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("unlogged")
@pytest.mark.timeout(0)  # has its own time limit
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="memory and descriptors are read from /proc")
def test_mixed_traffic_with_faults_has_one_outcome_per_request(tiny_checkpoint, soak_lasts):
    injector, registry, ledger = FaultInjector(), load_plugins(), Ledger()
    registry.add_plugin(injector, name="kept")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="kept", allow_private_addresses=True, **OPTIONS)
    images = {"/picture.png": body(encode(noise(40, 60)))}
    engine = Engine(config, registry=registry)
    with engine, serving(engine) as server, serve(dict(images)) as web, server.http() as client:
        idle = _descriptors()
        with Clients(server.url, web.url(""), ledger).running(CLIENTS):
            faults = _faults(ledger, injector, web, images)
            warm = _run_faults(faults, lambda count: soak_lasts(count, WARM_UP))
            end = _run_faults(faults, lambda count: soak_lasts(count, 1))
        assert not ledger.unexpected, ledger.unexpected[:3]
        until(lambda: engine.stats().active_requests == 0)
        until(lambda: counted(client, "requests_total", CHAT) == sum(ledger.outcomes.values()))
        until(lambda: _descriptors() <= idle + SPARE + MEDIA_WORKERS * FILES_PER_WORKER)
        report = (
            f"{dict(ledger.outcomes)}, restarts {engine.stats().restarts}, MiB {warm:.0f} -> {end:.0f},"
            f" descriptors {idle} -> {_descriptors()}"
        )
        print(report)  # noqa: T201 - for manual runs
        check_outcomes(client, ledger, report)
        assert counted(client, "prompt_tokens_total") == ledger.prompt_tokens
        assert counted(client, "generation_tokens_total") == ledger.completion_tokens
        assert engine.stats().restarts > 0
    assert end < GROWTH * warm, report


def check_outcomes(client, ledger, report):
    """Check that each request was counted once, with its client's outcome; one that left may have got another first."""
    seen = dict(ledger.outcomes)
    left = seen.pop("left")
    counts = {name: counted(client, "requests_total", CHAT, outcome=name) for name in (*seen, "cancelled")}
    canceled = counts.pop("cancelled")
    others = sum(counts[name] - seen[name] for name in seen)
    assert all(counts[name] >= seen[name] for name in seen), (counts, report)
    assert canceled + others == left, (counts, canceled, report)
    assert {"success", "invalid", "rejected"} <= seen.keys(), report


def counted(client, name, route=None, outcome=None):
    wanted = {key: value for key, value in (("route", route), ("outcome", outcome)) if value}
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == f"dashinfer_vlm_{name}"]
    return sum(sample.value for sample in samples if wanted.items() <= sample.labels.items())


def _faults(ledger, injector, web, images):
    """Cause a fault after each `FAULT_REQUESTS` requests; yields the number of faults so far."""
    rng = random.Random(0)
    for count in itertools.count():
        yield count
        enough = sum(ledger.outcomes.values()) + FAULT_REQUESTS
        until(lambda enough=enough: sum(ledger.outcomes.values()) >= enough)
        if rng.random() < 0.5:
            injector.kill()
        else:
            web.responses.clear() if web.responses else web.responses.update(images)


def _run_faults(faults, lasts):
    """Cause faults while `lasts` is true; return the resident memory in MiB, the minimum of some samples."""
    while lasts(next(faults)):
        pass
    return min(_memory() for _ in range(20))


def _descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def _memory():
    time.sleep(0.1)
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
