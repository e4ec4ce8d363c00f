"""Media referenced by UUID, through the whole engine: sent once, referenced later, never confused."""

from __future__ import annotations

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter, MediaTooLarge
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_core.vision.media_uuids import MAX_VARIANTS
from tests.conversations import blurred_image, data_url
from tests.samples import data_url as bytes_url
from tests.samples import encode_video

CAT, DOG = data_url(blurred_image(1)), data_url(blurred_image(2))
PART = "messages[0].content[0]"


@pytest.fixture
def start(tiny_checkpoint):
    """Start engines whose scripted decoder records its requests."""
    engines = []

    def start(**options):
        script = Script("ok")
        config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted", **options)
        engines.append(Engine(config, registry=scripted_registry(script)).start())
        return engines[-1], script

    yield start
    for engine in engines:
        engine.close()


def chat(engine, *parts, **fields):
    return engine.chat(
        {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}], **fields}
    )


def image(url, uuid=None, **options):
    return {"type": "image_url", "image_url": {"url": url, **options}, "uuid": uuid}


def rows(request):
    return [span.tokens.embedding.tolist() for span in request.spans]


def error_of(engine, *parts, **fields):
    with pytest.raises(InvalidParameter) as caught:
        chat(engine, *parts, **fields)
    return caught.value


def test_uuid_references_previously_sent_image(start):
    engine, script = start()
    whole = chat(engine, image(CAT, "cat"), image(DOG))
    named = chat(engine, image(None, "cat"), image(DOG))
    first, second = script.requests
    assert rows(first) == rows(second)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert whole.usage == named.usage


def test_video_by_uuid(start):
    engine, script = start()
    clip = {"type": "video_url", "video_url": {"url": bytes_url(encode_video(), "video/mp4"), "fps": 5}, "uuid": "clip"}
    chat(engine, clip)
    chat(engine, {"type": "video_url", "video_url": {"fps": 5}, "uuid": "clip"})
    assert rows(script.requests[0]) == rows(script.requests[1])
    assert error_of(engine, {"type": "video_url", "uuid": "clip"}).code == "uuid_not_cached"  # with another frame rate


def test_unknown_uuid_is_an_error_and_engine_continues(start):
    engine, _ = start()
    error = error_of(engine, image(None, "cat"))
    assert (error.param, error.code) == (f"{PART}.uuid", "uuid_not_cached")
    chat(engine, image(CAT, "cat"))
    chat(engine, image(None, "cat"))


def test_image_uuid_is_not_a_video_uuid(start):
    engine, _ = start()
    chat(engine, image(CAT, "x"))
    assert error_of(engine, {"type": "video_url", "uuid": "x"}).code == "uuid_not_cached"


def test_uuid_is_bound_to_its_first_content(start):
    engine, script = start()
    chat(engine, image(CAT, "cat"))
    error = error_of(engine, image(DOG, "cat"))
    assert (error.param, error.code) == (f"{PART}.uuid", "uuid_conflict")
    assert error_of(engine, image(DOG, "cat", max_pixels=7840)).code == "uuid_conflict"
    chat(engine, image(CAT, "cat"), image(None, "cat"))  # sent and referenced in one request: it was cached before
    assert rows(script.requests[-1])[0] == rows(script.requests[0])[0]


def test_other_options_are_cached_separately_under_uuid(start):
    engine, script = start()
    chat(engine, image(CAT, "cat"))
    small = image(None, "cat", max_pixels=28 * 28 * 9)
    assert error_of(engine, small).code == "uuid_not_cached"
    chat(engine, image(CAT, "cat", max_pixels=28 * 28 * 9))
    chat(engine, small)
    chat(engine, image(None, "cat"))
    sizes = [len(request.spans[0].tokens.embedding) for request in script.requests]
    assert sizes[0] == sizes[3] > sizes[1] == sizes[2]


def test_uuids_are_isolated_by_cache_salt(start):
    engine, script = start()
    chat(engine, image(CAT, "cat"), cache_salt="tenant a")
    assert error_of(engine, image(None, "cat")).code == "uuid_not_cached"
    assert error_of(engine, image(None, "cat"), cache_salt="tenant b").code == "uuid_not_cached"
    chat(engine, image(DOG, "cat"), cache_salt="tenant b")
    chat(engine, image(None, "cat"), cache_salt="tenant a")
    assert rows(script.requests[-1]) == rows(script.requests[0]) != rows(script.requests[1])


def test_cache_salt_isolates_cached_media(start):
    engine, script = start()
    for cache_salt in ("a", "b", "a", None):
        chat(engine, image(CAT), cache_salt=cache_salt)
    digests = [request.spans[0].tokens.digest for request in script.requests]
    assert digests[0] == digests[2]
    assert len(set(digests)) == 3
    assert all(rows(request) == rows(script.requests[0]) for request in script.requests)


def test_evicted_content_is_a_miss(start):
    engine, _ = start(vision_cache_mib=0)
    chat(engine, image(CAT, "cat"))
    assert error_of(engine, image(None, "cat")).code == "uuid_not_cached"


def test_least_recently_used_uuids_are_evicted(start):
    engine, _ = start(limits={"max_media_ids": 2})
    for number in range(2):
        chat(engine, image(CAT, f"cat {number}"))
    chat(engine, image(None, "cat 0"))
    chat(engine, image(CAT, "cat 2"))
    chat(engine, image(None, "cat 0"), image(None, "cat 2"))
    assert error_of(engine, image(None, "cat 1")).code == "uuid_not_cached"


def test_referenced_media_count_toward_limits(start):
    engine, _ = start(limit_mm_per_prompt={"image": 2})
    chat(engine, image(CAT, "cat"))
    with pytest.raises(MediaTooLarge):
        chat(engine, *[image(None, "cat")] * 3)
    with pytest.raises(MediaTooLarge):
        chat(engine, image(None, "cat"), image(DOG), image(None, "cat"))
    chat(engine, *[image(None, "cat")] * 2)


def test_irrelevant_options_do_not_affect_uuid_lookup(start):
    engine, _ = start()
    frames = {"type": "video_url", "video_url": {"url": [CAT, CAT]}, "uuid": "frames"}
    chat(engine, frames)
    chat(engine, {"type": "video_url", "uuid": "frames"}, mm_processor_kwargs={"num_frames": 4})
    chat(engine, {"type": "video_url", "uuid": "frames"})


def test_fps_of_frames_is_part_of_uuid_lookup(start):
    """It determines the times of the frames."""
    engine, _ = start()
    frames = {"type": "video_url", "video_url": {"url": [CAT, CAT]}, "uuid": "frames"}
    rate = {"mm_processor_kwargs": {"fps": 1}}
    chat(engine, frames, **rate)
    chat(engine, {"type": "video_url", "uuid": "frames"}, **rate)
    assert error_of(engine, {"type": "video_url", "uuid": "frames"}).code == "uuid_not_cached"


def test_variants_of_one_content_are_bounded(start):
    engine, _ = start()
    for level in range(MAX_VARIANTS + 1):
        chat(engine, image(CAT, "cat"), media_io_kwargs={"image": {"rgba_background_color": [level] * 3}})
    for level in range(MAX_VARIANTS, 0, -1):
        chat(engine, image(None, "cat"), media_io_kwargs={"image": {"rgba_background_color": [level] * 3}})
    with pytest.raises(InvalidParameter, match="is not cached with these options"):
        chat(engine, image(None, "cat"), media_io_kwargs={"image": {"rgba_background_color": [0] * 3}})
