"""Configuration files of the published checkpoints are read, and unsupported ones are rejected by field."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import AutoConfig

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.models.coordinates import CoordinateSpec
from dashinfer_vlm_core.models.spec import PixelLimits, PixelSpec
from dashinfer_vlm_core.text_spec import ExpertsSpec, MlpSpec
from dashinfer_vlm_dashinfer import DashInferFactory
from dashinfer_vlm_qwen3_vl.config import Qwen3VLVisionConfig, read_spec, read_video_pixels, read_vision_config

DENSE = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
MOE = copy.deepcopy(DENSE) | {"model_type": "qwen3_vl_moe"}
MOE["text_config"] |= {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
PATCHES = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
FILES = {
    "config.json": DENSE,
    "generation_config.json": {"eos_token_id": [151645, 151643]},
    "preprocessor_config.json": PATCHES | {"size": {"longest_edge": 16777216, "shortest_edge": 65536}},
    "video_preprocessor_config.json": PATCHES | {"size": {"longest_edge": 25165824, "shortest_edge": 4096}},
}


@pytest.fixture
def published(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def edit(folder, name, path, value):
    """Replace the field at `path`; None removes it."""
    values = fields = json.loads((folder / name).read_text())
    *parents, last = path.split(".")
    for parent in parents:
        fields = fields[parent]
    if value is None:
        del fields[last]
    else:
        fields[last] = value
    (folder / name).write_text(json.dumps(values))


def test_published_layout(published):
    spec = read_spec(published)
    assert (spec.model_type, spec.dtype, spec.max_model_len) == ("qwen3_vl", "bfloat16", 262144)
    assert (spec.tokens.image, spec.tokens.video, spec.tokens.stop) == (151655, 151656, (151645, 151643))
    assert spec.pixels == PixelSpec(
        patch_size=16, min_pixels=65536, max_pixels=16777216, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    assert spec.video == VideoSamplingPolicy(frame_factor=1, precision="float64")
    assert spec.coordinates == CoordinateSpec(extent=1000)
    text = spec.text
    attention = text.attention
    assert (text.hidden_size, attention.head_dim, attention.num_heads) == (2560, 128, 32)
    assert (attention.bias, attention.head_norms, text.tie_word_embeddings) == (False, True, True)
    assert {layer.mlp for layer in text.layers} == {MlpSpec(intermediate_size=9728)}
    assert (text.visual_levels, spec.visual_width) == (3, 4 * 2560)
    assert attention.rotary.theta == 5e6
    assert read_video_pixels(published, spec.pixels) == PixelLimits(min_pixels=4096, max_pixels=25165824)
    assert read_vision_config(published) == Qwen3VLVisionConfig(
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        output_size=2560,
        patch_size=16,
        temporal_patch_size=2,
        spatial_merge_size=2,
        table_side=48,
        hidden_act="gelu_pytorch_tanh",
        deepstack_layers=(5, 11, 17),
    )


SMALL_VISION = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
LARGE_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
SIZES = {  # hidden size, layers, heads, KV heads, MLP, MLP of an expert, tied, vision encoder
    "2B": (2048, 28, 16, 8, 6144, None, True, SMALL_VISION),
    "4B": (2560, 36, 32, 8, 9728, None, True, SMALL_VISION),
    "8B": (4096, 36, 32, 8, 12288, None, False, LARGE_VISION),
    "32B": (5120, 64, 64, 8, 25600, None, False, LARGE_VISION),
    "30B-A3B": (2048, 48, 32, 4, 6144, 768, False, LARGE_VISION),
    "235B-A22B": (4096, 94, 64, 4, 12288, 1536, False, LARGE_VISION),
}


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_are_read(published, size):
    hidden, layers, heads, kv_heads, inner, expert, tied, vision = SIZES[size]
    config = copy.deepcopy(MOE if expert else DENSE)
    config["text_config"] |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
    } | ({"moe_intermediate_size": expert} if expert else {})
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    config["vision_config"] |= vision | {"out_hidden_size": hidden}
    (published / "config.json").write_text(json.dumps(config))
    text, found = read_spec(published).text, read_vision_config(published)
    attention = text.attention
    assert (text.hidden_size, len(text.layers), text.tie_word_embeddings) == (hidden, layers, tied)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (heads, kv_heads, 128)
    experts = ExpertsSpec(num_experts=128, experts_per_token=8, intermediate_size=expert) if expert else None
    assert {layer.mlp for layer in text.layers} == {experts or MlpSpec(intermediate_size=inner)}
    assert (found.depth, found.hidden_size, found.intermediate_size) == tuple(vision.values())[:3]
    assert (found.deepstack_layers, found.output_size) == (tuple(vision["deepstack_visual_indexes"]), hidden)


def test_rotary_axes_are_interleaved(published):
    """Height and width take every third frequency up to three times their section; the rest is time's."""
    axes = read_spec(published).text.attention.rotary.axes
    assert axes[:7] == (0, 1, 2, 0, 1, 2, 0)
    assert axes[56:] == (2, 0, 1, 2, 0, 0, 0, 0)
    assert [axes.count(axis) for axis in range(3)] == [24, 20, 20]


def dense_layers(layers):
    return [number for number, layer in enumerate(layers) if isinstance(layer.mlp, MlpSpec)]


