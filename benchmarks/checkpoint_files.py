"""The files of a Qwen2-VL checkpoint next to its weights: constants, chat template, tokenizer of the published size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 151_643
"""Ordinary tokens of Qwen2-VL; the control tokens follow."""
CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
IDS = {name: VOCABULARY + index for index, name in enumerate(CONTROL)}
# The published template, reduced to texts and images.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE_MERGES = (("us", "er"), ("ass", "ist"), ("assist", "ant"), ("Ċ", "Ċ"))
"""The names of roles and empty lines are single tokens, as in the published tokenizer."""
PIXELS: dict[str, Any] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 16_384 * 28 * 28,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}


def vision_token_ids(ids: Mapping[str, int] = IDS) -> dict[str, int]:
    """Return the fields of `config.json` that name the tokens of images and videos."""
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    return {f"{name.removesuffix('_pad')}_token_id": ids[f"<|{name}|>"] for name in names}


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE of Qwen2's size with merges of letters only, so that nearly every token is text.

    Text is then streamed token by token, without waiting for complete characters.
    """
    merges = [*islice(_merges(), VOCABULARY - 256 - len(TEMPLATE_MERGES)), *TEMPLATE_MERGES]
    tokenizer = byte_level_bpe(merges)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 32_768,
        "chat_template": TEMPLATE,
        "additional_special_tokens": list(CONTROL[1:]),
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "chat_template.json", {"chat_template": TEMPLATE})
    ids = tokenizer.get_vocab(with_added_tokens=False)
    write_json(folder / "vocab.json", {piece: ids[piece] for piece in sorted(ids, key=ids.__getitem__)})
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)))


def byte_level_bpe(merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """Return a byte-level BPE with Qwen2's pre-tokenizer. Its control tokens follow the 256 bytes and the merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs that give all pieces of two, then of three letters, the space (`Ġ`) among them: 151,686 pieces."""
    letters = ["Ġ", *(chr(code) for case in "aA" for code in range(ord(case), ord(case) + 26))]
    yield from ((first, second) for first, second in product(letters, repeat=2))
    yield from ((first + second, third) for first, second, third in product(letters, repeat=3))


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=1))


def linked_copy(checkpoint: Path, folder: Path, add_files: Callable[[Path], None]) -> Path:
    """Return `folder` with links to a checkpoint's files, and other files; it is created if it is missing.

    Args:
        checkpoint: the checkpoint.
        folder: the folder; no incomplete one is left behind.
        add_files: adds the other files to the folder that it is called with.
    """
    if not folder.exists():
        draft = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for file in checkpoint.iterdir():
            (draft / file.name).symlink_to(file.resolve())
        add_files(draft)
        draft.rename(folder)
    return folder
