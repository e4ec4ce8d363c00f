"""Fine-tunes of docs/checkpoints.md whose configuration is known: the fields of their files that the reader uses.

Sources: issues and tests of public repositories that quote or describe the files. Fields that they do not mention are
those of the base model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from dashinfer_vlm_core.models.qwen2_vl import config as qwen2_vl
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_qwen2_5_vl import config as qwen2_5_vl
from dashinfer_vlm_qwen3_vl import config as qwen3_vl
from dashinfer_vlm_qwen3_vl import qwen3_5
from tests.pages import page_text

CHECKPOINTS = json.loads((Path(__file__).parent / "fine_tunes.json").read_text())
READERS = {
    "qwen2_vl": qwen2_vl.read_vision_config,
    "qwen2_5_vl": qwen2_5_vl.read_vision_config,
    "qwen3_vl": qwen3_vl.read_vision_config,
    "qwen3_5": qwen3_5.read_vision_config,
    "qwen3_5_moe": qwen3_5.read_vision_config,
}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
ENDS = {151645: "<|im_end|>", 248046: "<|im_end|>"}


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request, tmp_path):
    """Write the files of a checkpoint; return its name, and what the data says of it."""
    row = CHECKPOINTS[request.param]
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    normalization = CLIP if row["config"]["model_type"].startswith("qwen2") else HALVES
    files = {
        "config.json": row["config"],
        "generation_config.json": {"eos_token_id": row["generation"]},
        "preprocessor_config.json": {"size": size} | normalization,
        # As transformers 5 writes them: ids only in the larger file.
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
        "tokenizer.json": {"added_tokens": [{"id": end, "content": ENDS[end]} for end in row["stop"] if end in ENDS]},
    }
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    return request.param, row, tmp_path


def test_family_and_fields_are_those_of_transformers(checkpoint):
    _, row, folder = checkpoint
    spec, vision = load_plugins().load_spec(folder), READERS[row["config"]["model_type"]](folder)
    expected = AutoConfig.from_pretrained(folder)
    text, encoder = expected.get_text_config(), expected.vision_config
    assert spec.model_type == expected.model_type == row["config"]["model_type"]
    assert (spec.tokens.image, spec.tokens.video) == (expected.image_token_id, expected.video_token_id)
    assert (spec.hidden_size, len(spec.text.layers), spec.vocab_size) == (
        text.hidden_size, text.num_hidden_layers, text.vocab_size
    )  # fmt: skip
    assert spec.text.tie_word_embeddings == expected.tie_word_embeddings
    assert (vision.depth, vision.hidden_size, vision.intermediate_size, vision.num_heads, vision.output_size) == (
        encoder.depth, encoder.hidden_size, encoder.intermediate_size, encoder.num_heads, encoder.out_hidden_size
    )  # fmt: skip


def test_stop_tokens_include_the_end_of_a_turn(checkpoint):
    _, row, folder = checkpoint
    assert list(load_plugins().load_spec(folder).tokens.stop) == row["stop"]


def test_page_names_the_checkpoint(checkpoint):
    organization, _, name = checkpoint[0].partition("/")
    assert re.search(rf"`{organization}/(.*`)?{re.escape(name)}`", page_text("checkpoints.md"))
