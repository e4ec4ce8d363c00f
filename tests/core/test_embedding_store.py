"""The store of visual embeddings: values are checked, lookups have a time budget, and its failures only cost time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.embedding_store import (
    EmbeddingStoreOptions,
    FileStoreFactory,
    Read,
    open_store,
    redacted,
)
from dashinfer_vlm_core.embedding_store import client as client_module
from dashinfer_vlm_core.embedding_store import file_store as file_store_module
from dashinfer_vlm_core.embedding_store.breaker import CircuitBreaker
from dashinfer_vlm_core.embedding_store.client import CLOSE_TIMEOUT, WRITE_TIMEOUT, EmbeddingStoreClient, Lookup
from dashinfer_vlm_core.embedding_store.codec import EmbeddingCodec
from dashinfer_vlm_core.embedding_store.file_store import BLOCK, LOCK_FILE, SIZE_FILE, FileStore
from dashinfer_vlm_core.embedding_store.interface import InvalidValueError
from dashinfer_vlm_core.engine.loading import open_vision_store
from dashinfer_vlm_core.errors import ConfigError, EngineClosed
from dashinfer_vlm_core.kernels.choice import KernelSelector, this_machine
from dashinfer_vlm_core.kernels.factories import TorchKernelFactory
from dashinfer_vlm_core.media import Embeddings
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_core.models.vision_key import vision_key
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.vision import VisionService
from dashinfer_vlm_core.vision.service import FIRST_BUDGET
from dashinfer_vlm_qwen2_5_vl import Qwen25VL
from dashinfer_vlm_qwen3_vl import Qwen3VL, Qwen35
from tests.cases import cases
from tests.clock import ManualClock, skippable_loop
from tests.clock import run as run_skippable
from tests.core.test_vision import WIDTH, MeanTower, cancel, mean_of, wait_for_pass
from tests.patches import random_patches
from tests.qwen3_5.tiny_qwen3_5 import write_checkpoint as write_qwen3_5
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint as write_qwen3_vl
from tests.samples import image_url
from tests.tiny import write_qwen2_5_vl
from tests.waiting import HANG, auntil

KEY = bytes(range(32))
KEYS = [f"{number:064x}" for number in range(100)]
A, B, C = (random_patches(1, 4, 4, seed=seed) for seed in range(3))
MIB = 1 << 20


class MemoryStore:
    """A store in a dictionary.

    Attributes:
        values: the stored values by key.
        lookups: the keys of every lookup.
        gate: while it is closed, operations wait.
        error: raised by operations, if any.
        write_error: raised by writes only.
    """

    def __init__(self):
        self.values = {}
        self.lookups = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error = self.write_error = None
        self.closed = False

    async def get(self, reads):
        self.lookups.append([read.key for read in reads])
        await self.gate.wait()
        if self.error:
            raise self.error
        return [value and value[: read.size + 1] for read in reads for value in [self.values.get(read.key)]]

    async def put(self, key, value):
        await self.gate.wait()
        if error := self.error or self.write_error:
            raise error
        self.values[key] = value

    async def describe(self):
        return f"{len(self.values)} values"

    async def close(self):
        self.closed = True


def embedding(seed=0, *, tokens=4, width=WIDTH, dtype=torch.float32):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def codec_for(example=None, *, secret=b""):
    return EmbeddingCodec(embedding() if example is None else example, secret=secret)


def client_of(store, *, clock=lambda: 0.0, **options):
    """The clock is that of pauses after failures; timeouts are those of the event loop."""
    return EmbeddingStoreClient(store, codec_for(), model_key=b"model", clock=clock, **options)


def same_bits(first, second):
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


async def written(client):
    """Wait until the background writes are done."""
    await auntil(lambda: not client.stats.pending_bytes)


# Values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_value_restores_every_bit(dtype):
    tensor = embedding(dtype=dtype)
    tensor[0, :3] = torch.tensor([-0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 2])
    codec = codec_for(tensor)
    value = codec.encode(KEY, tensor)
    assert len(value) == codec.size(4)
    assert same_bits(codec.decode(KEY, value, 4), tensor)


def test_encoder_output_under_inference_mode_is_stored():
    with torch.inference_mode():
        tensor = embedding(dtype=torch.bfloat16) * 2
    codec = codec_for(tensor)
    restored = codec.decode(KEY, codec.encode(KEY, tensor), 4)
    assert torch.equal(restored, tensor)


VALUE = codec_for().encode(KEY, embedding())


def test_security_33_changed_value_is_not_used():
    accepted = [index for index in (*range(len(VALUE) - 16 * 4), len(VALUE) - 1) if is_accepted(flipped(VALUE, index))]
    assert accepted == []


def flipped(value, index):
    return value[:index] + bytes([value[index] ^ 1]) + value[index + 1 :]


def is_accepted(value):
    with contextlib.suppress(InvalidValueError):
        codec_for().decode(KEY, value, 4)
        return True
    return False


@cases(
    ("codec", "key", "value", "tokens"),
    [
        (codec_for(), KEY, b"", 4),
        (codec_for(), KEY, VALUE[:-1], 4),
        (codec_for(), KEY, VALUE + b"\0", 4),
        (codec_for(), KEY, bytes(len(VALUE)), 4),
        (codec_for(), KEY, VALUE, 5),
        (codec_for(), KEY[::-1], VALUE, 4),
        (codec_for(secret=b"secret"), KEY, VALUE, 4),
        (codec_for(), KEY, codec_for(secret=b"secret").encode(KEY, embedding()), 4),
        (codec_for(embedding(width=2 * WIDTH)), KEY, VALUE, 2),
        (codec_for(embedding(dtype=torch.float16, width=2 * WIDTH)), KEY, VALUE, 4),
        (codec_for(), KEY, codec_for().encode(KEY, embedding() * torch.inf), 4),
        (codec_for(), KEY, codec_for().encode(KEY, embedding() * torch.nan), 4),
    ],
)
def test_security_33_value_of_another_kind_is_not_used(codec, key, value, tokens):
    with pytest.raises(InvalidValueError):
        codec.decode(key, value, tokens)


@cases("dtype", [torch.float32, torch.bfloat16, torch.float16])
@cases("number", [torch.inf, -torch.inf, torch.nan, -torch.nan])
def test_single_number_that_is_not_finite_is_found(dtype, number):
    rows = torch.full((4, WIDTH), torch.finfo(dtype).min, dtype=dtype)
    codec = codec_for(rows)
    assert torch.equal(codec.decode(KEY, codec.encode(KEY, rows), 4), rows)
    rows[2, 1] = number
    with pytest.raises(InvalidValueError, match="not finite"):
        codec.decode(KEY, codec.encode(KEY, rows), 4)


# Lookups and writes


def test_stored_embedding_is_found_by_another_client():
    async def scenario():
        store, tensor = MemoryStore(), embedding(3)
        first = client_of(store)
        assert await first.get([Lookup(KEY, 4)], budget=HANG) == [None]
        first.put(KEY, tensor)
        await first.close()
        assert store.closed
        second = client_of(store)
        other, found = await second.get([Lookup(KEY[::-1], 4), Lookup(KEY, 4)], budget=HANG)
        assert other is None
        assert same_bits(found, tensor)
        assert len(store.lookups) == 2  # one operation for all items of a request
        assert (first.stats.misses, first.stats.writes, second.stats.hits, second.stats.misses) == (1, 1, 1, 1)

    run_skippable(scenario())


def test_model_secret_and_content_have_separate_keys():
    async def scenario():
        store = MemoryStore()
        for options in ({"model_key": b"one"}, {"model_key": b"two"}, {"model_key": b"one", "secret": b"secret"}):
            client = EmbeddingStoreClient(store, codec_for(), **options)
            client.put(KEY, embedding())
            client.put(KEY[::-1], embedding())
            await client.close()
        assert len(store.values) == 6
        assert {len(bytes.fromhex(key)) for key in store.values} == {32}

    run_skippable(scenario())


def test_lookup_ends_at_its_time_budget():
    async def scenario():
        store = MemoryStore()
        store.gate.clear()
        client = client_of(store)
        lookup = asyncio.create_task(client.get([Lookup(KEY, 4)], budget=10 * HANG))
        await skippable_loop().askip(9 * HANG)
        assert not lookup.done()
        await skippable_loop().askip(HANG)
        assert await lookup == [None]
        assert client.stats.timeouts == 1

    run_skippable(scenario())


def test_timeout_option_replaces_the_budget():
    async def scenario():
        store = MemoryStore()
        store.gate.clear()
        lookup = asyncio.create_task(client_of(store, timeout=10 * HANG).get([Lookup(KEY, 4)], budget=1.0))
        await skippable_loop().askip(9 * HANG)
        assert not lookup.done()
        store.gate.set()
        assert await lookup == [None]

    run_skippable(scenario())


def test_lookups_pause_after_failures_and_resume(caplog):
    async def scenario():
        store, clock = MemoryStore(), ManualClock()
        client = client_of(store, clock=clock)
        client.put(KEY, embedding())
        await written(client)
        store.error = ConnectionError("refused\nby the server")

        async def found():
            return (await client.get([Lookup(KEY, 4)], budget=HANG))[0] is not None

        assert not any([await found() for _ in range(10)])
        assert len(store.lookups) == 3
        assert (client.stats.errors, client.stats.skipped, client.stats.available) == (3, 7, False)
        for pause, attempts in ((1.01, 4), (1.01, 4), (1.01, 5)):  # the second pause is twice as long
            clock.advance(pause)
            assert not await found()
            assert len(store.lookups) == attempts
        store.error = None
        clock.advance(60.0)
        assert await found()
        assert await found()
        assert client.stats.available

    with caplog.at_level(logging.INFO, logger="dashinfer_vlm_core.embedding_store"):
        run_skippable(scenario())
    failure, recovery = caplog.records
    assert failure.getMessage() == (
        "Lookups in the embedding store fail: ConnectionError: refused by the server. They pause, and requests continue"
        " without them."
    )
    assert recovery.getMessage() == "Lookups in the embedding store work again."


def test_one_lookup_at_a_time_is_attempted_after_a_pause():
    async def scenario():
        store, clock = MemoryStore(), ManualClock()
        client = client_of(store, clock=clock)
        store.error = OSError()
        for _ in range(3):
            await client.get([Lookup(KEY, 4)], budget=HANG)
        store.error = None
        store.gate.clear()
        clock.advance(1.01)
        attempt = asyncio.create_task(client.get([Lookup(KEY, 4)], budget=HANG))
        await asyncio.sleep(0)
        assert await client.get([Lookup(KEY, 4)], budget=HANG) == [None]
        assert client.stats.skipped == 1
        store.gate.set()
        await attempt
        assert client.stats.available

    run_skippable(scenario())


def test_late_failure_after_a_canceled_attempt_does_not_prolong_the_pause():
    now = 0.0
    breaker = CircuitBreaker("Lookups", lambda: now)
    for _ in range(3):
        assert breaker.allows()
        breaker.failed("refused")
    now = 1.01
    assert breaker.allows()  # this one is canceled
    now = 2.5
    assert not breaker.allows()
    breaker.failed("no response")  # of an operation that started before the first pause
    now = 3.02
    assert breaker.allows()


def test_longest_pause_is_a_minute():
    clock = ManualClock()
    breaker = CircuitBreaker("Lookups", clock)
    for _ in range(10):
        clock.advance(60.01)
        assert breaker.allows()
        breaker.failed("refused")


def test_warnings_are_at_least_a_minute_apart(caplog):
    clock = ManualClock()
    breaker = CircuitBreaker("Lookups", clock)
    for seconds, warnings in ((0.0, 1), (59.9, 1), (0.2, 2)):
        clock.advance(seconds)
        breaker.succeeded()
        for _ in range(3):
            breaker.failed("refused")
        assert caplog.text.count("Lookups fail: refused.") == warnings


def test_wrong_number_of_values_is_an_error():
    async def scenario():
        store = MemoryStore()
        store.get = lambda reads: asyncio.sleep(0, [])
        client = client_of(store)
        assert await client.get([Lookup(KEY, 4)], budget=HANG) == [None]
        assert client.stats.errors == 1

    run_skippable(scenario())


def test_invalid_value_is_counted_logged_once_and_replaced(caplog):
    async def scenario():
        store = MemoryStore()
        client = client_of(store)
        client.put(KEY, embedding())
        await written(client)
        (name,) = store.values
        for wrong in (b"wrong", bytes(10 * MIB), store.values[name][:-1] + b"x"):
            store.values[name] = wrong
            assert await client.get([Lookup(KEY, 4)], budget=HANG) == [None]
        assert (client.stats.invalid, client.stats.available) == (3, True)
        client.put(KEY, embedding())
        await written(client)
        assert (await client.get([Lookup(KEY, 4)], budget=HANG))[0] is not None

    run_skippable(scenario())
    assert caplog.text.count("A value in the embedding store is not used: its size is wrong.") == 1


def test_large_embedding_is_neither_looked_up_nor_written(monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_core.embedding_store.client.MAX_VALUE_BYTES", codec_for().size(4))

    async def scenario():
        store = MemoryStore()
        client = client_of(store)
        client.put(KEY, embedding(tokens=5))
        client.put(KEY, embedding(tokens=4))
        await written(client)
        small, large = await client.get([Lookup(KEY, 4), Lookup(KEY, 5)], budget=HANG)
        assert same_bits(small, embedding())
        assert large is None
        assert (client.stats.writes, client.stats.dropped, len(store.lookups[0])) == (1, 1, 1)

    run_skippable(scenario())


def test_waiting_writes_are_bounded(monkeypatch):
    size = 4 * WIDTH * 4
    monkeypatch.setattr("dashinfer_vlm_core.embedding_store.client.MAX_PENDING_BYTES", 3 * size)

    async def scenario():
        store = MemoryStore()
        store.gate.clear()
        client = client_of(store)
        for number in range(10):
            client.put(bytes([number]) * 32, embedding())
            await asyncio.sleep(0)
        assert (client.stats.pending_bytes, client.stats.dropped) == (3 * size, 7)
        store.gate.set()
        await written(client)
        assert (client.stats.writes, len(store.values)) == (3, 3)

    run_skippable(scenario())


def test_full_store_pauses_writes_but_not_lookups(caplog):
    async def scenario():
        store = MemoryStore()
        client = client_of(store)
        client.put(KEY, embedding())
        await written(client)
        store.write_error = OSError("No space left on device")
        for number in range(5):
            client.put(bytes([number]) * 32, embedding())
            await written(client)
        assert (client.stats.write_errors, client.stats.dropped, client.stats.available) == (3, 2, True)
        assert same_bits((await client.get([Lookup(KEY, 4)], budget=HANG))[0], embedding())

    run_skippable(scenario())
    assert caplog.text.count("Writes to the embedding store fail: OSError: No space left on device.") == 1


def test_failed_write_to_a_folder_names_it(tmp_path, monkeypatch):
    def full(file, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = FileStore(tmp_path, max_bytes=1000 * BLOCK, ttl=60)
    monkeypatch.setattr(file_store_module, "open", full, raising=False)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        asyncio.run(store.put("a", b"value"))


def test_write_has_a_timeout():
    async def scenario():
        store = MemoryStore()
        store.gate.clear()
        client = client_of(store)
        client.put(KEY, embedding())
        while not client.stats.write_errors:
            await asyncio.sleep(0.001)  # the value is encoded in a thread
            await skippable_loop().askip(WRITE_TIMEOUT)
        assert client.stats.pending_bytes == 0

    run_skippable(scenario())


def test_close_does_not_wait_for_a_store_that_hangs():
    async def scenario():
        store = MemoryStore()
        store.gate.clear()
        client = client_of(store)
        for number in range(3):
            client.put(bytes([number]) * 32, embedding())
        closing = asyncio.create_task(client.close())
        while not closing.done():
            await asyncio.sleep(0.001)
            await skippable_loop().askip(CLOSE_TIMEOUT)
        await closing
        assert (client.stats.writes, client.stats.pending_bytes, store.closed) == (0, 0, True)

    run_skippable(scenario())


# The vision service


def run(scenario, **options):
    """Run `scenario(store, new_service)`, where each service is another process that uses the store."""

    async def scene():
        store, services = MemoryStore(), []

        def new_service(**more):
            tower = MeanTower()
            client = client_of(store, **{**options, **more})
            services.append((tower, VisionService(tower, cache_bytes=MIB, batch_patches=64, store=client)))
            return services[-1]

        try:
            await scenario(store, new_service)
        finally:
            for tower, service in services:
                tower.gate.set()
                await service.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_skippable(scene())


def test_item_encoded_by_one_service_is_found_by_another():
    async def scenario(store, new_service):
        (tower, first), (other_tower, second) = new_service(), new_service()
        original = await first.embed([A, B])
        await first.close()
        found = await second.embed([B, A, C])
        assert tower.passes == [[A.digest, B.digest]]
        assert other_tower.passes == [[C.digest]]
        assert same_bits(found[1].embedding, original[0].embedding)
        assert same_bits(found[0].embedding, original[1].embedding)
        assert same_bits(found[2].embedding, mean_of(C))
        assert [tokens.digest for tokens in found] == [B.digest, A.digest, C.digest]
        assert (await second.embed([A]))[0].embedding is found[1].embedding  # now in the local cache
        assert (second.stats.store.hits, second.stats.hits, second.stats.encoded) == (2, 1, 1)

    run(scenario)


def test_salts_separate_stored_items():
    async def scenario(store, new_service):
        _, first = new_service()
        await first.embed([A], cache_salt="anna")
        await first.close()
        for salt, passes in (("anna", 0), ("bert", 1), ("", 1)):
            tower, service = new_service()
            await service.embed([A], cache_salt=salt)
            assert len(tower.passes) == passes
            await service.close()

    run(scenario)


def test_request_goes_on_when_the_store_is_slow():
    async def scenario(store, new_service):
        store.gate.clear()
        tower, service = new_service()
        request = asyncio.create_task(service.embed([A]))
        await skippable_loop().askip(FIRST_BUDGET / 2)
        assert tower.passes == []
        await skippable_loop().askip(FIRST_BUDGET)
        assert same_bits((await request)[0].embedding, mean_of(A))
        assert service.stats.store.timeouts == 1
        store.gate.set()

    run(scenario)


def test_budget_is_half_of_the_measured_time_of_encoding():
    async def scenario(store, new_service):
        tower, service = new_service()
        tower.gate.clear()
        first = asyncio.create_task(service.embed([A]))
        await wait_for_pass(tower)
        await skippable_loop().askip(1000.0)  # the pass takes that long
        tower.gate.set()
        await first
        store.gate.clear()
        second = asyncio.create_task(service.embed([B, C]))  # two items take twice as long
        await skippable_loop().askip(990.0)
        assert len(tower.passes) == 1
        await skippable_loop().askip(20.0 + HANG)  # the measurement includes real time
        await second
        assert tower.passes[1:] == [[B.digest, C.digest]]
        store.gate.set()

    run(scenario)


def test_request_joins_a_lookup():
    async def scenario(store, new_service):
        store.gate.clear()
        tower, service = new_service(timeout=HANG)
        requests = [asyncio.create_task(service.embed([A])) for _ in range(3)]
        await asyncio.sleep(0)
        store.gate.set()
        for (tokens,) in await asyncio.gather(*requests):
            assert same_bits(tokens.embedding, mean_of(A))
        assert (len(store.lookups), len(tower.passes), service.stats.joins) == (1, 1, 2)

    run(scenario)


def test_canceled_request_is_not_encoded_after_its_lookup():
    async def scenario(store, new_service):
        store.gate.clear()
        tower, service = new_service(timeout=HANG)
        leaving, staying = asyncio.create_task(service.embed([A, B])), asyncio.create_task(service.embed([B]))
        await asyncio.sleep(0)
        await cancel(leaving)
        store.gate.set()
        await staying
        assert tower.passes == [[B.digest]]
        await service.embed([A])  # it can be requested again
        assert tower.passes == [[B.digest], [A.digest]]

    run(scenario)


def test_close_during_a_lookup_fails_the_request():
    async def scenario(store, new_service):
        store.gate.clear()
        _, service = new_service(timeout=HANG)
        request = asyncio.create_task(service.embed([A]))
        await asyncio.sleep(0)
        store.gate.set()
        await service.close()
        with pytest.raises(EngineClosed):
            await request

    run(scenario)


def test_bug_in_a_lookup_costs_only_time(caplog):
    async def broken(lookups, *, budget):
        raise RuntimeError("a bug")

    async def scenario(store, new_service):
        _, service = new_service()
        service._store.get = broken
        (tokens,) = await service.embed([A])
        assert same_bits(tokens.embedding, mean_of(A))

    run(scenario)
    assert "A lookup in the embedding store failed." in caplog.text


def test_embeddings_of_requests_are_not_stored():
    async def scenario(store, new_service):
        _, service = new_service()
        rows = np.ones((4, WIDTH), np.float32)
        await service.embed([Embeddings(rows=rows, grid=A.grid, tokens=4, kind="image", path="x", digest=KEY)])
        assert (store.values, store.lookups) == ({}, [])

    run(scenario)


# The store in a folder


def open_folder(folder, *, max_bytes=MIB, ttl=3600.0):
    folder.mkdir(exist_ok=True)
    return FileStore(folder, max_bytes=max_bytes, ttl=ttl)


def use(store, *operations):
    """Run operations on a store, and return their results."""

    async def scene():
        return [await operation for operation in operations]

    return asyncio.run(scene())


def read(store, *keys, size=100):
    (values,) = use(store, store.get([Read(key, size) for key in keys]))
    return values


def write(store, values):
    use(store, *(store.put(key, value) for key, value in values.items()))


def size_on_disk(folder):
    return sum(
        -(-path.stat().st_size // BLOCK) * BLOCK for path in folder.iterdir() if path.name not in {LOCK_FILE, SIZE_FILE}
    )


def test_folder_keeps_values_after_a_restart(tmp_path):
    store = open_folder(tmp_path)
    write(store, {KEYS[0]: b"zero", KEYS[1]: b"one"})
    write(store, {KEYS[1]: b"uno"})
    assert read(open_folder(tmp_path), *KEYS[:3]) == [b"zero", b"uno", None]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_folder_reads_at_most_one_byte_more_than_expected(tmp_path):
    store = open_folder(tmp_path)
    write(store, {KEYS[0]: bytes(1000)})
    assert read(store, KEYS[0], size=10) == [bytes(11)]


def test_full_folder_deletes_values_that_were_not_used_for_longest(tmp_path):
    store = open_folder(tmp_path, max_bytes=10 * BLOCK)
    for age, key in enumerate(KEYS[:10]):
        write(store, {key: b"value"})
        os.utime(store._path(key), (0, tmp_path.stat().st_mtime - 1000 + age))
    read(store, KEYS[0])
    write(store, {KEYS[10]: b"value"})
    assert [value is None for value in read(store, *KEYS[:11])] == [False, True, True, *[False] * 8]
    assert size_on_disk(tmp_path) <= 9 * BLOCK


def test_folder_never_exceeds_its_size(tmp_path):
    store = open_folder(tmp_path, max_bytes=20 * BLOCK)
    for number, key in enumerate(KEYS):
        write(store, {key: bytes(1 + 1000 * (number % 17))})
        assert size_on_disk(tmp_path) <= 20 * BLOCK
    assert read(store, KEYS[-1], size=BLOCK * 20)[0] is not None


def test_expired_values_are_missing_and_deleted(tmp_path):
    store = open_folder(tmp_path, ttl=60.0)
    write(store, {KEYS[0]: b"old", KEYS[1]: b"new"})
    os.utime(store._path(KEYS[0]), (0, tmp_path.stat().st_mtime - 61))
    assert read(store, *KEYS[:2]) == [None, b"new"]
    open_folder(tmp_path, ttl=60.0)
    assert not store._path(KEYS[0]).exists()


def test_folder_recovers_from_a_crash(tmp_path):
    """After a crash, there can be temporary files, a wrong total, and values that were not written completely."""
    store = open_folder(tmp_path, max_bytes=10 * BLOCK)
    write(store, {KEYS[0]: b"value"})
    stale, recent = tmp_path / ".1.tmp", tmp_path / ".2.tmp"
    for path in (stale, recent):
        path.write_bytes(bytes(BLOCK))
    os.utime(stale, (0, 0))
    for total in (b"", b"-1", b"x" * 100, b"00000000000000000000", b"99999999999999999999"):
        (tmp_path / SIZE_FILE).write_bytes(total)
        reopened = open_folder(tmp_path, max_bytes=10 * BLOCK)
        assert int((tmp_path / SIZE_FILE).read_bytes()) == 2 * BLOCK  # the value, and a file of another process
        (tmp_path / SIZE_FILE).write_bytes(total if total.strip(b"0") else b"x")  # while it is used
        write(reopened, {KEYS[1]: b"other"})
        assert read(reopened, *KEYS[:2]) == [b"value", b"other"]
        reopened._path(KEYS[1]).unlink()
    assert (stale.exists(), recent.exists()) == (False, True)


def test_deleted_files_are_noticed_when_the_folder_is_full(tmp_path):
    store = open_folder(tmp_path, max_bytes=10 * BLOCK)
    write(store, dict.fromkeys(KEYS[:10], b"value"))
    for key in KEYS[:9]:
        store._path(key).unlink()
    write(store, {KEYS[10]: b"value"})
    assert int((tmp_path / SIZE_FILE).read_bytes()) == size_on_disk(tmp_path) == 2 * BLOCK


def test_failed_write_leaves_no_file(tmp_path):
    folder = tmp_path / "store"
    store = open_folder(folder)
    store._path(KEYS[0]).mkdir()
    with pytest.raises(OSError, match=r"[Dd]irectory"):
        write(store, {KEYS[0]: b"value"})
    assert not list(folder.glob("*.tmp"))
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        write(store, {KEYS[0]: b"value"})
    assert read(store, KEYS[0]) == [None]


def test_lock_of_another_process_is_not_waited_for_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store_module, "LOCK_TIMEOUT", 0.05)
    store, other = open_folder(tmp_path), open_folder(tmp_path)
    with other._lock(), pytest.raises(TimeoutError, match="could not be acquired"):
        write(store, {KEYS[0]: b"value"})
    assert not list(tmp_path.glob("*.tmp"))
    write(store, {KEYS[0]: b"value"})


def test_files_that_others_could_have_written_are_invalid(tmp_path):
    store = open_folder(tmp_path)
    write(store, dict.fromkeys(KEYS[:3], b"value"))
    store._path(KEYS[0]).chmod(0o666)
    store._path(KEYS[1]).unlink()
    store._path(KEYS[1]).symlink_to(store._path(KEYS[2]))
    os.mkfifo(store._path(KEYS[3]))
    assert read(store, *KEYS[:4]) == [b"", b"", b"value", b""]


WRITER = """
import asyncio, sys
from pathlib import Path
from dashinfer_vlm_core.embedding_store.file_store import FileStore
async def main():
    store = FileStore(Path(sys.argv[1]), max_bytes=30 * 4096, ttl=3600)
    for number in range(150):
        key = f"{number % 40:064x}"
        await store.put(key, key.encode() * 20)
        (value,) = await store.get([type("Read", (), {"key": key, "size": 5000})])
        assert value in (None, key.encode() * 20), value
