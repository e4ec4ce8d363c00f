from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoConfig

from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.coordinates import CoordinateSpec
from dashinfer_vlm_core.models.qwen2_vl.config import (
    VisionConfig,
    read_spec,
    read_vision_config,
)
from dashinfer_vlm_core.models.spec import PixelSpec
from dashinfer_vlm_core.text_spec import AttentionSpec, LayerSpec, MlpSpec, RotarySpec, TextModelSpec

PUBLISHED_2B = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
GENERATION = {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "pad_token_id": 151643}
PREPROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}


@pytest.fixture
def published(tmp_path):
    """Write the configuration files of the published 2B checkpoint."""
    write(tmp_path, "config.json", PUBLISHED_2B)
    write(tmp_path, "generation_config.json", GENERATION)
    write(tmp_path, "preprocessor_config.json", PREPROCESSOR)
    return tmp_path


def write(folder, name, values):
    (folder / name).write_text(json.dumps(values))


def edit(folder, name, path, value):
    """Replace the field at `path`, such as `vision_config.depth`; None removes it."""
    values = fields = json.loads((folder / name).read_text())
    *parents, last = path.split(".")
    for parent in parents:
        fields = fields[parent]
    if value is None:
        del fields[last]
    else:
        fields[last] = value
    write(folder, name, values)


