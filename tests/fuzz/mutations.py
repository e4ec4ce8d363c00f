"""Hypothesis strategies: nearly valid input finds more bugs than random input."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.protocol.fields import IGNORED_FIELDS, REJECTED_FIELDS
from tests.samples import data_url, encode, noise

IMAGE_URL = data_url(encode(noise(6, 8)))
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _message(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def _text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def _image(**options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": IMAGE_URL, **options}}


def _video(**options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": [IMAGE_URL, IMAGE_URL], **options}}


REQUESTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello"}]},
    {"messages": [_message(_image(detail="low", max_pixels=9000), _text("What is this?"))], "max_tokens": 3},
    {"messages": [_message(_video(total_pixels=20_000), _text("And now?"))], "stop": ["a", "b"], "seed": 1},
    {"messages": [_message({**_image(), "uuid": "a"}), _message({"type": "image_url", "uuid": "a"})]},
    {
        "messages": [
            {"role": "system", "content": "Be brief.", "name": "me"},
            {"role": "user", "content": [_text("a"), _image(min_pixels=10), _text("b")]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": [_text("c"), _image()]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "refusal": "no"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1.5},
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "no_repeat_ngram_size": 3,
        "vllm_xargs": {"ngram_size": 3, "window_size": 9, "whitelist_token_ids": [3]},
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "min_tokens": 1,
        "max_completion_tokens": 4,
        "repetition_penalty": 1.1,
        "stop_token_ids": [3],
        "cache_salt": "a",
        "mm_processor_kwargs": {"max_pixels": 9000, "size": {"longest_edge": 9000}},
        "media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}, "video": {"num_frames": 4}},
    },
    {
        "messages": [
            _message({"type": "image_embeds", "image_embeds": {"image_embeds": "AAAA", "image_grid_thw": [1, 2, 2]}})
        ]
    },
    {"messages": [_message({"type": "video_url", "video_url": {"url": data_url(b"", "video/mp4"), "fps": 2}})]},
    {"messages": [_message({"type": "input_video", "input_video": {"data": "AAAA", "num_frames": 2}})], "n": 2},
    {"messages": [_message(_image(), _text("(1,2)"))], "coordinates": "original", "guided_regex": "a+\\(1,2\\)"},
    {"messages": [_message(_text("a"))], "structured_outputs": {"choice": ["a", "b"]}, "max_tokens": 2},
]  # fmt: skip


def _deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


NAMES = sorted(
    {*ChatRequest.model_fields, *REJECTED_FIELDS, *IGNORED_FIELDS}
    | {
        "role",
        "content",
        "type",
        "text",
        "url",
        "image_url",
        "video_url",
        "input_video",
        "image_embeds",
        "uuid",
        "min_pixels",
        "fps",
        "data",
        "json",
        "regex",
    }
)
NUMBERS = [0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), True, False]
TEXTS = [
    "", "a", "1", "\x00", "\ud83d", "\udc00\ud83d", "\U000e0001", "<|image_pad|>", "<|im_end|>\n<|im_start|>system\n",
    "{{ 1 }}", "{% for", "x" * 5000, "🙂" * 600, "e\u0301" * 2000, "user", "image_url", "video_url", "image_embeds",
    "auto", IMAGE_URL, IMAGE_URL[:60], "data:", "data:;base64,", "data:image/png;base64,====", "http://127.0.0.1:1/",
    "//", "data:video/jpeg;base64," + "," * 5000, "file:///etc/passwd", "http://[::", "http://\ud83d.example/",
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from([None, [], {}, [[]], [None], {"": None}, {"a": {"b": []}}, list(range(3000)), (), b"a", {1: 2}]),
    st.builds(_deep, st.sampled_from([50, 3000])),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=20),
    st.sampled_from(REQUESTS),
    st.recursive(st.none() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)  # fmt: skip


def value_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every nested value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(*path, key) for key, _ in inner]
    if len(path) < 8:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value) if found else ():
            found += value_paths(item, (*path, key))
    return found


@st.composite
def requests(draw: st.DrawFn) -> Any:
    """Draw a valid request with one to four faults."""
    request = copy.deepcopy(draw(st.sampled_from(REQUESTS)))
    for _ in range(draw(st.integers(1, 4))):
        found = value_paths(request)[:200]
        if not found:
            return _fresh(draw(VALUES))
        *above, key = draw(st.sampled_from(found))
        holder = request
        for step in above:
            holder = holder[step]
        _inject_fault(draw, holder, key)
    return request


def _fresh(value: Any) -> Any:
    """Copy a value, so that a fault cannot change the list that it was drawn from."""
    try:
        return copy.deepcopy(value)
    except RecursionError:  # the deeply nested one, which is rebuilt for each draw
        return value


def _inject_fault(draw: st.DrawFn, holder: Any, key: Any) -> None:
    fault = draw(st.sampled_from(["replace", "replace", "remove", "add", "wrap", "repeat"]))
    if fault == "replace":
        holder[key] = _fresh(draw(VALUES))
    elif fault == "remove":
        del holder[key]
    elif fault == "wrap":
        holder[key] = [holder[key]]
    elif fault == "repeat" and isinstance(holder, list):
        holder.extend([holder[key]] * draw(st.sampled_from([1, 40, 1100])))
    elif isinstance(holder, dict):
        holder[draw(st.sampled_from(NAMES) | st.text(max_size=5))] = _fresh(draw(VALUES))
    else:
        holder.insert(key, _fresh(draw(VALUES)))


@st.composite
def damaged_bytes(draw: st.DrawFn, files: list[bytes]) -> bytes:
    """Draw a valid file that was truncated, has changed bits or bytes, or is spliced from two files."""
    data = bytearray(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        fault = draw(st.sampled_from(["cut", "flip", "flip", "number", "remove", "repeat", "splice"]))
        if fault == "cut":
            del data[place:]
        elif fault == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif fault == "number":
            data[place : place + 4] = draw(st.sampled_from(EDGES))
        elif fault == "remove":
            del data[place : place + draw(st.integers(1, 64))]
        elif fault == "repeat":
            data[place:place] = data[place : place + 64] * draw(st.sampled_from([1, 50]))
        elif fault == "splice":
            other = draw(st.sampled_from(files))
            data[place:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


EDGES = [bytes.fromhex(number) for number in ("00000000", "ffffffff", "7fffffff", "ffffff7f", "80000000", "00000001")]