def test_mixture_of_experts(published):
    (published / "config.json").write_text(json.dumps(MOE))
    edit(published, "config.json", "text_config.mlp_only_layers", [2])
    layers = read_spec(published).text.layers
    assert layers[1].mlp == ExpertsSpec(num_experts=128, experts_per_token=8, intermediate_size=768)
    assert dense_layers(layers) == [2]
    edit(published, "config.json", "text_config.decoder_sparse_step", 2)
    assert dense_layers(read_spec(published).text.layers) == list(range(0, 36, 2))


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_layout_written_by_transformers_is_read_alike(published, tmp_path_factory, config):
    (published / "config.json").write_text(json.dumps(config))
    rewritten = tmp_path_factory.mktemp("rewritten")
    AutoConfig.from_pretrained(published).save_pretrained(rewritten)
    (rewritten / "generation_config.json").write_text(json.dumps(FILES["generation_config.json"]))
    processor = {
        "image_processor": FILES["preprocessor_config.json"],
        "video_processor": FILES["video_preprocessor_config.json"],
    }
    (rewritten / "processor_config.json").write_text(json.dumps(processor))
    ours, theirs = read_spec(published), read_spec(rewritten)
    assert "rope_parameters" in json.loads((rewritten / "config.json").read_text())["text_config"]
    assert (theirs.text, theirs.pixels, theirs.video) == (ours.text, ours.pixels, ours.video)
    assert read_vision_config(rewritten) == read_vision_config(published)
    assert read_video_pixels(rewritten, ours.pixels) == read_video_pixels(published, ours.pixels)


def test_videos_without_a_file_have_the_limits_of_images(published):
    (published / "video_preprocessor_config.json").unlink()
    assert read_video_pixels(published, read_spec(published).pixels).max_pixels == 16777216


CONFIG, VIDEO = "config.json", "video_preprocessor_config.json"
BROKEN = [
    (CONFIG, "model_type", "qwen2_vl", "Only 'qwen3_vl' and 'qwen3_vl_moe'"),
    (CONFIG, "text_config.attention_bias", True, "`text_config.attention_bias` is true"),
    (CONFIG, "text_config.num_key_value_heads", 5, "does not divide"),
    (CONFIG, "text_config.rope_scaling.mrope_interleaved", False, "Only interleaved"),
    (CONFIG, "text_config.rope_scaling.mrope_section", [30, 20, 20], "half of `head_dim` 128"),
    (CONFIG, "text_config.rope_scaling.mrope_section", [4, 30, 30], "too many frequencies"),
    (CONFIG, "text_config.rope_scaling.mrope_section", [44, 0.5, 20], "three positive integers"),
    (CONFIG, "text_config.rope_scaling.rope_type", "yarn", "'yarn'"),
    (CONFIG, "vision_config.out_hidden_size", 2048, "the text model's is 2560"),
    (CONFIG, "vision_config.hidden_act", "quick_gelu", "gelu_pytorch_tanh"),
    (CONFIG, "vision_config.num_heads", 7, "into heads"),
    (CONFIG, "vision_config.num_position_embeddings", 2305, "a square, got 2305"),
    (CONFIG, "vision_config.deepstack_visual_indexes", None, "`vision_config.deepstack_visual_indexes` is missing"),
    (CONFIG, "vision_config.deepstack_visual_indexes", [5, 24], "indices below `depth`"),
    (CONFIG, "vision_config.deepstack_visual_indexes", [11, 5], "ascending"),
    (CONFIG, "vision_config.deepstack_visual_indexes", ["5"], "indices of layers"),
    (CONFIG, "vision_start_token_id", "a", "`vision_start_token_id` must be a positive integer"),
    (VIDEO, "patch_size", 14, "that of images is 16"),
    (VIDEO, "image_mean", [0.4, 0.4, 0.4], "that of images is"),
    (VIDEO, "size", None, "`size` is missing"),
    (VIDEO, "fps", -1, "positive number"),
]


@pytest.mark.parametrize(("name", "path", "value", "words"), BROKEN, ids=[f"{p}={v}"[:40] for _, p, v, _ in BROKEN])
def test_broken_field_is_named_with_its_file(published, name, path, value, words):
    edit(published, name, path, value)
    with pytest.raises(CheckpointError) as error:
        load_all(published)
    assert words in error.value.message
    assert str(published / name) in error.value.message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("norm_topk_prob", False, "Only normalized"),
        ("num_experts_per_tok", 129, "above `num_experts` 128"),
        ("mlp_only_layers", 3, "indices of layers"),
        ("num_experts", None, "`text_config.num_local_experts` is missing"),
    ],
)
def test_broken_field_of_experts_is_named(published, field, value, words):
    (published / "config.json").write_text(json.dumps(MOE))
    edit(published, "config.json", f"text_config.{field}", value)
    with pytest.raises(CheckpointError) as error:
        read_spec(published)
    assert words in error.value.message


def load_all(folder):
    """Read everything that an engine reads."""
    from dashinfer_vlm_qwen3_vl import Qwen3VL

    family = Qwen3VL()
    spec = family.load_spec(folder)
    family.prompt_layout(spec)
    family.image_processor(spec, EngineConfig())


@pytest.mark.supports("text", backend="dashinfer-cpu", family="qwen3_vl", rejected=True)
@pytest.mark.parametrize(("config", "reason"), [(DENSE, "after its first layers"), (MOE, "no mixture of experts")])
def test_dashinfer_reports_unsupported_text_model(published, config, reason):
    (published / "config.json").write_text(json.dumps(config))
    support = DashInferFactory().check_support(read_spec(published), EngineConfig())
    assert support.score == 0
    assert config["model_type"] in support.reason
    assert reason in support.reason
