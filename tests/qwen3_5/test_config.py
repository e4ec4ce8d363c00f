"""The published files of Qwen3.5: https://huggingface.co/Qwen/Qwen3.5-4B and Qwen3.5-35B-A3B."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.files import rename
from dashinfer_vlm_core.models.spec import PixelLimits
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.text_spec import AttentionSpec, DeltaNetSpec, ExpertsSpec, LayerSpec, MlpSpec, RotarySpec
from dashinfer_vlm_dashinfer import DashInferFactory
from dashinfer_vlm_qwen3_vl.config import read_video_pixels, read_vision_tokens
from dashinfer_vlm_qwen3_vl.qwen3_5 import read_spec, read_vision_config

LAYERS = [*["linear_attention"] * 3, "full_attention"]
DENSE = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "layer_types": LAYERS * 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": True,
    "video_token_id": 248057,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "model_type": "qwen3_5",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
MOE = copy.deepcopy(DENSE) | {"model_type": "qwen3_5_moe", "tie_word_embeddings": False}
del MOE["text_config"]["intermediate_size"]
MOE["text_config"] |= {
    "hidden_size": 2048,
    "layer_types": LAYERS * 10,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
MOE["vision_config"] |= {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 2048}
PATCHES = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
FILES = {
    "generation_config.json": {"eos_token_id": [248046, 248044]},
    "preprocessor_config.json": PATCHES | {"size": {"longest_edge": 16777216, "shortest_edge": 65536}},
    "video_preprocessor_config.json": PATCHES | {"size": {"longest_edge": 25165824, "shortest_edge": 4096}},
}
DELTA_NET = DeltaNetSpec(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4)


@pytest.fixture
def published(tmp_path):
    """Return a function that writes the files of a checkpoint with changed fields of `config.json`."""

    def published(config, changes=()):
        values = copy.deepcopy(config)
        for path, value in dict(changes).items():
            *parents, last = path.split(".")
            fields = values
            for parent in parents:
                fields = fields[parent]
            fields[last] = value
        for name, content in {**FILES, "config.json": values}.items():
            (tmp_path / name).write_text(json.dumps(content))
        return tmp_path

    return published


def test_published_layout(published):
    folder = published(DENSE)
    spec = load_plugins().family_of(folder).load_spec(folder)
    assert (spec.model_type, spec.dtype, spec.max_model_len, spec.vocab_size) == (
        "qwen3_5", "bfloat16", 262144, 248320
    )  # fmt: skip
    assert (spec.tokens.image, spec.tokens.video, spec.tokens.stop) == (248056, 248057, (248046, 248044))
    text = spec.text
    axes = (0, 1, 2) * 10 + (0, 1)
    attention = AttentionSpec(
        num_heads=16, num_kv_heads=4, head_dim=256, rotary=RotarySpec(theta=1e7, axes=axes), head_norms=True, gate=True
    )
    assert (text.attention, text.delta_net) == (attention, DELTA_NET)
    mlp = MlpSpec(intermediate_size=9216)
    assert text.layers == (*[LayerSpec(mixer=DELTA_NET, mlp=mlp)] * 3, LayerSpec(mixer=attention, mlp=mlp)) * 8
    assert (text.num_attention_layers, text.num_delta_net_layers) == (8, 24)
    assert (text.norm_offset, text.tie_word_embeddings, text.visual_levels) == (1, True, 0)
    assert read_video_pixels(folder, spec.pixels) == PixelLimits(min_pixels=4096, max_pixels=25165824)
    assert read_vision_config(folder).deepstack_layers == ()
    assert [rename(f"{name}.weight", spec.tensor_renames) for name in ("mtp.fc", "model.language_model.norm")] == [
        "mtp.fc.weight", "model.norm.weight"
    ]  # fmt: skip


def test_mixture_of_experts(published):
    text = read_spec(published(MOE)).text
    experts = ExpertsSpec(
        num_experts=256, experts_per_token=8, intermediate_size=512, shared_intermediate_size=512
    )  # fmt: skip
    assert {layer.mlp for layer in text.layers} == {experts}
    assert (len(text.layers), text.tie_word_embeddings) == (40, False)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_layers_by_interval(published, config):
    expected = read_spec(published(config)).text
    assert read_spec(published(config, {"text_config.layer_types": None})).text == expected


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_layout_written_by_transformers_is_read_alike(published, tmp_path_factory, config):
    folder, rewritten = published(config), tmp_path_factory.mktemp("rewritten")
    AutoConfig.from_pretrained(folder).save_pretrained(rewritten)
    (rewritten / "generation_config.json").write_text(json.dumps(FILES["generation_config.json"]))
    processor = {"image_processor": FILES["preprocessor_config.json"], "video_processor": PATCHES | {
        "size": FILES["video_preprocessor_config.json"]["size"],
    }}  # fmt: skip
    (rewritten / "processor_config.json").write_text(json.dumps(processor))
    ours, theirs = read_spec(folder), read_spec(rewritten)
    assert (theirs.text, theirs.pixels, theirs.video, theirs.tokens) == (
        ours.text, ours.pixels, ours.video, ours.tokens
    )  # fmt: skip
    assert read_vision_config(rewritten) == read_vision_config(folder)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_absent_tokens_have_the_values_of_transformers(published, config):
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    folder = published(config, dict.fromkeys(names))
    tokens = read_spec(folder).tokens
    assert (tokens.image, tokens.video, *read_vision_tokens(folder)) == (248056, 248057, 248053, 248054)
    (folder / "config.json").write_text(json.dumps({"model_type": config["model_type"]}))
    defaults = AutoConfig.from_pretrained(folder)
    assert [getattr(defaults, name) for name in names] == [248056, 248057, 248053, 248054]


BROKEN = [
    (DENSE, "model_type", "qwen3_vl", "Only 'qwen3_5' and 'qwen3_5_moe'"),
    (DENSE, "text_config.attention_bias", True, "Only False"),
    (DENSE, "text_config.attn_output_gate", False, "Only True"),
    (DENSE, "text_config.output_gate_type", "sigmoid", "Only 'swish'"),
    (DENSE, "text_config.layer_types", LAYERS, "must be 32 of 'full_attention' and 'linear_attention'"),
    (DENSE, "text_config.layer_types", ["mamba"] * 32, "got ['mamba'"),
    (DENSE, "text_config.layer_types", ["linear_attention"] * 32, "has no 'full_attention'"),
    (DENSE, "text_config.linear_num_key_heads", 12, "does not divide `linear_num_value_heads` 32"),
    (DENSE, "text_config.linear_conv_kernel_dim", None, "`text_config.linear_conv_kernel_dim` is missing"),
    (DENSE, "text_config.linear_conv_kernel_dim", 65, "`text_config.linear_conv_kernel_dim` is 65, above the maximum"),
    (DENSE, "text_config.rope_parameters.partial_rotary_factor", 0.5, "0.25 of `head_dim` 256"),
    (DENSE, "text_config.rope_parameters.rope_type", "yarn", "'yarn'"),
    (DENSE, "text_config.hidden_act", "gelu", "Only 'silu'"),
    (DENSE, "vision_config.deepstack_visual_indexes", [5], "without DeepStack"),
    (DENSE, "vision_config.out_hidden_size", 2048, "the text model's is 2560"),
    (DENSE, "vision_start_token_id", "a", "`vision_start_token_id` must be a positive integer"),
    (MOE, "text_config.mlp_only_layers", [1], "Only []"),
    (MOE, "text_config.num_experts_per_tok", 257, "above `num_experts` 256"),
    (MOE, "text_config.shared_expert_intermediate_size", None, "shared_expert_intermediate_size` is missing"),
]


@pytest.mark.parametrize(("config", "path", "value", "words"), BROKEN, ids=[f"{p}={v}"[:40] for _, p, v, _ in BROKEN])
def test_broken_field_is_named_with_its_file(published, config, path, value, words):
    folder = published(config, {path: value})
    family = load_plugins().families["qwen3_5"]
    with pytest.raises(CheckpointError) as error:
        family.prompt_layout(family.load_spec(folder))
    assert words in error.value.message
    assert str(folder / "config.json") in error.value.message


def test_mixers_of_a_type_are_equal(published):
    text = read_spec(published(DENSE)).text
    other = replace(text.layers[3], mixer=replace(text.attention, num_heads=8))
    with pytest.raises(ValueError, match="`layers` must have one AttentionSpec, got 2"):
        replace(text, layers=(*text.layers, other))
    with pytest.raises(ValueError, match="`layers` must have one AttentionSpec, got 0"):
        replace(text, layers=text.layers[:3])


@pytest.mark.supports("text", backend="dashinfer-cpu", family="qwen3_5", rejected=True)
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_dashinfer_reports_unsupported_text_model(published, config):
    support = DashInferFactory().check_support(read_spec(published(config)), EngineConfig())
    assert support.score == 0
    assert "no gated delta nets" in support.reason
