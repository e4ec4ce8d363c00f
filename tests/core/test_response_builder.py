"""Responses: the same text streamed or whole, with stop strings, log probabilities and usage."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dashinfer_vlm_core.decoders import Token
from dashinfer_vlm_core.errors import CheckpointError, DecoderFailed
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.response.response_builder import PromptCounts, ResponseBuilder, StopStringMatcher
from dashinfer_vlm_core.tokenization.detokenizer import IncrementalDetokenizer
from tests.cases import cases
from tests.executed_lines import count_lines

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("ð", "Ł"), ("æ", "Ĺ"), ("o", "Ġw"), ("æĹ", "¥")]
ENVELOPE = {"id": "chatcmpl-1", "created": 1_700_000_000, "model": "tiny"}
COUNTS = PromptCounts(prompt_tokens=7)


def byte_level() -> Tokenizer:
    """Build a tokenizer: all bytes, a few merges (across a space, inside characters) and 3 added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.add_tokens(["<tool>", "é "])
    return tokenizer


TOKENIZER = byte_level()
SIZE = TOKENIZER.get_vocab_size()
END = TOKENIZER.token_to_id("<|im_end|>")
UNKNOWN = SIZE + 5  # the output layer of real checkpoints has more rows than the tokenizer has tokens
TEXTS = ["hello world", "🙂🙃", "日本語", "é", "a\N{ZERO WIDTH JOINER}b", "�", "\n\n", "<tool>"]

token_ids = st.lists(
    st.one_of(
        st.sampled_from(TEXTS).map(lambda text: TOKENIZER.encode(text).ids),
        st.integers(0, SIZE - 1).map(lambda index: [index]),
        st.just([UNKNOWN]),
    ),
    max_size=12,
).map(lambda pieces: list(itertools.chain(*pieces)))


def ids_of(text):
    return TOKENIZER.encode(text).ids


def bytes_of(text):
    """Return one token id per byte."""
    ((spelled, _),) = TOKENIZER.pre_tokenizer.pre_tokenize_str(text)
    return [TOKENIZER.token_to_id(character) for character in spelled]


def tokens_of(ids, finish="stop"):
    """Return a decoder's tokens: those of a completion, then the end token, or none if it ended for its length."""
    ids = [*ids, END] if finish == "stop" else ids
    ends = [None] * (len(ids) - 1) + [finish]
    return [
        Token(id=index, logprob=-i / 8, top_logprobs=((index, -i / 8), (END, -math.inf)), finish_reason=end)
        for i, (index, end) in enumerate(zip(ids, ends, strict=True))
    ]


def make_builder(counts=COUNTS, **fields):
    request = ChatRequest.parse({"messages": [{"role": "user", "content": "Hello"}], **fields})
    return ResponseBuilder(tokenizer=TOKENIZER, request=request, counts=counts, **ENVELOPE)


def add_tokens(builder, tokens):
    """Add tokens as the engine does, until the builder is finished."""
    chunks = []
    for token in tokens:
        chunks += builder.add_token(token)
        if builder.finished:
            break
    return chunks


def stream(tokens, **fields):
    builder = make_builder(stream=True, **fields)
    return [*add_tokens(builder, tokens), *builder.final_chunks(), *builder.usage_chunks()]


def whole(tokens, **fields):
    builder = make_builder(**fields)
    add_tokens(builder, tokens)
    return builder.completion()


def deltas(chunks):
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]


def text_of(ids, **fields):
    return whole(tokens_of(ids), **fields).choices[0].message.content


# Text


