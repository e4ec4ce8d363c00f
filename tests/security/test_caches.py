"""Rules 15 and 16: caches between requests."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.samples import data_url, encode, noise
from tests.security.conftest import LIMITS, image, image_data, running_server, text, video
from tests.web import body, serve

PART = "messages[0].content[0]"
WORDS = text("What is this?")
CIRCLE, SQUARE = encode(noise(60, 60)), encode(noise(60, 60, 1))


@pytest.fixture(scope="module")
def uncached_server():
    """A server without an embedding cache."""
    with running_server(vision_cache_mib=0, **LIMITS) as server:
        yield server


# Rule 15: keys


def test_security_15_changed_image_at_the_same_url_is_seen(open_server):
    circle, square = (
        open_server.fingerprint(image_data(CIRCLE), WORDS),
        open_server.fingerprint(image_data(SQUARE), WORDS),
    )
    assert circle != square
    with serve({"/a.png": body(CIRCLE)}) as web:
        part = image(web.url("/a.png"))
        assert open_server.fingerprint(part, WORDS) == circle
        web.responses["/a.png"] = body(SQUARE)
        assert open_server.fingerprint(part, WORDS) == square


def test_security_15_options_are_part_of_the_cache_key(open_server, uncached_server):
    """Each part is sent twice, in different order, so that a key without the options would give a wrong hit."""
    file = encode(noise(200, 120))
    parts = [image_data(file), image_data(file, max_pixels=8000), image_data(file, min_pixels=27_000)]
    expected = [uncached_server.fingerprint(part, WORDS) for part in parts]
    for part, fingerprint in [*zip(parts, expected, strict=True), *reversed(list(zip(parts, expected, strict=True)))]:
        assert open_server.fingerprint(part, WORDS) == fingerprint
    assert len({length for length, _ in expected}) == 3


def test_security_15_salt_separates_uuids(open_server):
    part = {**image_data(CIRCLE), "uuid": "holiday"}
    by_name = {"type": "image_url", "image_url": None, "uuid": "holiday"}
    fingerprint = open_server.fingerprint(part, WORDS, cache_salt="anna")
    assert open_server.fingerprint(by_name, WORDS, cache_salt="anna") == fingerprint
    for fields in ({}, {"cache_salt": "bert"}):
        open_server.rejection(by_name, WORDS, param=f"{PART}.uuid", code="uuid_not_cached", **fields)
    other = {**image_data(SQUARE), "uuid": "holiday"}  # the same uuid with another salt
    assert open_server.fingerprint(other, WORDS, cache_salt="bert") == open_server.fingerprint(
        image_data(SQUARE), WORDS
    )
    assert open_server.fingerprint(by_name, WORDS, cache_salt="anna") == fingerprint


def test_security_15_uuid_is_bound_to_its_first_content(open_server):
    fingerprint = open_server.fingerprint({**image_data(CIRCLE), "uuid": "bound"}, WORDS)
    open_server.rejection({**image_data(SQUARE), "uuid": "bound"}, param=f"{PART}.uuid", code="uuid_conflict")
    assert open_server.fingerprint({"type": "image_url", "image_url": None, "uuid": "bound"}, WORDS) == fingerprint
    frames = {"type": "video_url", "video_url": None, "uuid": "bound"}  # an image's uuid does not match a video
    open_server.rejection(frames, param=f"{PART}.uuid", code="uuid_not_cached")


def test_security_15_uuid_and_salt_length_is_limited(open_server):
    for name in ("", "x" * 129, 1, ["a"]):
        open_server.rejection({**image_data(CIRCLE), "uuid": name}, param=f"{PART}.uuid")
        open_server.rejection(WORDS, cache_salt=name, param="cache_salt")


def test_security_15_old_uuids_are_evicted():
    with running_server(**LIMITS | {"limits": {"max_media_ids": 2}}) as server:
        for index in range(3):
            server.fingerprint({**image_data(CIRCLE), "uuid": f"name {index}"}, WORDS)
        first, last = ({"type": "image_url", "image_url": None, "uuid": f"name {index}"} for index in (0, 2))
        server.rejection(first, param=f"{PART}.uuid", code="uuid_not_cached")
        assert server.chat(last, WORDS).status_code == 200


def test_security_15_salt_separates_prefix_cache(open_server):
    """A faster or cached prompt would reveal that another client had sent it."""
    words = text("Nobody else needs to know of this. " * 8)

    def cached(**fields):
        response = open_server.chat(words, **fields)
        usage = response.json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    assert cached(cache_salt="text of anna")[0] == 0
    assert cached(cache_salt="text of bert")[0] == 0
    found, length = cached()
    assert found < 40 < length  # the common beginning of all prompts
    assert cached(cache_salt="text of anna") == (length - 1, length)


# Rule 16: equal bytes with other shapes


def test_security_16_equal_bytes_with_other_shapes_differ(open_server, uncached_server):
    pixels = noise(112, 112)
    shapes = [(112, 112), (56, 224), (224, 56)]
    parts = [image_data(encode(pixels.reshape(*shape, 3))) for shape in shapes]
    parts.append(video([data_url(encode(half)) for half in np.split(pixels, 2)]))
    expected = [uncached_server.fingerprint(part, WORDS) for part in parts]
    for _ in range(2):
        assert [open_server.fingerprint(part, WORDS) for part in parts] == expected
    assert len({str(fingerprint) for fingerprint in expected}) == len(parts)


def test_security_16_equal_indices_with_other_palettes_differ(open_server, uncached_server):
    indices = Image.fromarray(noise(40, 40)).quantize(8)
    fingerprints = []
    for seed in (0, 1):
        stored = indices.copy()
        stored.putpalette(noise(8, 1, seed).tobytes())
        fingerprints.append(open_server.fingerprint(image_data(encode(stored)), WORDS))
        assert fingerprints[-1] == uncached_server.fingerprint(image_data(encode(stored.convert("RGB"))), WORDS)
    assert fingerprints[0] != fingerprints[1]