def test_published_layout(published):
    spec = read_spec(published)

    assert (spec.folder, spec.model_type, spec.dtype) == (published, "qwen2_vl", "bfloat16")
    assert (spec.max_model_len, spec.vocab_size, spec.hidden_size) == (32768, 151936, 1536)
    assert (spec.tokens.image, spec.tokens.video, spec.tokens.stop) == (151655, 151656, (151645, 151643))
    assert spec.pixels == PixelSpec(max_pixels=12845056)
    assert spec.coordinates == CoordinateSpec(extent=1000, pairs=True)
    attention = AttentionSpec(
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        rotary=RotarySpec(theta=1e6, axes=(0,) * 16 + (1,) * 24 + (2,) * 24),
        bias=True,
    )
    assert read_spec(published).text == TextModelSpec(
        hidden_size=1536,
        layers=(LayerSpec(mixer=attention, mlp=MlpSpec(intermediate_size=8960)),) * 28,
        vocab_size=151936,
        max_position_embeddings=32768,
        norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    assert read_vision_config(published) == VisionConfig(
        depth=32,
        hidden_size=1280,
        intermediate_size=5120,
        output_size=1536,
        num_heads=16,
        patch_size=14,
        temporal_patch_size=2,
        spatial_merge_size=2,
        hidden_act="quick_gelu",
    )


def test_layout_written_by_transformers_is_read_alike(published, tmp_path_factory):
    rewritten = tmp_path_factory.mktemp("rewritten")
    AutoConfig.from_pretrained(published).save_pretrained(rewritten)
    for name in ("generation_config.json", "preprocessor_config.json"):
        shutil.copy(published / name, rewritten)

    assert "text_config" in json.loads((rewritten / "config.json").read_text())
    assert read_spec(rewritten).text == read_spec(published).text
    assert read_vision_config(rewritten) == read_vision_config(published)
    assert read_spec(rewritten).tokens == read_spec(published).tokens
    assert read_spec(rewritten).dtype == "bfloat16"


def test_rope_scaling_of_transformers_4_45(published):
    scaling = {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}
    edit(published, "config.json", "rope_scaling", scaling)

    assert read_spec(published).text.attention.rotary.sections == (16, 24, 24)


def test_output_layer_is_tied_if_set_at_either_level(published):
    edit(published, "config.json", "tie_word_embeddings", None)
    assert not read_spec(published).text.tie_word_embeddings

    edit(published, "config.json", "tie_word_embeddings", value=True)
    assert read_spec(published).text.tie_word_embeddings


@pytest.mark.parametrize(("found", "stop"), [(7, (7,)), ([7, 8], (7, 8))])
def test_stop_tokens_come_from_generation_config(published, found, stop):
    edit(published, "generation_config.json", "eos_token_id", found)

    assert read_spec(published).tokens.stop == stop


@pytest.mark.parametrize("eos_token", ["<|im_end|>", {"content": "<|im_end|>"}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "the end of tokenizer.json"])
def test_stop_tokens_include_the_end_of_a_turn(published, name, eos_token):
    edit(published, "generation_config.json", "eos_token_id", 151643)
    by_id = {"151643": {"content": "<|endoftext|>"}, "151645": {"content": "<|im_end|>"}}
    added = [{"id": int(index), **token} for index, token in by_id.items()]
    first = {"model": "é" * (1 << 20)} if name.startswith("the end") else {}
    write(published, "tokenizer.json", {**first, "added_tokens": added})
    ids = {"added_tokens_decoder": by_id} if name == "tokenizer_config.json" else {}
    write(published, "tokenizer_config.json", {"eos_token": eos_token, **ids})

    assert read_spec(published).tokens.stop == (151643, 151645)


@pytest.mark.parametrize("settings", [{}, {"eos_token": None}, {"eos_token": "</s>"}, []])
def test_tokenizer_without_end_adds_no_stop_token(published, settings):
    write(published, "tokenizer_config.json", settings)
    write(published, "tokenizer.json", {"added_tokens": [{"id": 7, "content": "<|im_end|>"}]})

    assert read_spec(published).tokens.stop == (151645, 151643)


def test_stop_tokens_fall_back_to_config(published):
    (published / "generation_config.json").unlink()

    assert read_spec(published).tokens.stop == (151645,)


def test_absent_fields_have_the_values_of_transformers(published):
    """transformers 4.49 leaves out the fields of `vision_config` that have its default values."""
    expected, spec = read_vision_config(published), read_spec(published)
    edit(published, "config.json", "vision_config", {"hidden_size": 1536, "in_chans": 3, "spatial_patch_size": 14})
    for name in ("image_token_id", "video_token_id"):
        edit(published, "config.json", name, None)

    assert read_vision_config(published) == expected
    assert read_spec(published).tokens == spec.tokens
    config = AutoConfig.from_pretrained(published)
    assert (config.vision_config.depth, config.vision_config.embed_dim) == (expected.depth, expected.hidden_size)
    assert (config.image_token_id, config.video_token_id) == (spec.tokens.image, spec.tokens.video)


def test_pixel_limits_are_read_from_edge_names(published):
    newer = {name: value for name, value in PREPROCESSOR.items() if not name.endswith("_pixels")}
    write(published, "preprocessor_config.json", newer | {"size": {"shortest_edge": 6272, "longest_edge": 12544}})

    assert (read_spec(published).pixels.min_pixels, read_spec(published).pixels.max_pixels) == (6272, 12544)


def test_pixel_limits_from_a_processor_config(published):
    (published / "preprocessor_config.json").unlink()
    write(published, "processor_config.json", {"image_processor": PREPROCESSOR, "video_processor": {}})

    assert read_spec(published).pixels == PixelSpec(max_pixels=12845056)


CONFIG, PIXELS = "config.json", "preprocessor_config.json"
BROKEN = [
    (CONFIG, "model_type", "qwen2_5_vl", "Only 'qwen2_vl'"),
    (CONFIG, "model_type", None, "Only 'qwen2_vl'"),
    (CONFIG, "torch_dtype", None, "`dtype` is missing"),
    (CONFIG, "torch_dtype", "float8_e4m3fn", "float32, bfloat16"),
    (CONFIG, "use_sliding_window", True, "sliding-window attention"),
    (CONFIG, "hidden_act", "gelu", "Only 'silu'"),
    (CONFIG, "rope_scaling", {"type": "yarn", "factor": 4, "mrope_section": [16, 24, 24]}, "'yarn'"),
    (CONFIG, "rope_scaling", None, "`rope_scaling` is missing"),
    (CONFIG, "rope_scaling.mrope_section", [16, 24], "three positive numbers"),
    (CONFIG, "rope_scaling.mrope_section", [16, 24, 16], "half of `head_dim` 128"),
    (CONFIG, "rope_theta", None, "`rope_theta` is missing"),
    (CONFIG, "hidden_size", None, "`hidden_size` is missing"),
    (CONFIG, "hidden_size", "wide", "`hidden_size` must be a positive integer"),
    (CONFIG, "num_hidden_layers", 0, "`num_hidden_layers` must be a positive integer"),
    (CONFIG, "num_hidden_layers", True, "`num_hidden_layers` must be a positive integer"),
    (CONFIG, "num_attention_heads", 10, "is not `hidden_size`"),
    (CONFIG, "num_key_value_heads", 5, "does not divide"),
    (CONFIG, "rms_norm_eps", float("nan"), "`rms_norm_eps` must be a positive number"),
    (CONFIG, "tie_word_embeddings", "yes", "true or false"),
    (CONFIG, "image_token_id", "<|image_pad|>", "`image_token_id` must be a positive integer"),
    (CONFIG, "vision_config", None, "`vision_config` is missing"),
    (CONFIG, "vision_config", [], "`vision_config` must be an object"),
    (CONFIG, "vision_config.depth", 0, "`vision_config.depth` must be a positive integer"),
    (CONFIG, "vision_config.num_heads", 7, "into heads"),
    (CONFIG, "vision_config.hidden_size", 1280, "the text model's is 1536"),
    (CONFIG, "vision_config.hidden_act", "silu", "quick_gelu"),
    (CONFIG, "vision_config.in_chans", 4, "RGB"),
    (CONFIG, "vision_config.rope_parameters", {"rope_type": "axial", "rope_theta": 5000.0}, "Only 10000.0"),
    ("generation_config.json", "eos_token_id", "<|im_end|>", "token ids"),
    (PIXELS, "patch_size", 16, "config.json has 14"),
    (PIXELS, "merge_size", 1, "config.json has 2"),
    (PIXELS, "max_pixels", None, "`size` is missing"),
    (PIXELS, "image_mean", [0.5], "three positive numbers"),
]


@pytest.mark.parametrize(("name", "path", "value", "words"), BROKEN, ids=[f"{p}={v}"[:40] for _, p, v, _ in BROKEN])
def test_broken_field_is_named_with_its_file(published, name, path, value, words):
    edit(published, name, path, value)

    with pytest.raises(CheckpointError) as error:
        read_spec(published)

    assert words in error.value.message
    assert str(published / name) in error.value.message


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize(
    ("content", "words"), [(None, "is missing"), ("{", "is not valid JSON"), ("[]", "not a JSON object")]
)
def test_broken_file_is_named(published, name, content, words):
    (published / name).unlink()
    if content is not None:
        (published / name).write_text(content)

    with pytest.raises(CheckpointError, match=words) as error:
        read_spec(published)

    assert str(published / name) in error.value.message


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_spec(tmp_path / "nowhere")
