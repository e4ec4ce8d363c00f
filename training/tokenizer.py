"""The tokenizer: byte-level BPE with Qwen2's pre-tokenization, trained on generated sentences, and Qwen's special
tokens."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training import compose, questions, vocabulary

VOCABULARY = 768
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenization regex."""
DEFAULT_SYSTEM = "You are a helpful assistant."

CHAT_TEMPLATE = (
    "{% set pictures = namespace(seen=0) %}{% set videos = namespace(seen=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{% set pictures.seen = pictures.seen + 1 %}"
    "{% if add_vision_id %}Picture {{ pictures.seen }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}"
    "{% set videos.seen = videos.seen + 1 %}"
    "{% if add_vision_id %}Video {{ videos.seen }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Renders the same prompt as Qwen2-VL's template for every conversation."""


@functools.cache
def build() -> Tokenizer:
    """Train the tokenizer; reproducible on every machine, because the sentences have fixed seeds."""
    return train(_sentences(), VOCABULARY)


def train(sentences: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer of `vocabulary` tokens, the special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer's files in the layout of published checkpoints."""
    tokenizer.save(str(folder / "tokenizer.json"))
    model = json.loads(tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    _dump(folder / "vocab.json", model["vocab"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    _dump(folder / "tokenizer_config.json", _config(tokenizer))
    _dump(folder / "chat_template.json", {"chat_template": CHAT_TEMPLATE})


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }  # fmt: skip
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _sentences() -> list[str]:
    """Generate questions and answers, mostly about shapes, so that the words about them become single tokens."""
    rng = random.Random("tokenizer")
    asked = [question for _ in range(900) for question in _questions(rng)]
    lines = [line for question in asked for line in (question.text, question.answer)]
    lines += [line for forms, answer in vocabulary.SMALL_TALK for line in (*forms, answer)] * 20
    lines += [DEFAULT_SYSTEM, "system\n", "user\n", "assistant\n", "Picture 1: Video 2: "] * 200
    lines += [vocabulary.outside(rng) for _ in range(900)]
    return lines


def _questions(rng: random.Random) -> list[questions.Question]:
    scenes = compose.compose_set(rng, (4, 4), 2)
    change = compose.compose_change(rng, (4, 4))
    scene = compose.compose(rng, (4, 4), rng.randint(0, 4), clear=True)
    video = compose.compose_video(rng, (4, 4), 4, rng.choice(list(compose.MOTIONS)))
    found = [generator(rng, scene) for generator in questions.IMAGE_GENERATORS]
    found += [generator(rng, scenes) for generator in questions.SET_GENERATORS]
    found += [generator(rng, video) for generator in questions.VIDEO_GENERATORS]
    found += [questions.changed(rng, change), questions.chat(rng), questions.no_image(rng)]
    return [question for question in found if question]
