"""Image and video parts and options beyond OpenAI's: UUIDs, embeddings, vLLM's request-level options."""

from __future__ import annotations

import numpy as np
import pytest

from dashinfer_vlm_core.errors import InvalidParameter, RequestError
from dashinfer_vlm_core.protocol import ChatRequest, EncodedEmbeddings, MediaPart, OfflineRequest
from tests.cases import cases

URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
PART = "messages[0].content[0]"


def image(**options):
    return {"type": "image_url", "image_url": {"url": URL, **options}}


def media(*parts, **fields):
    return ChatRequest.parse({"messages": [{"role": "user", "content": list(parts)}], **fields}).media()


def only(*parts, **fields):
    (part,) = media(*parts, **fields)
    return part


def rejection(*parts, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        media(*parts, **fields)
    return caught.value


# UUIDs


@cases(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": None, "uuid": "cat"}, "image"),
        ({"type": "image_url", "uuid": "cat"}, "image"),
        ({"type": "image_url", "image_url": {}, "uuid": "cat"}, "image"),
        ({"type": "image_url", "image_url": {"url": None}, "uuid": "cat"}, "image"),
        ({"type": "image_url", "image_url": {"url": ""}, "uuid": "cat"}, "image"),
        ({"type": "image_embeds", "image_embeds": None, "uuid": "cat"}, "image"),
        ({"type": "video_url", "video_url": None, "uuid": "cat"}, "video"),
        ({"type": "video_url", "video_url": {"url": ""}, "uuid": "cat"}, "video"),
    ],
)
def test_media_with_uuid_may_be_omitted(part, kind):
    found = only(part)
    assert found == MediaPart(kind=kind, path=PART, uuid="cat")
    assert not found.has_source


def test_uuid_is_kept_with_media():
    assert only({**IMAGE, "uuid": "cat"}) == MediaPart(kind="image", path=PART, url=URL, uuid="cat")
    assert only({**VIDEO, "uuid": "clip"}).uuid == "clip"


@pytest.mark.parametrize(
    "part", [{"type": "image_url"}, {"type": "video_url", "video_url": {}}, {"type": "image_embeds"}]
)
def test_media_without_uuid_are_required(part):
    assert rejection(part).param.startswith(f"{PART}.{part['type']}")


@pytest.mark.parametrize("name", ["", "x" * 129, 7, ["a"], "\ud800"])
def test_uuid_is_a_string_of_1_to_128_characters(name):
    assert rejection({**IMAGE, "uuid": name}).param == f"{PART}.uuid"


def test_text_part_has_no_uuid():
    assert rejection({"type": "text", "uuid": "cat"}).param == f"{PART}.text"


# Embeddings


@pytest.mark.parametrize(
    ("value", "grid"),
    [
        ("QUJD", None),
        ({"image_embeds": "QUJD"}, None),
        ({"image_embeds": "QUJD", "image_grid_thw": "REVG"}, "REVG"),
        ({"image_embeds": "QUJD", "image_grid_thw": [1, 8, 8]}, (1, 8, 8)),
    ],
)
def test_embeddings_field_variants(value, grid):
    found = only({"type": "image_embeds", "image_embeds": value, "uuid": "cat"})
    assert found.content == EncodedEmbeddings(rows="QUJD", grid=grid)
    assert (found.kind, found.uuid, found.has_source) == ("image", "cat", True)


@cases(
    ("value", "field"),
    [
        (7, "image_embeds"),
        ("", "image_embeds"),
        ({}, "image_embeds.image_embeds"),
        ({"image_embeds": ""}, "image_embeds.image_embeds"),
        ({"image_embeds": "QUJD", "image_grid_thw": [1, 8, 0]}, "image_embeds.image_grid_thw[2]"),
        ({"image_embeds": "QUJD", "image_grid_thw": [1, 8, 8, 8]}, "image_embeds.image_grid_thw"),
        ({"image_embeds": "QUJD", "image_grid_thw": 8}, "image_embeds.image_grid_thw"),
    ],
)
def test_malformed_embeddings_are_named(value, field):
    assert rejection({"type": "image_embeds", "image_embeds": value}).param == f"{PART}.{field}"


