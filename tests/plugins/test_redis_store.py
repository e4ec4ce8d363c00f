"""The embedding store in Redis or Valkey, with a real server: killed, slow, full, and with wrong values."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.embedding_store import Read, open_store
from dashinfer_vlm_core.embedding_store.client import EmbeddingStoreClient
from dashinfer_vlm_core.embedding_store.codec import EmbeddingCodec
from dashinfer_vlm_core.errors import ConfigError, MissingDependency
from dashinfer_vlm_core.installation import install_step
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.vision import VisionService
from dashinfer_vlm_redis import RedisStoreFactory
from tests.clock import ManualClock, run, skippable_loop
from tests.core.test_vision import MeanTower, mean_of
from tests.patches import clip, random_patches
from tests.redis_server import RedisServer
from tests.samples import image_url
from tests.waiting import HANG, auntil, until

TTL = 1000
ITEMS = [random_patches(1, 4, 4, seed=seed) for seed in range(8)]
A, B = ITEMS[:2]
FIRST, SECOND, THIRD = (f"{number:064x}" for number in range(3))


@pytest.fixture(scope="module")
def running_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture
def server(running_server):
    yield running_server
    running_server.client.flushall()
    running_server.client.config_set("maxmemory", 0)


def new_store(server):
    from dashinfer_vlm_redis.store import RedisStore

    return RedisStore(server.url, ttl=TTL)


def use(server, scenario):
    """Run `scenario(store)` on an event loop whose clock can be moved."""

    async def scene():
        store = new_store(server)
        try:
            return await scenario(store)
        finally:
            await store.close()

    return run(scene())


def name(key):
    return f"dashinfer-vlm:embedding:{key}"


def test_host_name_of_a_certificate_is_verified():
    from dashinfer_vlm_redis.store import RedisStore

    store = RedisStore("rediss://127.0.0.1:1", ttl=TTL)
    assert store._client.connection_pool.make_connection().check_hostname


def test_values_of_a_lookup_are_read_in_order(server):
    async def scenario(store):
        await store.put(FIRST, b"one")
        await store.put(SECOND, bytes(range(256)) * 4096)
        reads = [Read(SECOND, 1 << 20), Read(THIRD, 10), Read(FIRST, 3)]
        assert await store.get(reads) == [bytes(range(256)) * 4096, None, b"one"]

    use(server, scenario)


def test_longer_value_is_cut_after_one_byte_more(server):
    async def scenario(store):
        await store.put(FIRST, bytes(1 << 20))
        assert await store.get([Read(FIRST, 100)]) == [bytes(101)]

    use(server, scenario)


def test_values_expire_after_their_last_use(server):
    async def scenario(store):
        await store.put(FIRST, b"one")
        assert 0 < server.client.ttl(name(FIRST)) <= TTL
        server.client.expire(name(FIRST), 2 * TTL)
        await store.get([Read(FIRST, 3)])
        assert 0 < server.client.ttl(name(FIRST)) <= TTL

    use(server, scenario)


def test_canceled_lookup_leaves_no_reply_for_the_next_one(server):
    async def scenario(store):
        values = {key: bytes([number]) * (1 << 20) for number, key in enumerate((FIRST, SECOND, THIRD))}
        for key, value in values.items():
            await store.put(key, value)
        for turns in range(60):  # canceled at different points of the exchange
            lookup = asyncio.create_task(store.get([Read(FIRST, 1 << 20)]))
            for _ in range(turns):
                await asyncio.sleep(0)
            lookup.cancel()
            await asyncio.gather(lookup, return_exceptions=True)
            assert await store.get([Read(SECOND, 1 << 20)]) == [values[SECOND]]

    use(server, scenario)


def test_doctor_describes_the_server(server):
    async def scenario(store):
        return await store.describe()

    text = use(server, scenario)
    assert "maxmemory: no limit, maxmemory-policy: noeviction" in text
    assert text.startswith(("Redis ", "Valkey "))


# With the vision service


class Replica:
    """A vision service that uses the server, as another process would. Its clock is that of pauses after failures."""

    def __init__(self, server, *, timeout=HANG):
        self.tower, self.clock = MeanTower(), ManualClock()
        example = mean_of(A)
        client = EmbeddingStoreClient(
            new_store(server),
            EmbeddingCodec(example),
            model_key=b"model",
            timeout=timeout,
            clock=self.clock,
        )
        self.service = VisionService(self.tower, cache_bytes=0, batch_patches=64, store=client)

    @property
    def stats(self):
        return self.service.stats.store

    async def check(self, *items):
        """Embed items, and check that the embeddings are those that the vision encoder computes."""
        for tokens, item in zip(await self.service.embed(items), items, strict=True):
            assert tokens.embedding.numpy().tobytes() == mean_of(item).numpy().tobytes()

    async def written(self):
        await auntil(lambda: not self.stats.pending_bytes)

    async def close(self):
        await self.service.close()


def with_replicas(server, scenario, count=2, **options):
    """Run `scenario(*replicas)`."""

    async def scene():
        replicas = [Replica(server, **options) for _ in range(count)]
        try:
            await scenario(*replicas)
        finally:
            for replica in replicas:
                await replica.close()

    run(scene())


def test_replicas_encode_each_image_once(server):
    async def scenario(*replicas):
        for number, item in enumerate(ITEMS):
            await replicas[number % 4].check(item)
            await replicas[number % 4].written()
        for replica in replicas:
            await replica.check(*ITEMS)
        assert sum(len(replica.tower.passes) for replica in replicas) == len(ITEMS)
        assert sum(replica.stats.hits for replica in replicas) == 4 * len(ITEMS)

    with_replicas(server, scenario, 4)


def test_replicas_share_units_of_videos(server):
    async def scenario(first, second):
        await first.check(clip(0, 4))
        await first.written()
        await second.check(clip(1, 5))
        assert [len(batch) for batch in second.tower.passes] == [1]
        assert second.stats.hits == 3

    with_replicas(server, scenario)


def test_killed_server_costs_only_time(server, caplog):
    async def scenario(replica):
        await replica.check(A)
        await replica.written()
        server.kill()
        for _ in range(5):
            await replica.check(A, B)
        assert (replica.stats.errors, replica.stats.skipped, replica.stats.available) == (6, 4, False)
        server.start()
        replica.clock.advance(60.0)
        await replica.check(A)  # the server has lost its values
        await replica.written()
        await replica.check(A)
        assert (replica.stats.hits, replica.stats.available) == (1, True)

    with_replicas(server, scenario, 1)
    assert caplog.text.count("Lookups in the embedding store fail") == 1


def test_slow_server_costs_only_the_time_budget(server):
    async def scenario(replica):
        await replica.check(A)
        await replica.written()
        server.pause(HANG)
        request = asyncio.create_task(replica.check(A))
        while replica.stats.timeouts == 0:
            await asyncio.sleep(0.001)
            await skippable_loop().askip(1.0)
        await request
        server.kill()
        server.start()

    with_replicas(server, scenario, 1, timeout=0.5)


def test_full_server_costs_no_request(server):
    async def scenario(replica):
        await replica.check(A)
        await replica.written()
        server.client.config_set("maxmemory", 1)
        for item in ITEMS:
            await replica.check(item)
            await replica.written()
        assert (replica.stats.hits, replica.stats.write_errors, replica.stats.dropped) == (1, 3, 4)
        assert replica.stats.available

    with_replicas(server, scenario, 1)


def test_security_33_wrong_values_are_not_used_and_replaced(server):
    async def scenario(replica):
        await replica.check(A, B)
        await replica.written()
        keys = sorted(server.client.keys())
        values = [server.client.get(key) for key in keys]
        for wrong in ([b"wrong"] * 2, [bytes(len(value)) for value in values], values[::-1]):
            for key, value in zip(keys, wrong, strict=True):
                server.client.set(key, value)
            await replica.check(A, B)
            await replica.written()
            assert [server.client.get(key) for key in keys] == values
        assert (replica.stats.invalid, replica.stats.hits) == (6, 0)
        for key in keys:
            server.client.delete(key)
            server.client.rpush(key, b"a list")
        await replica.check(A, B)
        assert replica.stats.errors == 2

    with_replicas(server, scenario, 1)


@pytest.mark.slow
def test_engines_share_a_server(server):
    config = EngineConfig(
        model="demo", decoder="torch", embedding_store=server.store_url, limits={"store_timeout": HANG}
    )

    def ask(engine, seed):
        content = [{"type": "image_url", "image_url": {"url": image_url(60, 60, seed)}}, {"type": "text", "text": "?"}]
        message = {"role": "user", "content": content}
        request = {"messages": [message], "max_tokens": 4, "temperature": 0, "logprobs": True}
        return [token.logprob for token in engine.chat(request).choices[0].logprobs.content]

    with (
        Engine(config) as first,
        Engine(config) as second,
        Engine(EngineConfig(model="demo", decoder="torch")) as alone,
    ):
        assert ask(first, 1) == ask(alone, 1)
        until(lambda: not first.stats().vision.store.pending_bytes)
        assert ask(second, 1) == ask(alone, 1)
        assert (first.stats().vision.passes, second.stats().vision.passes) == (1, 0)
        server.kill()
        assert ask(second, 2) == ask(alone, 2)
        assert second.stats().vision.store.errors == 1
        server.start()
        assert ask(second, 3) == ask(alone, 3)
        assert second.stats().vision.store.misses == 1


# Options


def test_schemes_are_registered():
    stores = load_plugins().embedding_stores
    assert {"file", "redis", "rediss", "valkey", "valkeys"} <= set(stores)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
def test_url_is_opened_without_a_connection(scheme):
    config = EngineConfig(embedding_store=f"{scheme}://user:secret@host.invalid:1/2")
    store = open_store(load_plugins().embedding_stores, config)
    arguments = store._client.connection_pool.connection_kwargs
    assert (arguments["host"], arguments["port"], arguments["db"]) == ("host.invalid", 1, 2)
    assert ("SSL" in store._client.connection_pool.connection_class.__name__) == (scheme in {"rediss", "valkeys"})
    asyncio.run(store.close())


@pytest.mark.parametrize("rest", ["host:port", "user:hunter2@host:99999x", "host/0?socket_timeout=hunter2"])
def test_invalid_url_is_rejected_without_its_password(rest):
    with pytest.raises(ConfigError) as error:
        RedisStoreFactory().open(f"redis://{rest}", EngineConfig())
    assert error.value.param == "embedding_store"
    assert "hunter2" not in error.value.message


def test_missing_extra_names_install_command(monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == "redis"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "dashinfer_vlm_redis.store", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingDependency, match=re.escape(install_step("server"))):
        RedisStoreFactory().open("redis://localhost", EngineConfig())
