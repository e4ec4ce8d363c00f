"""Rule 28: clients with different API keys share no cached media, embeddings or prompts."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.protocol.client import Client, current_client
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_dashinfer.plan import check_cache_salt, make_plan
from dashinfer_vlm_server import api_keys
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.plugin import isolate_clients
from dashinfer_vlm_server.settings import Settings
from tests.samples import encode, noise
from tests.security.conftest import LEAKS, image_data, text
from tests.server.conftest import serving
from tests.waiting import HANG

CHAT = "/v1/chat/completions"
KEYS = ("sk-alice", "sk-bob")
WORDS = text("What is this?")

_seeds = itertools.count(1000)


def new_image() -> bytes:
    """Return an image that no other test has sent."""
    return encode(noise(60, 60, next(_seeds)))


def by_uuid(uuid: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None, "uuid": uuid}


class Keyholder:
    """Sends requests with one API key."""

    def __init__(self, http: httpx.Client, key: str) -> None:
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}"}

    def chat(self, *parts: object, path: str = CHAT, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": list(parts)}], **fields}
        return self._http.post(path, json=body, headers=self._headers)

    def cached_tokens(self, *parts: object, **fields: object) -> int:
        response = self.chat(*parts, max_tokens=1, **fields)
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def sees(self, *parts: object, **fields: object) -> object:
        """Return the log probabilities of the first token, which identify the model's input."""
        response = self.chat(*parts, max_tokens=1, temperature=0, logprobs=True, top_logprobs=5, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["logprobs"]["content"]

    def error_code(self, *parts: object, **fields: object) -> str:
        response = self.chat(*parts, **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert not LEAKS.search(error["message"])
        return error["code"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(model="demo", decoder="torch")) as engine:
        yield engine


@contextlib.contextmanager
def two_keys(engine: Engine, **settings: Any) -> Iterator[list[Keyholder]]:
    with serving(engine, keys=ApiKeys(KEYS), **settings) as server, server.http() as http:
        yield [Keyholder(http, key) for key in KEYS]


@pytest.fixture(scope="module")
def isolated(engine: Engine) -> Iterator[list[Keyholder]]:
    with two_keys(engine) as keyholders:
        yield keyholders


@pytest.fixture(scope="module")
def sharing(engine: Engine) -> Iterator[list[Keyholder]]:
    with two_keys(engine, share_media_between_keys=True) as keyholders:
        yield keyholders


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "the same"}])
def test_security_28_uuid_of_another_key_is_unknown(isolated, fields):
    alice, bob = isolated
    hers, his, uuid = new_image(), new_image(), f"photo-{len(fields)}"
    seen = alice.sees({**image_data(hers), "uuid": uuid}, WORDS, **fields)
    assert bob.error_code(by_uuid(uuid), WORDS, **fields) == "uuid_not_cached"
    assert bob.error_code(by_uuid(uuid), WORDS, path="/tokenize", **fields) == "uuid_not_cached"
    other = bob.sees({**image_data(his), "uuid": uuid}, WORDS, **fields)  # Alice did not take the uuid
    assert other != seen
    assert alice.sees(by_uuid(uuid), WORDS, **fields) == seen
    assert bob.sees(by_uuid(uuid), WORDS, **fields) == other
    assert bob.chat(by_uuid(uuid), WORDS, path="/tokenize", **fields).status_code == 200


def test_security_28_embedding_cache_is_separated_by_key(engine, isolated):
    alice, bob = isolated
    part = image_data(new_image())

    def hits(keyholder: Keyholder) -> int:
        before = engine.stats().vision.hits
        keyholder.sees(part, WORDS)
        return engine.stats().vision.hits - before

    assert [hits(keyholder) for keyholder in (alice, bob, alice, bob)] == [0, 0, 1, 1]


@pytest.mark.parametrize(("secret", "hits"), [(b"shared by replicas", [1, 0]), (b"", [0, 0])])
def test_security_28_embedding_store_is_separated_by_key(tmp_path, monkeypatch, secret, hits):
    """Another process has other ids of keys: only with a shared secret, it finds what the same key stored."""
    part = image_data(new_image())
    config = EngineConfig(
        model="demo", decoder="torch", embedding_store=tmp_path.as_uri(), limits={"store_timeout": HANG}
    )
    found = []
    for process, senders in enumerate((KEYS[:1], KEYS)):
        monkeypatch.setattr(api_keys, "_ID_SECRET", bytes([process]) * 32)
        with Engine(config) as engine, two_keys(engine, namespace_secret=secret) as keyholders:
            for keyholder, _ in zip(keyholders, senders, strict=False):
                before = engine.stats().vision.store.hits
                keyholder.sees(part, WORDS)
                found.append(engine.stats().vision.store.hits - before)
    assert found == [0, *hits]


def test_security_28_prefix_cache_is_separated_by_key(isolated):
    alice, bob = isolated
    part, words = image_data(new_image()), text("Nobody else needs to know of this. " * 8)
    with_image, common = alice.cached_tokens(part, words), bob.cached_tokens(words)
    assert bob.cached_tokens(part, words) <= max(common, 40) < alice.cached_tokens(part, words)
    assert with_image < 40  # the common beginning of all prompts of a key