def test_embeddings_are_image_placeholders_in_template():
    request = ChatRequest.parse(
        {"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "QUJD"}]}]}
    )
    assert request.template_messages() == [{"role": "user", "content": [{"type": "image"}]}]


# Frames in one URL


def test_jpeg_frames_in_one_url_become_frame_list():
    found = only({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,BBBB"}})
    assert found.url == ("data:image/jpeg;base64,AAAA", "data:image/jpeg;base64,BBBB")


def test_jpeg_media_type_is_case_insensitive():
    assert only({"type": "video_url", "video_url": {"url": "data:video/JPEG;BASE64,AAAA"}}).url == (
        "data:image/jpeg;base64,AAAA",
    )


def test_jpeg_frames_are_counted_before_splitting():
    error = rejection({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + "," * 5000}})
    assert error.param == f"{PART}.video_url.url"


# Options for all media


@cases(
    ("options", "field", "value"),
    [
        ({"mm_processor_kwargs": {"min_pixels": 784}}, "min_pixels", 784),
        ({"mm_processor_kwargs": {"max_pixels": 7840}}, "max_pixels", 7840),
        ({"mm_processor_kwargs": {"size": {"shortest_edge": 784}}}, "min_pixels", 784),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 7840}}}, "max_pixels", 7840),
        ({"mm_processor_kwargs": {"total_pixels": 78400}}, "total_pixels", 78400),
        ({"mm_processor_kwargs": {"fps": 0.5}}, "fps", 0.5),
        ({"mm_processor_kwargs": {"num_frames": 4}}, "num_frames", 4),
        ({"mm_processor_kwargs": {"align": True}}, "align", True),
        ({"media_io_kwargs": {"video": {"fps": 3}}}, "fps", 3),
        ({"media_io_kwargs": {"video": {"num_frames": 6}}}, "num_frames", 6),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [1, 2, 3]}}}, "background", (1, 2, 3)),
    ],
)
def test_request_option_applies_to_every_part(options, field, value):
    for part in media(VIDEO, VIDEO, **options):
        assert getattr(part, field) == value


def test_part_option_overrides_request_option():
    own = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4", "fps": 1, "max_pixels": 1568}}
    found = only(own, mm_processor_kwargs={"num_frames": 8, "max_pixels": 7840, "min_pixels": 784})
    assert (found.fps, found.num_frames, found.max_pixels, found.min_pixels) == (1, None, 1568, 784)


@pytest.mark.parametrize(
    ("own", "request_option", "expected"),
    [
        ({"align": False}, {"align": True}, (False, None)),
        ({"num_frames": 4}, {"align": True}, (None, 4)),
        ({"align": True}, {"num_frames": 4}, (True, None)),
        ({"align": False}, {"num_frames": 4}, (False, 4)),
    ],
)
def test_align_of_part_and_request(own, request_option, expected):
    part = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4", **own}}
    found = only(part, mm_processor_kwargs=request_option)
    assert (found.align, found.num_frames) == expected


def test_align_with_number_of_frames_is_rejected():
    part = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4", "align": True, "num_frames": 4}}
    with pytest.raises(InvalidParameter) as caught:
        only(part)
    assert caught.value.param == "messages[0].content[0].video_url.align"


FRAMES = {"type": "video_url", "video_url": {"url": [URL, URL]}}
JPEG_FRAMES = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,BBBB"}}


def test_frames_have_no_number_to_sample():
    for part in (FRAMES, JPEG_FRAMES):
        error = rejection({**part, "video_url": {**part["video_url"], "num_frames": 2}})
        assert error.param == f"{PART}.video_url.num_frames"


@cases(
    ("part", "options", "param"),
    [
        (image(max_pixels=784), {"min_pixels": 7840}, f"{PART}.image_url"),
        (image(min_pixels=7840), {"size": {"longest_edge": 784}}, f"{PART}.image_url"),
        (image(detail="low"), {"min_pixels": 10**6}, f"{PART}.image_url"),
        (VIDEO, {"size": {"shortest_edge": 2}, "max_pixels": 1}, "mm_processor_kwargs.size"),
    ],
)
def test_minimum_above_maximum_of_pixels_is_rejected(part, options, param):
    assert rejection(part, mm_processor_kwargs=options).param == param


def test_sampling_options_apply_only_to_video_files():
    for part in media(IMAGE, FRAMES, media_io_kwargs={"video": {"fps": 2}}):
        assert part.fps is None


@pytest.mark.parametrize("part", [FRAMES, JPEG_FRAMES], ids=["list", "jpeg"])
def test_frames_have_fps(part):
    assert only({**part, "video_url": {**part["video_url"], "fps": 4}}).fps == 4
    assert only(part, mm_processor_kwargs={"fps": 4}).fps == 4
    assert only(part, mm_processor_kwargs={"num_frames": 4}).num_frames is None


