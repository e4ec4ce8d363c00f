"""Lines 15 and 16: what is kept between requests."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.samples import data_url, encode, noise
from tests.security.conftest import LIMITS, image, opened, picture, text, video
from tests.web import body, serve

PART = "messages[0].content[0]"
WORDS = text("What is this?")
CIRCLE, SQUARE = encode(noise(60, 60)), encode(noise(60, 60, 1))


@pytest.fixture(scope="module")
def forgetful_door():
    """It keeps nothing: what it sees, it has just looked at."""
    with opened(vision_cache_mib=0, **LIMITS) as door:
        yield door


# Line 15: keys


def test_security_15_another_picture_behind_a_known_url_is_seen(open_door):
    circle, square = open_door.sees(picture(CIRCLE), WORDS), open_door.sees(picture(SQUARE), WORDS)
    assert circle != square
    with serve({"/a.png": body(CIRCLE)}) as web:
        part = image(web.url("/a.png"))
        assert open_door.sees(part, WORDS) == circle
        web.responses["/a.png"] = body(SQUARE)
        assert open_door.sees(part, WORDS) == square


def test_security_15_options_belong_to_the_key(open_door, forgetful_door):
    """Twice each, in another order than the first time, so that a key without the options would be met."""
    file = encode(noise(200, 120))
    asked = [picture(file), picture(file, max_pixels=8000), picture(file, min_pixels=27_000)]
    expected = [forgetful_door.sees(part, WORDS) for part in asked]
    for part, seen in [*zip(asked, expected, strict=True), *reversed(list(zip(asked, expected, strict=True)))]:
        assert open_door.sees(part, WORDS) == seen
    assert len({length for length, _ in expected}) == 3


def test_security_15_a_salt_hides_what_others_sent_by_name(open_door):
    part = {**picture(CIRCLE), "uuid": "holiday"}
    by_name = {"type": "image_url", "image_url": None, "uuid": "holiday"}
    seen = open_door.sees(part, WORDS, cache_salt="anna")
    assert open_door.sees(by_name, WORDS, cache_salt="anna") == seen
    for fields in ({}, {"cache_salt": "bert"}):
        open_door.refuses(by_name, WORDS, param=f"{PART}.uuid", code="uuid_not_cached", **fields)
    other = {**picture(SQUARE), "uuid": "holiday"}  # whose name this is to Bert is Anna's business as little
    assert open_door.sees(other, WORDS, cache_salt="bert") == open_door.sees(picture(SQUARE), WORDS)
    assert open_door.sees(by_name, WORDS, cache_salt="anna") == seen


def test_security_15_a_name_is_bound_to_the_content_first_seen_with_it(open_door):
    seen = open_door.sees({**picture(CIRCLE), "uuid": "bound"}, WORDS)
    open_door.refuses({**picture(SQUARE), "uuid": "bound"}, param=f"{PART}.uuid", code="uuid_conflict")
    assert open_door.sees({"type": "image_url", "image_url": None, "uuid": "bound"}, WORDS) == seen
    frames = {"type": "video_url", "video_url": None, "uuid": "bound"}  # a picture's name is no video's
    open_door.refuses(frames, param=f"{PART}.uuid", code="uuid_not_cached")


def test_security_15_names_and_salts_are_bounded(open_door):
    for name in ("", "x" * 129, 1, ["a"]):
        open_door.refuses({**picture(CIRCLE), "uuid": name}, param=f"{PART}.uuid")
        open_door.refuses(WORDS, cache_salt=name, param="cache_salt")


def test_security_15_old_names_are_forgotten():
    with opened(max_media_ids=2, **LIMITS) as door:
        for index in range(3):
            door.sees({**picture(CIRCLE), "uuid": f"name {index}"}, WORDS)
        first, last = ({"type": "image_url", "image_url": None, "uuid": f"name {index}"} for index in (0, 2))
        door.refuses(first, param=f"{PART}.uuid", code="uuid_not_cached")
        assert door.ask(last, WORDS).status_code == 200


def test_security_15_a_salt_hides_what_was_read_of_a_text(open_door):
    """A prompt that comes faster, or is told as cached, would show that somebody had sent it."""
    words = text("Nobody else needs to know of this. " * 8)

    def cached(**fields):
        answer = open_door.ask(words, **fields)
        usage = answer.json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    assert cached(cache_salt="text of anna")[0] == 0
    assert cached(cache_salt="text of bert")[0] == 0
    found, length = cached()
    assert found < 40 < length  # what all prompts begin with
    assert cached(cache_salt="text of anna") == (length - 1, length)


# Line 16: equal bytes in other shapes


def test_security_16_equal_bytes_in_other_shapes_do_not_meet(open_door, forgetful_door):
    pixels = noise(112, 112)
    shapes = [(112, 112), (56, 224), (224, 56)]
    parts = [picture(encode(pixels.reshape(*shape, 3))) for shape in shapes]
    parts.append(video([data_url(encode(half)) for half in np.split(pixels, 2)]))
    expected = [forgetful_door.sees(part, WORDS) for part in parts]
    for _ in range(2):
        assert [open_door.sees(part, WORDS) for part in parts] == expected
    assert len({str(seen) for seen in expected}) == len(parts)


def test_security_16_equal_indices_of_two_palettes_do_not_meet(open_door, forgetful_door):
    indices = Image.fromarray(noise(40, 40)).quantize(8)
    seen = []
    for seed in (0, 1):
        stored = indices.copy()
        stored.putpalette(noise(8, 1, seed).tobytes())
        seen.append(open_door.sees(picture(encode(stored)), WORDS))
        assert seen[-1] == forgetful_door.sees(picture(encode(stored.convert("RGB"))), WORDS)
    assert seen[0] != seen[1]
