"""The tokenizer is lossless, and its chat template is Qwen2-VL's."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dashinfer_vlm_demo import CHECKPOINT
from tests.cases import cases
from training import drawing, scenes, tokenizer

TEXTS = [
    "A red circle to the left of a blue square.",
    "What's in this picture?\n\n  Two   spaces\tand a tab.",
    "naïve façade, 日本語, Привет, 🙂🙃, ¿qué?",
    "x = {'a': [1, 2.5]}  # 12345",
    "",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def published() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(CHECKPOINT)
    return loaded


@cases("text", TEXTS)
def test_text_round_trips(text: str, published: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.build().encode(text).ids
    assert tokenizer.build().decode(ids, skip_special_tokens=False) == text
    assert published(text)["input_ids"] == ids


def test_special_tokens_are_last_in_qwen_order(published: PreTrainedTokenizerBase) -> None:
    first = tokenizer.VOCABULARY - len(tokenizer.SPECIAL_TOKENS)
    assert first == 754
    for index, token in enumerate(tokenizer.SPECIAL_TOKENS, first):
        assert tokenizer.build().token_to_id(token) == index
        assert published(f"a{token}b")["input_ids"][1] == index


def test_domain_words_are_single_tokens() -> None:
    for word in (*drawing.COLORS, *drawing.SHAPES, "left", "right", "up", "down"):
        assert len(tokenizer.build().encode(f" {word}").ids) == 1, word


def test_checkpoint_tokenizer_equals_built_tokenizer(published: PreTrainedTokenizerBase) -> None:
    assert published.get_vocab() == tokenizer.build().get_vocab()


def test_chat_template_with_image_video_and_turns(published: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "video"}]},
        {"role": "assistant", "content": "A red circle."},
        {"role": "user", "content": "Where?"},
    ]
    assert published.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nLook: <|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\nA red circle.<|im_end|>\n"
        "<|im_start|>user\nWhere?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_numbers_images_with_add_vision_id(published: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "video"}]},
    ]
    text = published.apply_chat_template(messages, tokenize=False, add_vision_id=True)
    vision = "<|vision_start|><|{}_pad|><|vision_end|>"
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        f"Picture 1: {vision.format('image')}Picture 2: {vision.format('image')}Video 1: {vision.format('video')}"
        "<|im_end|>\n"
    )


def test_answers_do_not_use_byte_fallback() -> None:
    for task in scenes.TASKS:
        answer = scenes.sample(task, 1).answer
        assert len(tokenizer.build().encode(answer).ids) <= 2 * len(answer.split()) + 8