def test_list_of_fps_has_value_for_each_video():
    """qwen-vl-utils returns such a list."""
    own = {"type": "video_url", "video_url": {"url": [URL], "fps": 9}}
    options = {"fps": [1, 2.5, 3, 4], "do_sample_frames": None}
    found = media(FRAMES, IMAGE, VIDEO, own, JPEG_FRAMES, mm_processor_kwargs=options)
    assert [part.fps for part in found] == [1, None, 2.5, 9, 4]
    assert media(IMAGE, mm_processor_kwargs={"fps": [], "do_sample_frames": False})[0].fps is None


@pytest.mark.parametrize(
    ("parts", "options", "param"),
    [
        ([VIDEO, VIDEO], {"fps": [1]}, "fps"),
        ([IMAGE], {"fps": [1]}, "fps"),
        ([FRAMES, VIDEO], {"do_sample_frames": True}, "do_sample_frames"),
        ([FRAMES, VIDEO], {"do_sample_frames": False}, "do_sample_frames"),
    ],
)
def test_option_that_does_not_fit_videos_is_named(parts, options, param):
    with pytest.raises(InvalidParameter) as caught:
        media(*parts, mm_processor_kwargs=options)
    assert caught.value.param == f"mm_processor_kwargs.{param}"


def test_do_sample_frames_states_what_happens():
    media(FRAMES, JPEG_FRAMES, mm_processor_kwargs={"do_sample_frames": False})
    media(VIDEO, mm_processor_kwargs={"do_sample_frames": True})


@cases(
    ("options", "param"),
    [
        ({"mm_processor_kwargs": {"pixels": 3}}, "mm_processor_kwargs.pixels"),
        ({"mm_processor_kwargs": {"max_pixels": 0}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": {"size": {"height": 3}}}, "mm_processor_kwargs.size.height"),
        ({"mm_processor_kwargs": {"min_pixels": 7840, "max_pixels": 784}}, "mm_processor_kwargs.min_pixels"),
        ({"mm_processor_kwargs": {"fps": 1, "num_frames": 2}}, "mm_processor_kwargs.num_frames"),
        ({"mm_processor_kwargs": {"align": True, "num_frames": 2}}, "mm_processor_kwargs.align"),
        ({"mm_processor_kwargs": {"align": "yes"}}, "mm_processor_kwargs.align"),
        ({"mm_processor_kwargs": {"fps": 1}, "media_io_kwargs": {"video": {"fps": 2}}}, "media_io_kwargs.video.fps"),
        ({"mm_processor_kwargs": {"fps": "2"}}, "mm_processor_kwargs.fps"),
        ({"mm_processor_kwargs": {"fps": [2, 0]}}, "mm_processor_kwargs.fps[1]"),
        ({"mm_processor_kwargs": {"fps": [2], "num_frames": 2}}, "mm_processor_kwargs.num_frames"),
        ({"mm_processor_kwargs": []}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"audio": {}}}, "media_io_kwargs.audio"),
        ({"media_io_kwargs": {"video": {"num_frames": -1}}}, "media_io_kwargs.video.num_frames"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"video": {"fps": 1e999}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"image": {"image_mode": "L"}}}, "media_io_kwargs.image.image_mode"),
        (
            {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 256]}}},
            "media_io_kwargs.image.rgba_background_color[2]",
        ),
        (
            {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0]}}},
            "media_io_kwargs.image.rgba_background_color[2]",
        ),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
    ],
)
def test_unsupported_option_is_named(options, param):
    error = rejection(VIDEO, **options)
    assert isinstance(error, InvalidParameter)
    assert error.param == param


# In-process requests


def test_object_replaces_url():
    pixels = np.zeros((4, 4, 3), np.uint8)
    request = OfflineRequest(messages=[{"role": "user", "content": [IMAGE, VIDEO]}], contents={PART: pixels})
    image, video = request.media()
    assert image.content is pixels
    assert image.url is None
    assert video.url == VIDEO["video_url"]["url"]


def test_rendered_prompt_carries_media_and_options():
    part = MediaPart(kind="image", path="image[0]", url=URL)
    request = OfflineRequest(prompt="<|image_pad|>", attached=(part,), mm_processor_kwargs={"max_pixels": 7840})
    assert request.raw_prompt == "<|image_pad|>"
    assert request.media()[0].max_pixels == 7840


def test_json_cannot_contain_rendered_prompt():
    request = ChatRequest.parse(
        {"messages": [{"role": "user", "content": "Hello"}], "prompt": "<|im_start|>", "raw": 1}
    )
    assert request.raw_prompt is None