@settings(max_examples=100, deadline=None)
@given(token_ids, st.booleans())
@example([*ids_of("日")[:1], END, *ids_of("日")], True)
@example([*ids_of("日")[:1], END, *ids_of("日")], False)
@example(ids_of("🙂")[:-1], True)
def test_text_equals_tokenizers(ids, skip):
    known = [index for index in ids if index != UNKNOWN]
    assert text_of(ids, skip_special_tokens=skip) == TOKENIZER.decode(known, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(
    token_ids,
    st.sampled_from(["stop", "length"]),
    st.lists(st.text("lo日� |", min_size=1), max_size=4, unique=True),
    st.booleans(),
    st.booleans(),
)
def test_streamed_text_equals_whole(ids, finish, stops, skip, include):
    fields = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    fields |= {"logprobs": True, "stop": stops or None}
    tokens = tokens_of(ids or ids_of("a"), finish)
    chunks, completion = stream(tokens, **fields), whole(tokens, **fields)
    (choice,) = completion.choices
    assert "".join(deltas(chunks)) == choice.message.content
    entries = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert list(itertools.chain(*entries)) == choice.logprobs.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [choice.finish_reason]


def test_delta_never_splits_a_character():
    ids = bytes_of("日é🙂")
    assert len(ids) == 9
    assert deltas(stream(tokens_of(ids))) == ["日", "é", "🙂"]


def test_incomplete_character_is_emitted_at_end():
    ids = ids_of("a🙂")[:-1]
    assert deltas(stream(tokens_of(ids))) == ["a", "�"]
    assert deltas(stream(tokens_of(ids, "length"))) == ["a", "�"]


def test_end_token_is_not_shown():
    tokens = [Token(id=ids_of("a")[0]), Token(id=ids_of("b")[0], finish_reason="stop")]
    assert whole(tokens).choices[0].message.content == "a"


def test_last_token_of_truncated_completion_is_shown():
    choice = whole(tokens_of(ids_of("hello"), "length")).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hello", "length")


def test_empty_completion():
    chunks = stream(tokens_of([]))
    assert deltas(chunks) == []
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
    assert whole(tokens_of([])).choices[0].message.content == ""


def test_special_tokens_in_completion_are_skipped():
    assert text_of([*ids_of("a"), END, *ids_of("b")], ignore_eos=True) == "ab"


def test_special_tokens_are_text_on_request():
    """As in vLLM: stop strings are searched in them, they have log probabilities, and the end token is not shown."""
    tokens = tokens_of([*ids_of("a"), END, *ids_of("b")])
    fields = {"skip_special_tokens": False, "logprobs": True, "ignore_eos": True}
    assert deltas(stream(tokens, **fields)) == ["a", "<|im_end|>", "b"]
    choice = whole(tokens, **fields).choices[0]
    assert choice.message.content == "a<|im_end|>b"
    assert [entry.token for entry in choice.logprobs.content] == ["a", "<|im_end|>", "b"]
    assert whole(tokens, **fields, stop="_end").choices[0].message.content == "a<|im"


def test_invalid_bytes_are_not_held_back():
    """Each one is emitted with the next one; held-back bytes would be decoded again with every new byte."""
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    text = ""
    for count in range(1, 1001):
        text += detokenizer.feed(bytes_of("日")[1])
        assert len(text) == count
        assert not detokenizer.flush()
    assert text == "\ufffd" * 1000


def test_other_tokenizers_are_rejected():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(CheckpointError, match="byte-level"):
        IncrementalDetokenizer(tokenizer)


def test_decoder_stop_without_reason_is_an_error():
    builder = make_builder()
    builder.add_token(Token(id=ids_of("a")[0]))
    assert not builder.finished
    with pytest.raises(DecoderFailed):
        builder.completion()
    with pytest.raises(DecoderFailed):
        builder.final_chunks()


# Stop strings


def truncate(text, stops, include):
    """Truncate naively by the definition: at the first complete stop string, the longest of these."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end if include else end - len(max(found, key=len))]
    return None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.booleans(),
)
@example(["aab", "aabaaab"], ["aabaaa"], False)
@example(["abc"], ["abcd", "bc"], False)
@example(["ab", "aba"], ["ba"], True)
def test_text_is_truncated_at_first_stop_string(pieces, stops, include):
    strings = StopStringMatcher(tuple(stops), include=include)
    shown = ""
    for piece in pieces:
        shown += strings.feed(piece)
        assert strings.matched or not any(shown.endswith(stop) for stop in stops)
    text = "".join(pieces)
    expected = truncate(text, stops, include)
    assert strings.matched == (expected is not None)
    assert shown + strings.flush() == (text if expected is None else expected)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
def test_only_possible_stop_string_prefix_is_held_back(text, stops):
    strings = StopStringMatcher(tuple(stops))
    shown = strings.feed(text)
    if not strings.matched:
        held = max(k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k]))
        assert shown == text[: len(text) - held]


@cases(
    ("text", "stop", "answer"),
    [
        ("hello world", "world", "hello "),
        ("hello world", "o w", "hell"),
        ("hello world", ["ld", "wor"], "hello "),
        ("hello world", ["o", "hello"], ""),
        ("hello world", "hello world!", "hello world"),
        ("hello world", "hello world", ""),
        ("日本語🙂", "本語", "日"),
        ("日本語🙂", "🙂", "日本語"),
        ("aaab", "aab", "a"),
    ],
)
def test_stop_strings(text, stop, answer):
    tokens = tokens_of(ids_of(text), "length")
    choice = whole(tokens, stop=stop).choices[0]
    assert choice.message.content == answer
    assert choice.finish_reason == ("length" if answer == text else "stop")
    assert "".join(deltas(stream(tokens, stop=stop))) == answer


@pytest.mark.parametrize(
    ("skip", "stop", "end", "answer"),
    [
        (True, "o w", "b", "hello w"),
        (True, "x", "b", "hello worldb"),  # a token of `stop_token_ids`
        (True, None, "<|im_end|>", "hello world"),
        (False, None, "<|im_end|>", "hello world<|im_end|>"),
    ],
)
def test_end_is_part_of_the_text_on_request(skip, stop, end, answer):
    """As in vLLM: the stop string, or the token that ended it, which is visible like any other token."""
    tokens = [*tokens_of(ids_of("hello world"), None), Token(id=ids_of(end)[0], logprob=-1.0, finish_reason="stop")]
    fields = {"include_stop_str_in_output": True, "skip_special_tokens": skip, "stop": stop, "logprobs": True}
    choice = whole(tokens, **fields).choices[0]
    assert (choice.message.content, choice.finish_reason) == (answer, "stop")
    assert "".join(deltas(stream(tokens, **fields))) == answer
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(answer)


@cases(
    ("min_tokens", "stop", "answer"),
    [
        (0, "a", ""),
        (3, "a", "aaa"),
        (3, "aa", "aa"),  # it begins before the third token, but ends after it
        (3, ["aa", "aaab"], "aa"),
        (3, ["aab", "ab"], "aa"),
        (4, "a", "aaaab"),
        (4, "aab", "aa"),
        (5, "b", "aaaab"),
    ],
)
def test_stop_string_ends_after_the_minimum_of_tokens(min_tokens, stop, answer):
    """As in vLLM."""
    tokens = tokens_of(ids_of("aaaab"), "length")
    assert whole(tokens, min_tokens=min_tokens, stop=stop).choices[0].message.content == answer
    assert "".join(deltas(stream(tokens, min_tokens=min_tokens, stop=stop))) == answer


def test_stop_string_ends_generation():
    builder = make_builder(stop="lo")
    add_tokens(builder, tokens_of(ids_of("hello world")))
    assert builder.finished
    assert builder.completion().usage.completion_tokens == len(ids_of("hello"))


def test_possible_stop_string_prefix_is_held_back():
    builder = make_builder(stop="world!")
    assert deltas(add_tokens(builder, [Token(id=index) for index in ids_of("o wo")])) == ["o "]
    assert deltas(builder.add_token(Token(id=ids_of("m")[0]))) == ["wom"]


def test_matching_cost_does_not_grow_with_stop_string_length():
    """Comparing all their prefixes with each character would cost a hundred times as much."""
    short, long = StopStringMatcher(("b", "c")), StopStringMatcher(("a" * 255 + "b", "a" * 254 + "c"))
    assert count_lines(lambda: feed_all(long, 2000)) < 3 * count_lines(lambda: feed_all(short, 2000))
    assert len(feed_all(long, 2000)) == 2000


def feed_all(strings, count):
    return "".join(strings.feed("a") for _ in range(count))


# Log probabilities


def test_logprobs_have_openai_format():
    ids = [*ids_of("he"), END]
    tokens = [
        Token(id=ids[0], logprob=-0.25, top_logprobs=((ids[0], -0.25), (END, -math.inf))),
        Token(id=END, logprob=-0.5, top_logprobs=((END, -0.5),), finish_reason="stop"),
    ]
    logprobs = whole(tokens, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert logprobs.to_dict() == {
        "content": [
            {
                "token": "he",
                "bytes": [104, 101],
                "logprob": -0.25,
                "top_logprobs": [
                    {"token": "he", "bytes": [104, 101], "logprob": -0.25},
                    {"token": "<|im_end|>", "bytes": list(b"<|im_end|>"), "logprob": -9999.0},
                ],
            }
        ],
        "refusal": None,
    }


@settings(max_examples=100, deadline=None)
@given(token_ids)
def test_logprob_bytes_join_to_text(ids):
    choice = whole(tokens_of(ids), logprobs=True).choices[0]
    joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert joined.decode("utf-8", "replace") == choice.message.content


def test_partial_character_tokens_come_with_the_character():
    ids = ids_of("a🙂b")
    chunks = stream(tokens_of(ids), logprobs=True)
    shown = [
        (chunk.choices[0].delta.content, [bytes(entry.bytes) for entry in chunk.choices[0].logprobs.content])
        for chunk in chunks
        if chunk.choices[0].logprobs
    ]
    assert shown == [("a", [b"a"]), ("🙂", [b"\xf0\x9f", b"\x99", b"\x82"]), ("b", [b"b"])]


@pytest.mark.parametrize(
    ("ids", "stop", "listed"),
    [
        (ids_of("hello wide"), "wi", ["hell", "o w"]),
        (bytes_of("abcd"), "cd", ["a", "b"]),
        (bytes_of("abcd"), ["bx", "cd"], ["a", "b"]),
        (bytes_of("abcd"), "abc", []),
    ],
)
def test_tokens_starting_in_stop_string_have_no_logprobs(ids, stop, listed):
    completion = whole(tokens_of(ids), logprobs=True, stop=stop)
    chunks = stream(tokens_of(ids), logprobs=True, stop=stop)
    assert [entry.token for entry in completion.choices[0].logprobs.content] == listed
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [entry.token for logprobs in streamed for entry in logprobs.content] == listed


def test_empty_completion_has_no_logprobs():
    assert whole(tokens_of([]), logprobs=True).choices[0].logprobs.content == []


# Usage and JSON format


def test_usage():
    counts = PromptCounts(prompt_tokens=100, image_tokens=60, video_tokens=30)
    builder = make_builder(counts)
    first, *rest = tokens_of(ids_of("hello"))
    add_tokens(builder, [Token(id=first.id, cached_tokens=64), *rest])
    assert builder.completion().usage.to_dict() == {
        "prompt_tokens": 100,
        "completion_tokens": len(ids_of("hello")) + 1,  # and the end token
        "total_tokens": 100 + len(ids_of("hello")) + 1,
        "prompt_tokens_details": {"cached_tokens": 64, "image_tokens": 60, "video_tokens": 30},
    }


def test_usage_of_several_choices_counts_prompt_once():
    counts = PromptCounts(prompt_tokens=100, image_tokens=60, video_tokens=30)
    replies = [make_builder(counts) for _ in range(3)]
    for builder, cached in zip(replies, (32, 99, 99), strict=True):
        first, *rest = tokens_of(ids_of("hello"))
        add_tokens(builder, [Token(id=first.id, cached_tokens=cached), *rest])
    usage = replies[0].completion(replies[1:]).usage
    assert usage.prompt_tokens == 100
    assert usage.prompt_tokens_details.cached_tokens == 32


def test_completion_json():
    completion = whole(tokens_of(ids_of("he")))
    assert completion.model_dump(mode="json", exclude_unset=True) == {
        **ENVELOPE,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "he", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 0, "video_tokens": 0},
        },
    }


def wire_chunk(delta, finish=None, **fields):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {**ENVELOPE, "object": "chat.completion.chunk", "choices": [choice], **fields}


def test_stream_json():
    chunks = stream(tokens_of(ids_of("hello")))
    assert [chunk.model_dump(mode="json", exclude_unset=True) for chunk in chunks] == [
        wire_chunk({"role": "assistant", "content": "", "refusal": None}),
        wire_chunk({"content": "hell"}),
        wire_chunk({"content": "o"}),
        wire_chunk({}, "stop"),
    ]


def test_stream_json_with_usage():
    chunks = stream(tokens_of(ids_of("he")), stream_options={"include_usage": True})
    *others, last = [chunk.model_dump(mode="json", exclude_unset=True) for chunk in chunks]
    assert others == [
        wire_chunk({"role": "assistant", "content": "", "refusal": None}, usage=None),
        wire_chunk({"content": "he"}, usage=None),
        wire_chunk({}, "stop", usage=None),
    ]
    usage = whole(tokens_of(ids_of("he"))).usage.model_dump(mode="json", exclude_unset=True)
    assert last == {**ENVELOPE, "object": "chat.completion.chunk", "choices": [], "usage": usage}
