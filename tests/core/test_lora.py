"""LoRA folders: what is read, and how a folder that cannot be used is reported."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from dashinfer_vlm_core.config import EngineConfig, LoraModule
from dashinfer_vlm_core.errors import CheckpointError, ConfigError
from dashinfer_vlm_core.models.lora import read_lora
from dashinfer_vlm_core.models.lora_weights import read_factors
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from tests.lora_folders import ATTENTION, MLP, PREFIX, write_lora

QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def spec(tiny_checkpoint):
    return read_spec(tiny_checkpoint)


@pytest.fixture
def write(tmp_path, tiny_checkpoint):
    def write(targets=ATTENTION, name="adapter", **options):
        return write_lora(tmp_path / name, tiny_checkpoint, targets, **options)

    return write


def read(folder, spec):
    return read_lora("mine", str(folder), spec)


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, edit):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("published_names", [False, True])
def test_modules_of_text_model_and_vision_encoder(spec, write, published_names):
    """Folders name the modules as the version of transformers that the adapter was trained with."""
    lora = read(write((*ATTENTION, *MLP, "fc1"), published_names=published_names), spec)
    layers = {f"model.layers.{number}." for number in range(2)}
    assert set(lora.text) == {f"{layer}self_attn.{name}" for layer in layers for name in ATTENTION} | {
        f"{layer}mlp.{name}" for layer in layers for name in MLP
    }
    assert set(lora.vision) == {f"visual.blocks.{number}.mlp.fc1" for number in range(2)}
    assert lora.changes_vision
    assert (lora.name, lora.source) == ("mine", "adapter")
    assert lora.num_bytes == sum(tensor.nbytes for tensor in load_file(lora.file).values())


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"lora_alpha": 3}, 0.75),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 20}}, 5.0),
        ({"alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 20, "q_proj": 1}}, 5.0),
        ({"alpha_pattern": {"proj": 20, "_proj": 20, "v_proj": 20}}, 2.0),  # patterns match whole parts of a name
        ({"alpha_pattern": {"q_proj": 20}, "use_rslora": True}, 10.0),
    ],
)
def test_scale(spec, write, config, scale):
    lora = read(write(rank=4, **config), spec)
    assert lora.text[QUERY].scale == pytest.approx(scale)
    a, b = read_factors(lora, lora.text[QUERY])
    stored = load_file(lora.file)
    assert torch.equal(a, stored[lora.text[QUERY].a])
    assert torch.allclose(b, stored[lora.text[QUERY].b] * scale)


def test_rank_pattern(spec, write):
    lora = read(write(rank=4, ranks={"v_proj": 6}, use_rslora=True, lora_alpha=1), spec)
    value = lora.text["model.layers.1.self_attn.v_proj"]
    assert (value.rank, value.scale) == (6, pytest.approx(1 / math.sqrt(6)))
    assert lora.text[QUERY].rank == 4


def test_saved_modules(spec, write):
    lora = read(write(saved=("lm_head", "embed_tokens", "ln_q")), spec)
    assert lora.saved_text == {"lm_head.weight", "model.embed_tokens.weight"}
    assert set(lora.saved_vision) == {"visual.merger.ln_q.weight", "visual.merger.ln_q.bias"}
    assert lora.changes_vision
    assert not read(write(name="other", saved=("lm_head",)), spec).changes_vision


def test_digest_depends_on_content_only(spec, write):
    same = [read(write(name=name), spec) for name in ("one", "two")]
    others = [read(write(name="three", seed=2), spec), read(write(name="four", lora_alpha=1), spec)]
    assert same[0].digest == same[1].digest
    assert len({lora.digest for lora in (*same, *others)}) == 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "`use_dora` enables DoRA"),
        ({"peft_type": "LOHA"}, "`peft_type` is 'LOHA'"),
        ({"peft_type": "ADALORA"}, "`peft_type` is 'ADALORA'"),
        ({"peft_type": None}, "`peft_type` is None"),
        ({"bias": "lora_only"}, "`bias` is 'lora_only'"),
        ({"lora_bias": True}, "`lora_bias`"),
        ({"fan_in_fan_out": True}, "`fan_in_fan_out`"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "`target_parameters`"),
        ({"trainable_token_indices": [1]}, "`trainable_token_indices`"),
        ({"layer_replication": [[0, 2]]}, "`layer_replication`"),
        ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights` is 'pissa_niter_4'"),
        ({"r": 0}, "`r` must be a positive number, got 0"),
        ({"lora_alpha": "8"}, "`lora_alpha` must be a positive number, got '8'"),
        ({"alpha_pattern": {"q_proj": -1}}, "`alpha_pattern.q_proj` must be a positive number"),
        ({"alpha_pattern": {"(": 1}}, "`alpha_pattern` must be regular expressions"),
        ({"rank_pattern": [1]}, "`rank_pattern` must be an object"),
        ({"modules_to_save": "lm_head"}, "`modules_to_save` must be a list"),
        ({"modules_to_save": ["lm_head"]}, "no tensor of 'lm_head'"),
        ({"r": 8}, f"tensor '{PREFIX}model.language_model.layers.0.self_attn."),
    ],
)
def test_unsupported_config_is_named(spec, write, config, words):
    folder = write()
    edit_config(folder, **config)
    with pytest.raises(CheckpointError) as error:
        read(folder, spec)
    assert words in error.value.message
    assert str(folder) in error.value.message


NAME = f"{PREFIX}model.language_model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(NAME), "q_proj.lora_B.weight' has no counterpart lora_A"),
        (lambda tensors: tensors.update({NAME: torch.zeros(4, 63)}), f"{NAME!r} is [4, 63], but [4, 64] is required"),
        (lambda tensors: tensors.update({NAME: torch.zeros(4, 64).to(torch.int8)}), f"{NAME!r} has the data type I8"),
        (
            lambda tensors: tensors.update({f"{PREFIX}model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}),
            "'base_model.model.model.layers.7.mlp.up_proj.lora_A.weight' belongs to no module",
        ),
        (lambda tensors: tensors.update({"lora.weight": torch.zeros(1)}), "'lora.weight' belongs to no module"),
        (
            lambda tensors: tensors.update({f"{PREFIX}model.layers.0.input_layernorm.weight": torch.zeros(64)}),
            "input_layernorm.weight' belongs to no module",
        ),
        (lambda tensors: tensors.update({f"{PREFIX}model.norm.weight": torch.zeros(64)}), "model.norm.weight' belongs"),
        (
            lambda tensors: tensors.update({NAME.replace("lora_A", "lora_magnitude_vector"): torch.zeros(64)}),
            "lora_magnitude_vector.weight' belongs to no module",
        ),
        (
            lambda tensors: tensors.update({
                f"{PREFIX}visual.patch_embed.proj.lora_A.weight": torch.zeros(4, 3, 2, 14, 14),
                f"{PREFIX}visual.patch_embed.proj.lora_B.weight": torch.zeros(32, 4, 1, 1, 1),
            }),
            "patch_embed.proj.lora_A.weight' changes a convolution",
        ),
        (lambda tensors: tensors.clear(), "has no tensors"),
    ],
)  # fmt: skip
def test_wrong_tensor_is_named(spec, write, edit, words):
    folder = write()
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError) as error:
        read(folder, spec)
    assert words in error.value.message
    assert str(folder / "adapter_model.safetensors") in error.value.message


def test_nonfinite_tensor_is_named(spec, write):
    folder = write()
    edit_tensors(folder, lambda tensors: tensors[NAME].fill_(math.nan))
    lora = read(folder, spec)
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_A\.weight' contains infinity or NaN"):
        read_factors(lora, lora.text[QUERY])


def test_missing_and_truncated_files_are_named(spec, write, tmp_path):
    def message(folder):
        with pytest.raises(CheckpointError) as error:
            read(folder, spec)
        return error.value.message

    folder = write()
    tensors = folder / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-10])
    assert str(tensors) in message(folder)
    tensors.rename(folder / "adapter_model.bin")
    assert "pickled" in message(folder)
    (folder / "adapter_model.bin").unlink()
    assert "contains no adapter_model.safetensors" in message(folder)
    for text in ("{", "[" * 100_000):
        (folder / "adapter_config.json").write_text(text)
        assert "adapter_config.json is not valid JSON" in message(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json is missing" in message(folder)
    for missing in (tmp_path / "none", "~no-user/none"):
        assert f"There is no LoRA adapter '{missing}'" in message(missing)


@pytest.mark.parametrize(
    "value", ["a=/one,b=x/y", {"a": "/one", "b": "x/y"}, ["a=/one", "b=x/y"], (LoraModule("a", "/one"), "b=x/y")]
)
def test_option(value):
    config = EngineConfig(lora=value)
    assert config.lora == (LoraModule("a", "/one"), LoraModule("b", "x/y"))
    assert hash(config) == hash(EngineConfig(lora="a=/one,b=x/y"))
    assert [config.request_name(name) for name in ("a", "b", "c")] == ["a", "b", "demo"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora": "a"}, "lora.0: must be name=folder or name=owner/model (got 'a')."),
        ({"lora": "a=x,a=y"}, "'a' is used twice"),
        ({"lora": "demo=x"}, "the model's own name"),
    ],
)
def test_invalid_option(options, words):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**options)
    assert words in error.value.message
