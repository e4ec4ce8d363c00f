"""What is asked about a page, what is responded, and the tokenizer for both.

Characters of a page are one token each. Prompts and fixed responses consist of longer tokens, so that rows are short.
"""

from __future__ import annotations

import functools
import random

from tokenizers import Tokenizer

from training import tokenizer
from training.reading.texts import Text

VOCABULARY = 448
READ = (
    "Read the text.", "What does the text say?", "Read this.", "What is written here?", "Transcribe the text.",
    "Read the receipt.", "What does the receipt say?", "Extract the text.", "Please read the text in the image.",
    "Read all lines.", "What does it say?", "Convert the page to text.", "OCR", "Text Recognition:",
    "Please transcribe this page.", "What is on the receipt?",
)  # fmt: skip
TOTAL = ("What is the total?", "How much is the total?", "What is the amount to pay?", "How much do I pay?", "Total?")
NO_TEXT, NOT_READABLE, NO_TOTAL = "I see no text.", "I cannot read this.", "I see no total."
BEFORE = f"<|im_start|>system\n{tokenizer.DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n<|vision_start|>"
AFTER = "<|vision_end|>"
TURN = "<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"


@functools.cache
def build() -> Tokenizer:
    """Train the tokenizer on the fixed texts; reproducible on every machine."""
    phrases = (*READ, *TOTAL, NO_TEXT, NOT_READABLE, NO_TOTAL, tokenizer.DEFAULT_SYSTEM, "system\n", "user\n")
    return tokenizer.train([*phrases, "assistant\n"] * 50, VOCABULARY)


@functools.lru_cache(maxsize=4096)
def encode(text: str) -> list[int]:
    """Tokenize a fixed text. Do not modify the result."""
    return list(build().encode(text).ids)


@functools.cache
def character_token(character: str) -> int:
    """Return the token of one character of a page."""
    (token,) = build().encode(character).ids
    return int(token)


def choose(rng: random.Random, text: Text, totals: float) -> tuple[str, str]:
    """Return a prompt about a page and the response; `totals` is the share of prompts about the amount to pay."""
    if rng.random() < totals:
        return rng.choice(TOTAL), text.total or NO_TOTAL
    return rng.choice(READ), "\n".join(text.lines)