asyncio.run(main())
"""


@pytest.mark.slow
def test_processes_share_a_folder(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(timeout=HANG) for process in processes] == [0, 0, 0]
    assert 0 < size_on_disk(tmp_path) <= 30 * BLOCK
    assert int((tmp_path / SIZE_FILE).read_bytes()) >= size_on_disk(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


# Options


def open_with(**options):
    return open_store({"file": FileStoreFactory()}, EngineConfig(**options))


@cases(
    ("options", "message"),
    [
        ({"embedding_store": "/srv/store"}, "must be a URL that begins with one of file://"),
        ({"embedding_store": "s3://user:hunter2@host/x"}, "must be a URL that begins with one of file://"),
        ({"embedding_store": "file://host/x"}, "must name a folder, such as file:///"),
        ({"embedding_store": "file:///"}, "must name a folder, such as file:///"),
        ({"embedding_store": "file:///x?y"}, "must name a folder, such as file:///"),
        ({"embedding_store": "file:///dev/null/x"}, "the folder /dev/null/x cannot be used: Not a directory"),
        ({"embedding_store": "file:///tmp/x", "embedding_store_mib": 63}, "embedding_store_mib: must be at least 64"),
    ],
)
def test_invalid_store_is_rejected_with_the_option(options, message):
    with pytest.raises(ConfigError) as error:
        open_with(**options)
    assert message in error.value.message
    assert "hunter2" not in error.value.message
    assert error.value.param in options


def test_folder_that_others_can_write_to_is_rejected(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write to it"):
        open_with(embedding_store=tmp_path.as_uri())


def test_new_folder_is_private(tmp_path):
    open_with(embedding_store=f"file://{tmp_path}/a/b%20c")
    assert (tmp_path / "a" / "b c").stat().st_mode & 0o777 == 0o700


def test_secret_is_read_from_a_file(tmp_path, caplog):
    file = tmp_path / "secret"
    options = EmbeddingStoreOptions(embedding_store_secret_file=file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        options.read_secret()
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="must have at least 16 bytes, got 5"):
        options.read_secret()
    file.write_text(f"{'s' * 16}\n")
    file.chmod(0o600)
    caplog.clear()
    assert options.read_secret() == b"s" * 16
    assert not caplog.text
    file.chmod(0o644)
    assert options.read_secret() == b"s" * 16
    assert f"All users of this machine can read or change the secret in {file}." in caplog.text
    assert EmbeddingStoreOptions().read_secret() == b""


def test_password_is_not_shown():
    url = "redis://user:hunt@er2@host:1/0?password=hunter2"
    assert "hunter2" not in repr(EngineConfig(embedding_store=url))
    assert redacted(url) == "redis://host:1/0"


# Models


def key_of(folder, family=Qwen2VL, **options):
    config = EngineConfig(device="cpu", **options)
    return vision_key(family().load_spec(folder), config, kernels="torch", family="test")


def changed(folder, name, prefix):
    """Copy a checkpoint, and change one number of its first tensor with a prefix."""
    copy = shutil.copytree(folder, name)
    file = copy / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensor = next(tensors[key] for key in sorted(tensors) if key.startswith(prefix))
    tensor.view(-1)[-1] += 1
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    return copy


def prefixes(folder):
    names = safetensors.torch.load_file(folder / "model.safetensors")
    vision = next(name.partition("visual.")[0] + "visual." for name in names if "visual." in name)
    return vision, min(name for name in names if not name.startswith(vision))


def test_key_covers_weights_of_the_vision_encoder_only(tiny_checkpoint, tmp_path):
    vision, text = prefixes(tiny_checkpoint)
    original = key_of(tiny_checkpoint)
    assert key_of(shutil.copytree(tiny_checkpoint, tmp_path / "same")) == original
    assert key_of(changed(tiny_checkpoint, tmp_path / "vision", vision)) != original
    assert key_of(changed(tiny_checkpoint, tmp_path / "text", text)) == original


def test_key_covers_settings(tiny_checkpoint, tmp_path):
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"mlp_ratio": 2', '"mlp_ratio":  2'))
    spec, options = Qwen2VL().load_spec(tiny_checkpoint), EngineConfig(device="cpu")
    keys = [
        key_of(tiny_checkpoint),
        key_of(copy),
        key_of(tiny_checkpoint, dtype="bfloat16"),
        key_of(tiny_checkpoint, vision_quantization="int8"),
        vision_key(spec, options, kernels="other", family="test"),
        vision_key(spec, options, kernels="torch", family="other"),
    ]
    assert len(set(keys)) == len(keys)


def test_kernels_are_identified_by_code_and_hardware():
    selector = KernelSelector([TorchKernelFactory()], EngineConfig(device="cpu"))
    unknown = selector.vision_identity()
    selector.choose("cpu", torch.float32)
    identity = selector.vision_identity()
    threads = f"{torch.get_num_threads()} threads"
    assert identity == f"torch {TorchKernelFactory().identity()} {this_machine()} {threads}"
    assert identity != unknown


FAMILIES = {
    "qwen2_vl": (Qwen2VL, None),
    "qwen2_5_vl": (Qwen25VL, write_qwen2_5_vl),
    "qwen3_vl": (Qwen3VL, write_qwen3_vl),
    "qwen3_5": (Qwen35, write_qwen3_5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_in_store_equals_encoded_one(name, dtype, tiny_checkpoint, tmp_path):
    """All columns are stored: with Qwen3-VL, a visual token also has levels for later layers (DeepStack)."""
    kind, create = FAMILIES[name]
    folder = create(tmp_path / name) if create and not (tmp_path / name).mkdir() else tiny_checkpoint
    family, registry = kind(), load_plugins()
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        cpu_kernels="torch",
        embedding_store=(tmp_path / "store").as_uri(),
        limits={"store_timeout": HANG},
    )
    spec = family.load_spec(folder)
    side = spec.pixels.patch_size
    item = random_patches(1, 4, 8, side=side)

    async def embed():
        kernels = KernelSelector(registry.kernels.values(), config)
        encoder = family.load_vision_encoder(spec, config, kernels)
        store = open_vision_store(registry, family, spec, config, kernels=kernels, encoder=encoder)
        service = VisionService(encoder, cache_bytes=MIB, batch_patches=64, store=store)
        (tokens,) = await service.embed([item])
        await service.close()
        return tokens.embedding, service.stats.passes

    (encoded, passes), (stored, passes_again) = asyncio.run(embed()), asyncio.run(embed())
    assert (passes, passes_again) == (1, 0)
    assert stored.shape == (8, spec.visual_width)
    assert same_bits(stored, encoded)


@pytest.mark.slow
@pytest.mark.parametrize("write", [None, write_qwen3_5], ids=["demo", "qwen3_5"])
def test_engine_finds_images_after_a_restart(tmp_path, write):
    config = EngineConfig(
        model=str(write(tmp_path / "model")) if write else "demo",
        embedding_store=(tmp_path / "store").as_uri(),
        limits={"store_timeout": HANG},
        cpu_kernels="torch",
    )
    part = {"type": "image_url", "image_url": {"url": image_url(60, 60, 3)}}
    content = [part, {"type": "text", "text": "Describe the picture."}]
    request = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, "logprobs": True}
    results = []
    for _ in range(2):
        with Engine(config) as engine:
            choice = engine.chat(request).choices[0]
            results.append((choice.message.content, [token.logprob for token in choice.logprobs.content]))
            stats = engine.stats().vision
    assert results[0] == results[1]
    assert (stats.passes, stats.store.hits) == (0, 1)


def test_default_limit_of_waiting_writes_holds_the_largest_value():
    assert client_module.MAX_VALUE_BYTES <= client_module.MAX_PENDING_BYTES