def test_security_28_first_prompt_of_a_key_is_not_cached(engine):
    part = image_data(new_image())
    with two_keys(engine) as (alice, _):
        alice.cached_tokens(part, WORDS)
        assert alice.cached_tokens(part, WORDS) > 0
    with serving(engine, keys=ApiKeys(["sk-new", "sk-other"])) as server, server.http() as http:
        assert Keyholder(http, "sk-new").cached_tokens(part, WORDS) == 0


def test_security_28_cache_salt_still_separates_requests_of_a_key(isolated):
    alice, _ = isolated
    part = {**image_data(new_image()), "uuid": "salted"}
    seen = alice.sees(part, WORDS, cache_salt="one")
    for fields in ({}, {"cache_salt": "two"}):
        assert alice.error_code(by_uuid("salted"), WORDS, **fields) == "uuid_not_cached"
    assert alice.sees(by_uuid("salted"), WORDS, cache_salt="one") == seen


def test_security_28_sharing_between_keys_is_possible(engine, sharing):
    alice, bob = sharing
    part, words = {**image_data(new_image()), "uuid": "shared"}, text("Everybody may know of this. " * 8)
    seen = alice.sees(part, words)
    before = engine.stats().vision.hits
    assert bob.sees(by_uuid("shared"), words) == seen
    assert engine.stats().vision.hits == before + 1
    assert bob.cached_tokens(part, words) > 40


def test_security_28_namespace_and_salt_are_joined_unambiguously():
    pairs = [("", None), ("", "x"), ("a", None), ("a", "b"), ("ab", None), ("a", "2:ab"), ("1:a", "b"), ("a", "1:ab")]
    salts = [Client(cache_namespace=namespace).effective_cache_salt(salt) for namespace, salt in pairs]
    assert salts[:2] == [None, "x"]
    assert len(set(salts)) == len(salts)


def test_security_28_server_sets_the_client_of_a_request(tiny_checkpoint):
    """Ids differ by key, are no plain digest of it, and reach the engine."""
    clients = []

    def respond(_request):
        clients.append(current_client.get())
        return "Fine."

    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    hello = text("Hello")
    with Engine(config, registry=scripted_registry(Script(respond))) as engine:
        for settings in ({}, {"share_media_between_keys": True}):
            with two_keys(engine, **settings) as keyholders:
                for keyholder in keyholders:
                    assert keyholder.chat(hello).status_code == 200
        with serving(engine, keys=ApiKeys(["sk-alice"])) as server, server.http() as http:
            Keyholder(http, "sk-alice").chat(hello)
        with serving(engine) as server, server.http() as http:
            Keyholder(http, "any").chat(hello)
        engine.chat({"messages": [{"role": "user", "content": "Hello"}]})
    alice, bob, shared_alice, shared_bob, only_alice, no_key, in_process = clients
    assert (alice.cache_namespace, bob.cache_namespace) == (alice.id, bob.id)
    assert len({alice.id, bob.id, ""}) == 3
    assert (shared_alice, shared_bob, only_alice) == tuple(Client(id=client.id) for client in (alice, bob, alice))
    assert no_key == in_process == Client()


def test_security_28_forwarded_requests_are_separated_by_key(tiny_checkpoint):
    """A server in front of another one passes the separation on in `cache_salt`."""
    script = Script("Fine.")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with (
        Engine(config, registry=scripted_registry(script)) as engine,
        serving(engine) as upstream,
        RemoteEngine(f"{upstream.url}/v1") as remote,
        two_keys(remote) as (alice, bob),  # type: ignore[arg-type]
    ):
        for keyholder in (alice, bob, alice):
            assert keyholder.chat(text("Hello"), cache_salt="x").status_code == 200
        remote.chat({"messages": [{"role": "user", "content": "Hello"}], "cache_salt": "x"})
    first, second, third, in_process = (request.cache_salt for request in script.requests)
    assert len({first, second, "x"}) == 3
    assert (third, in_process) == (first, "x")


@pytest.mark.parametrize(
    ("num_keys", "in_file", "share", "expected"),
    [
        (0, False, False, False),
        (1, False, False, False),
        (2, False, False, True),
        (1, True, False, True),
        (2, False, True, False),
        (1, True, True, False),
    ],
)
def test_security_28_keys_are_isolated_by_default(tmp_path, num_keys, in_file, share, expected):
    """A single key outside of a file needs no isolation; a file can get more keys later."""
    keys, file = [f"sk-{index}" for index in range(num_keys)], tmp_path / "keys"
    file.write_text("\n".join(keys))
    settings = Settings(
        keys=ApiKeys([], file) if in_file else ApiKeys(keys),
        share_media_between_keys=share,
    )
    assert settings.isolates_keys is expected
    config = EngineConfig(model="demo")
    assert isolate_clients(config, settings) == EngineConfig(model="demo", isolate_clients=expected)


def test_security_28_dashinfer_disables_a_cache_that_ignores_keys(tiny_checkpoint: Path, caplog):
    spec = read_spec(tiny_checkpoint)
    caplog.set_level(logging.WARNING)
    assert make_plan(spec, EngineConfig(), cuda=1).prefix_cache
    assert not caplog.records
    plan = make_plan(spec, EngineConfig(isolate_clients=True), cuda=1)
    assert not plan.prefix_cache
    check_cache_salt("of a key", plan)
    assert "--share-media-between-keys" in caplog.text
    assert not make_plan(spec, EngineConfig(prefix_cache=False), cuda=1).prefix_cache
