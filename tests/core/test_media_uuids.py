"""Pictures and videos by name, through the whole engine: sent once, left out later, never mixed up."""

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
def started(tiny_checkpoint):
    """Starts an engine whose decoder keeps what it was given."""
    engines = []

    def started(**options):
        script = Script("ok")
        config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted", **options)
        engines.append(Engine(config, registry=scripted_registry(script)).start())
        return engines[-1], script

    yield started
    for engine in engines:
        engine.close()


def ask(engine, *parts, **fields):
    return engine.chat(
        {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}], **fields}
    )


def image(url, uuid=None, **options):
    return {"type": "image_url", "image_url": {"url": url, **options}, "uuid": uuid}


def rows(request):
    return [span.tokens.embedding.tolist() for span in request.spans]


def error_of(engine, *parts, **fields):
    with pytest.raises(InvalidParameter) as caught:
        ask(engine, *parts, **fields)
    return caught.value


def test_what_was_sent_once_need_not_be_sent_again(started):
    engine, script = started()
    whole = ask(engine, image(CAT, "cat"), image(DOG))
    named = ask(engine, image(None, "cat"), image(DOG))
    first, second = script.requests
    assert rows(first) == rows(second)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert whole.usage == named.usage


def test_a_video_by_name(started):
    engine, script = started()
    clip = {"type": "video_url", "video_url": {"url": bytes_url(encode_video(), "video/mp4"), "fps": 5}, "uuid": "clip"}
    ask(engine, clip)
    ask(engine, {"type": "video_url", "video_url": {"fps": 5}, "uuid": "clip"})
    assert rows(script.requests[0]) == rows(script.requests[1])
    assert error_of(engine, {"type": "video_url", "uuid": "clip"}).code == "uuid_not_cached"  # at another rate


def test_a_name_that_nobody_sent_is_a_miss_and_the_server_goes_on(started):
    engine, _ = started()
    error = error_of(engine, image(None, "cat"))
    assert (error.param, error.code) == (f"{PART}.uuid", "uuid_not_cached")
    ask(engine, image(CAT, "cat"))
    ask(engine, image(None, "cat"))


def test_a_name_of_a_picture_is_none_of_a_video(started):
    engine, _ = started()
    ask(engine, image(CAT, "x"))
    assert error_of(engine, {"type": "video_url", "uuid": "x"}).code == "uuid_not_cached"


def test_a_name_belongs_to_its_first_content(started):
    engine, script = started()
    ask(engine, image(CAT, "cat"))
    error = error_of(engine, image(DOG, "cat"))
    assert (error.param, error.code) == (f"{PART}.uuid", "uuid_conflict")
    assert error_of(engine, image(DOG, "cat", max_pixels=7840)).code == "uuid_conflict"
    ask(engine, image(CAT, "cat"), image(None, "cat"))  # sent and named in one request: it was known before
    assert rows(script.requests[-1])[0] == rows(script.requests[0])[0]


def test_other_options_make_another_picture_of_the_same_name(started):
    engine, script = started()
    ask(engine, image(CAT, "cat"))
    small = image(None, "cat", max_pixels=28 * 28 * 9)
    assert error_of(engine, small).code == "uuid_not_cached"
    ask(engine, image(CAT, "cat", max_pixels=28 * 28 * 9))
    ask(engine, small)
    ask(engine, image(None, "cat"))
    sizes = [len(request.spans[0].tokens.embedding) for request in script.requests]
    assert sizes[0] == sizes[3] > sizes[1] == sizes[2]


def test_names_of_one_salt_mean_nothing_under_another(started):
    engine, script = started()
    ask(engine, image(CAT, "cat"), cache_salt="tenant a")
    assert error_of(engine, image(None, "cat")).code == "uuid_not_cached"
    assert error_of(engine, image(None, "cat"), cache_salt="tenant b").code == "uuid_not_cached"
    ask(engine, image(DOG, "cat"), cache_salt="tenant b")
    ask(engine, image(None, "cat"), cache_salt="tenant a")
    assert rows(script.requests[-1]) == rows(script.requests[0]) != rows(script.requests[1])


def test_a_salt_keeps_what_is_cached_to_itself(started):
    engine, script = started()
    for cache_salt in ("a", "b", "a", None):
        ask(engine, image(CAT), cache_salt=cache_salt)
    digests = [request.spans[0].tokens.digest for request in script.requests]
    assert digests[0] == digests[2]
    assert len(set(digests)) == 3
    assert all(rows(request) == rows(script.requests[0]) for request in script.requests)


def test_a_content_that_left_the_cache_is_a_miss(started):
    engine, _ = started(vision_cache_mib=0)
    ask(engine, image(CAT, "cat"))
    assert error_of(engine, image(None, "cat")).code == "uuid_not_cached"


def test_the_names_used_least_recently_are_forgotten(started):
    engine, _ = started(max_media_ids=2)
    for number in range(2):
        ask(engine, image(CAT, f"cat {number}"))
    ask(engine, image(None, "cat 0"))
    ask(engine, image(CAT, "cat 2"))
    ask(engine, image(None, "cat 0"), image(None, "cat 2"))
    assert error_of(engine, image(None, "cat 1")).code == "uuid_not_cached"


def test_what_comes_by_name_counts_as_what_comes_along(started):
    engine, _ = started(limit_mm_per_prompt={"image": 2})
    ask(engine, image(CAT, "cat"))
    with pytest.raises(MediaTooLarge):
        ask(engine, *[image(None, "cat")] * 3)
    with pytest.raises(MediaTooLarge):
        ask(engine, image(None, "cat"), image(DOG), image(None, "cat"))
    ask(engine, *[image(None, "cat")] * 2)


def test_options_that_a_content_does_not_heed_do_not_hide_it(started):
    engine, _ = started()
    frames = {"type": "video_url", "video_url": {"url": [CAT, CAT]}, "uuid": "frames"}
    rate = {"mm_processor_kwargs": {"fps": 1}}
    ask(engine, frames, **rate)
    ask(engine, {"type": "video_url", "uuid": "frames"}, **rate)
    ask(engine, {"type": "video_url", "uuid": "frames"})


def test_the_cuts_of_one_content_are_bounded(started):
    engine, _ = started()
    for level in range(MAX_VARIANTS + 1):
        ask(engine, image(CAT, "cat"), media_io_kwargs={"image": {"rgba_background_color": [level] * 3}})
    for level in range(MAX_VARIANTS, 0, -1):
        ask(engine, image(None, "cat"), media_io_kwargs={"image": {"rgba_background_color": [level] * 3}})
    with pytest.raises(InvalidParameter, match="names nothing that is cached here with these options"):
        ask(engine, image(None, "cat"), media_io_kwargs={"image": {"rgba_background_color": [0] * 3}})
