"""Quantized checkpoints of other projects: loaded as published, they compute what their dequantized weights compute."""

from __future__ import annotations

import functools
import json
import logging
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dashinfer_vlm_core import Engine, EngineConfig, hookimpl
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.kernels.choice import TORCH
from dashinfer_vlm_core.kernels.linears import create_head, create_linear
from dashinfer_vlm_core.kernels.quantization import INT8, QuantizedWeight
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.models.formats.detection import find_reader, weight_memory
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_cpu.native_linear import NativeLinear
from dashinfer_vlm_dashinfer import DashInferFactory
from tests.conversations import CONVERSATIONS, as_openai
from tests.kernels import load_fastest, needs_native
from tests.quantized_checkpoints import (
    LAYOUTS,
    TEXT_LAYERS,
    VISION_BLOCKS,
    pack_fp8,
    pack_gptq,
    write_config,
    write_quantized,
)
from tests.qwen3_vl.oracle import Oracle
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint as write_qwen3_vl
from tests.recorder import Recorder
from tests.tiny import write_checkpoint, write_qwen2_5_vl
from tests.transformers_engine import TransformersEngine

TOKENS = 32
CONVERSATION = CONVERSATIONS["one picture"]


@pytest.fixture(scope="module")
def written(tiny_checkpoint, tmp_path_factory):
    """Quantize the tiny Qwen2-VL in the layout of a name, once."""
    return functools.cache(lambda name: write_quantized(tiny_checkpoint, tmp_path_factory.mktemp(name), LAYOUTS[name]))


@contextmanager
def running(folder, **options):
    """Start an engine; yields a function that returns the token ids and log probabilities of a greedy completion."""
    recorder = Recorder()
    options = {"dtype": "float32", "media_workers": 0, "kv_cache_mib": 64} | options
    config = EngineConfig(model=str(folder), device="cpu", decoder="recorded", **options)

    def complete(conversation=CONVERSATION):
        body = {"messages": as_openai(conversation), "temperature": 0, "max_tokens": TOKENS, "logprobs": True}
        done = engine.chat(body)
        return recorder.tokens[done.id], torch.tensor(recorder.logprobs[done.id])

    with Engine(config, registry=recorder.registry()) as engine:
        yield complete


@torch.no_grad()
def reference(folder):
    """Return transformers' greedy completion: token ids and log probabilities."""
    engine = TransformersEngine(folder)
    inputs = engine.inputs([CONVERSATION])
    out = engine.model.generate(
        **inputs, do_sample=False, max_new_tokens=TOKENS, return_dict_in_generate=True, output_logits=True
    )
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return ids, torch.cat(out.logits).float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.supports("quantized-checkpoints", backend="torch-cpu")
def test_tokens_and_logprobs_equal_transformers(written, name):
    ids, logprobs = reference(written(name).twin)
    with running(written(name).quantized) as complete:
        found, found_logprobs = complete()
    assert found == ids
    torch.testing.assert_close(found_logprobs, logprobs, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_quantization_changes_the_logprobs(written, tiny_checkpoint):
    """Otherwise the comparisons would prove little."""
    _, original = reference(tiny_checkpoint)
    for name in LAYOUTS:
        _, logprobs = reference(written(name).twin)
        assert abs(float(logprobs[0] - original[0])) > 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "layout", "modules"),
    [
        pytest.param(
            write_qwen2_5_vl, "int8", f"{TEXT_LAYERS}|{VISION_BLOCKS}", id="qwen2_5_vl-and-vision",
            marks=pytest.mark.supports("quantized-checkpoints", backend="torch-cpu", family="qwen2_5_vl"),
        ),
        pytest.param(
            write_qwen3_vl, "awq", TEXT_LAYERS, id="qwen3_vl",
            marks=pytest.mark.supports("quantized-checkpoints", backend="torch-cpu", family="qwen3_vl"),
        ),
        pytest.param(functools.partial(write_qwen3_vl, moe=True), "int4-asymmetric", TEXT_LAYERS, id="qwen3_vl_moe"),
        pytest.param(write_checkpoint, "gptq", f"{TEXT_LAYERS}|lm_head$", id="lm_head"),
    ],
)  # fmt: skip
def test_output_equals_that_of_the_dequantized_checkpoint(tmp_path, write, layout, modules):
    """Families share the readers; that ours equals transformers' output is tested for each family elsewhere."""
    folders = write_quantized(write(tmp_path / "source"), tmp_path, LAYOUTS[layout], modules=modules)
    with running(folders.quantized) as quantized, running(folders.twin) as twin:
        (found, found_logprobs), (expected, logprobs) = quantized(), twin()
    assert found == expected
    assert torch.equal(found_logprobs, logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["transposed", "fused"])
def test_fp8_experts_in_one_tensor_equal_transformers(tmp_path, experts):
    """Qwen publishes Qwen3-VL's experts transposed; transformers 5 saves them as it computes with them."""
    source = write_qwen3_vl(tmp_path / "source", moe=True)
    folders = write_quantized(source, tmp_path, LAYOUTS["fp8-block"], experts=experts)
    ids, logits = Oracle(folders.twin).generate(CONVERSATION, TOKENS)
    with running(folders.quantized) as complete:
        found, logprobs = complete()
    assert found == ids
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-4)
    spec = load_plugins().load_spec(folders.quantized)
    weights = Weights(folders.quantized, spec.tensor_renames, spec.quantization)
    memory = weight_memory(weights.headers(), weights.reader, supported=(), itemsize=4)
    # Four layers with 4 matrices in the attention; one has an MLP of three matrices, three have two tensors of experts.
    assert memory.widened == 4 * 4 + 3 + 3 * 2


@pytest.mark.slow
def test_balanced_keys_of_quantized_weights(written):
    """Channels of keys are scaled by powers of two for an 8-bit KV cache: an exact change of the scales."""
    folders = written("gptq-act-order")
    with running(folders.quantized, kv_cache_dtype="int8") as quantized:
        found = quantized()
    with running(folders.twin, kv_cache_dtype="int8") as twin:
        expected = twin()
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("name", ["awq", "int8", "fp8-block"])
def test_first_logprob_with_c_kernels_is_close(written, name):
    with running(written(name).twin) as twin, running(written(name).quantized, dtype="bfloat16") as quantized:
        (expected, logprobs), (found, found_logprobs) = twin(), quantized()
    assert found[0] == expected[0]
    assert float(found_logprobs[0]) == pytest.approx(float(logprobs[0]), abs=0.2)


@needs_native
def test_float16_checkpoint_keeps_its_bits_on_a_cpu(written, tmp_path, caplog):
    """AWQ checkpoints are published in float16, which the kernels for 4 bits do not support."""
    folders = write_quantized(written("awq").twin, tmp_path, LAYOUTS["awq"])
    write_config(folders.quantized, dtype="float16")
    with caplog.at_level(logging.INFO), running(folders.quantized, dtype="auto") as complete:
        complete()
    assert "Checkpoint in the format awq: 14 matrices keep their stored bits" in caplog.text


def test_widened_weights_are_logged_with_their_memory(written, caplog):
    with running(written("fp8-block").quantized):
        pass
    (record,) = [record for record in caplog.records if "in the format fp8" in record.getMessage()]
    assert record.levelno == logging.WARNING
    # Two layers of 30,720 weights.
    assert (
        "14 matrices are widened to float32, 0.2 MB instead of 0.1 MB, since the kernels 'torch'" in record.getMessage()
    )


# One module, without a model ------------------------------------------------------------------------------------------

MODULE = "model.layers.0.mlp.down_proj"


def random_matrix(outputs, inputs, seed=0):
    return np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)


def save_modules(folder, layout, modules):
    """Write a file with packed modules by name and `config.json`; returns a `Weights`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.{part}": tensor for name, parts in modules.items() for part, tensor in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_weights(folder, layout)


def open_weights(folder, layout):
    (folder / "config.json").write_text(json.dumps({"quantization_config": layout.config}))
    return Weights(folder, (), find_reader(folder, load_plugins().checkpoint_formats))


def read(weights, shape, modules=(MODULE,), dtype=torch.float32):
    outputs = [shape[0]] * len(modules)
    return weights.matrix(modules, outputs, shape[1], device="cpu", dtype=dtype)


def dequantized(weight):
    return weight.dequantize(torch.float32) if isinstance(weight, QuantizedWeight) else weight


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 96), (24, 200), (136, 320)])
def test_weights_equal_those_that_were_packed(tmp_path, name, shape):
    """With incomplete groups and blocks, and with codes, scales and zero points at the ends of their ranges."""
    packed = LAYOUTS[name].pack(random_matrix(*shape))
    weights = save_modules(tmp_path, LAYOUTS[name], {MODULE: packed.tensors})
    assert torch.equal(dequantized(read(weights, shape)), packed.weight)


def bits_of(layer):
    assert type(layer) is NativeLinear
    return 4 if layer.matrix.group else 8 if layer.matrix.scales else 16


@needs_native
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("awq", 4),
        ("gptq-act-order", 4),
        ("int4-asymmetric", 4),
        ("int8", 8),
        ("int8-packed", 8),
        ("gptq-int8-one-group", 8),
    ],
)
def test_c_kernels_keep_weights_in_their_bits(tmp_path, name, bits):
    shape = (256, 512)
    packed = LAYOUTS[name].pack(random_matrix(*shape))
    weights = save_modules(tmp_path, LAYOUTS[name], {MODULE: packed.tensors})
    layer = create_linear(load_fastest(), read(weights, shape), dtype=torch.bfloat16)
    assert bits_of(layer) == bits
    stored = sum(tensor.nbytes for part, tensor in packed.tensors.items() if part != "g_idx")
    tensors = filter(torch.is_tensor, layer.packed._replace(order=None))
    assert sum(tensor.nbytes for tensor in tensors) < 1.06 * stored
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.float() @ packed.weight.T
    assert float((layer(x).float() - expected).norm() / expected.norm()) < 0.02


@needs_native
def test_widened_weights_follow_the_option_quantization(tmp_path):
    """8-bit weights in groups have no kernel; with `quantization` int8, they are rounded to one scale per output."""
    layout, shape = LAYOUTS["gptq-int8"], (64, 128)
    weights = save_modules(tmp_path, layout, {MODULE: layout.pack(random_matrix(*shape)).tensors})
    plain, rounded = (
        create_linear(load_fastest(), read(weights, shape), dtype=torch.bfloat16, quantization=quantization)
        for quantization in (None, INT8)
    )
    assert (bits_of(plain), bits_of(rounded)) == (16, 8)


@pytest.mark.parametrize(
    "load", [functools.partial(TorchKernels, "cpu"), pytest.param(load_fastest, marks=needs_native)]
)
def test_head_of_quantized_weights(tmp_path, load):
    kernels, layout, shape = load(), LAYOUTS["gptq"], (96, 64)
    packed = layout.pack(random_matrix(*shape))
    weights = save_modules(tmp_path, layout, {"lm_head": packed.tensors})
    dtype = torch.float32 if kernels.name == TORCH else torch.bfloat16
    head = create_head(kernels, read(weights, shape, ["lm_head"]), dtype=dtype)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.float() @ packed.weight.T
    assert head(x).dtype == torch.float32
    assert float((head(x) - expected).norm() / expected.norm()) < 0.02


# Modules that are computed together -----------------------------------------------------------------------------------


def gptq_parts(*options):
    """Return a GPTQ matrix of 32 outputs and 128 inputs per argument, with these options."""
    defaults = {"bits": 4, "group": 32, "symmetric": True, "version": 1}
    return [pack_gptq(random_matrix(32, 128, seed), **defaults | option) for seed, option in enumerate(options)]


@pytest.mark.parametrize("ordered", [False, True])
def test_matrices_with_one_order_of_inputs_are_concatenated(tmp_path, ordered):
    layout = LAYOUTS["gptq-act-order" if ordered else "gptq"]
    parts = gptq_parts({"ordered": ordered}, {"ordered": ordered})
    names = ["layer.q_proj", "layer.k_proj"]
    weights = save_modules(tmp_path, layout, {name: part.tensors for name, part in zip(names, parts, strict=True)})
    found = read(weights, (32, 128), names)
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(dequantized(found), torch.cat([part.weight for part in parts]))
    assert weights.widened == []


def test_matrices_with_different_orders_are_widened(tmp_path):
    parts = gptq_parts({"ordered": True}, {"ordered": True, "seed": 1})
    names = ["layer.q_proj", "layer.k_proj"]
    weights = save_modules(
        tmp_path, LAYOUTS["gptq-act-order"], {name: part.tensors for name, part in zip(names, parts, strict=True)}
    )
    found = read(weights, (32, 128), names)
    assert torch.equal(found, torch.cat([part.weight for part in parts]))
    assert weights.widened == names


def test_unquantized_part_widens_the_others(tmp_path):
    """Configurations list exceptions in several notations; the tensors decide."""
    (part,) = gptq_parts({})
    plain = torch.from_numpy(random_matrix(32, 128, seed=5))
    weights = save_modules(tmp_path, LAYOUTS["gptq"], {"layer.q_proj": part.tensors, "layer.k_proj": {"weight": plain}})
    found = read(weights, (32, 128), ["layer.q_proj", "layer.k_proj"])
    assert torch.equal(found, torch.cat([part.weight, plain]))
    assert weights.widened == ["layer.q_proj"]


def test_groups_of_different_sizes_are_split(tmp_path):
    scheme = {"num_bits": 4, "type": "int", "strategy": "group"}
    base = LAYOUTS["int4"].config
    groups = {f"group_{size}": {"targets": ["Linear"], "weights": scheme | {"group_size": size}} for size in (32, 64)}
    layout = replace(LAYOUTS["int4"], config=base | {"config_groups": groups})
    parts = [layout.pack(random_matrix(32, 128, seed), group=size) for seed, size in enumerate((64, 32))]
    names = ["layer.gate_proj", "layer.up_proj"]
    weights = save_modules(tmp_path, layout, {name: part.tensors for name, part in zip(names, parts, strict=True)})
    found = read(weights, (32, 128), names)
    assert found.group == 32
    assert torch.equal(dequantized(found), torch.cat([part.weight for part in parts]))


# Damaged files and unsupported configurations -------------------------------------------------------------------------


def without(name):
    return lambda tensors: tensors.pop(name)


def changed(name, change):
    def apply(tensors):
        tensors[name] = change(tensors[name])

    return apply


DAMAGE = [
    ("gptq", without("scales"), f"module '{MODULE}' has no tensor 'scales'"),
    ("gptq", without("qzeros"), "has no tensor 'qzeros'"),
    ("awq", without("qzeros"), "has no tensor 'qzeros'"),
    ("gptq", changed("scales", lambda x: x.repeat(2, 1)), "'{}.scales' is [6, 64], but config.json requires [3, 64]"),
    ("awq", changed("scales", lambda x: x[:1]), "'{}.scales' is [1, 64], but config.json requires [3, 64]"),
    ("gptq", changed("qweight", lambda x: x[:-1]), "'{}.qweight' is [11, 64], but config.json requires [12, 64]"),
    ("gptq", changed("qzeros", lambda x: x.long()), "'{}.qzeros' is int64, expected int32"),
    ("gptq-act-order", without("g_idx"), "has no tensor 'g_idx'"),
    ("gptq-act-order", changed("g_idx", lambda x: x + 1), "'{}.g_idx' has values outside of 0 to 2"),
    ("gptq-act-order", changed("g_idx", lambda x: x - 1), "'{}.g_idx' has values outside of 0 to 2"),
    ("gptq-act-order", changed("g_idx", lambda x: 0 * x), "'{}.g_idx' has groups that do not consist of 32 inputs"),
    ("int4", without("weight_scale"), "has no tensor 'weight_scale'"),
    ("int4", changed("weight_scale", lambda x: x[:, :2]), "'{}.weight_scale' is [64, 2], which no group of"),
    ("int4", changed("weight_shape", lambda x: x.flip(0)), "'{}.weight_shape' is [96, 64]"),
    ("int4-asymmetric", without("weight_zero_point"), "has no tensor 'weight_zero_point'"),
    ("int8", changed("weight", lambda x: x.float()), "'{}.weight' is float32, expected int8"),
    ("fp8-output", without("weight_scale"), "'{}.weight' is F8_E4M3, but its module has no scales"),
    ("fp8-block", without("weight_scale_inv"), "'{}.weight' is F8_E4M3, but its module has no scales"),
    ("fp8-block", changed("weight_scale_inv", lambda x: x[:1]), "'{}.weight_scale_inv' is [1, 3]"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_damaged_module_is_named_with_its_file(tmp_path, name, damage, message):
    tensors = dict(LAYOUTS[name].pack(random_matrix(64, 96)).tensors)
    damage(tensors)
    weights = save_modules(tmp_path, LAYOUTS[name], {MODULE: tensors})
    with pytest.raises(CheckpointError) as error:
        read(weights, (64, 96))
    assert message.format(MODULE) in error.value.message
    assert error.value.message.startswith(str(tmp_path / "model.safetensors"))


def test_zero_point_outside_of_the_range_is_rejected(tmp_path):
    """The first versions of compressed-tensors did not pack zero points."""
    layout = LAYOUTS["int4-asymmetric"]
    tensors = dict(layout.pack(random_matrix(64, 96)).tensors)
    tensors["weight_zero_point"] = torch.full((64, 3), 100, dtype=torch.int8)
    weights = save_modules(tmp_path, layout, {MODULE: tensors})
    with pytest.raises(CheckpointError, match=r"weight_packed' is inconsistent: `zeros` must be at most 16"):
        read(weights, (64, 96))


def test_truncated_file_is_named(written, tmp_path):
    whole = (written("awq").quantized / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        open_weights(tmp_path, LAYOUTS["awq"])


def test_quantized_tensors_without_configuration_are_rejected(written, tmp_path):
    """A plain read of FP8 would silently drop the scales."""
    folder = written("fp8-block").quantized
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"is F8_E4M3, but its module has no scales"):
        Weights(folder).tensor(name, tensors[name].shape, device="cpu", dtype=torch.float32)


GPTQ = LAYOUTS["gptq"].config
INT4 = LAYOUTS["int4"].config
INT4_GROUP = INT4["config_groups"]["group_0"]
UNSUPPORTED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "`quantization_config.quant_method` is 'bitsandbytes'"),
    ({"bits": 4}, "`quantization_config.quant_method` is missing"),
    (GPTQ | {"bits": 3}, "`quantization_config.bits` is 3; supported: 4, 8"),
    (GPTQ | {"group_size": 100}, "`quantization_config.group_size` is 100, which is neither -1 nor a multiple of 32"),
    (GPTQ | {"group_size": 16, "desc_act": True}, "`quantization_config.group_size` is 16"),
    (GPTQ | {"is_marlin_format": True}, "only Marlin's kernels"),
    (GPTQ | {"checkpoint_format": "marlin"}, "`quantization_config.checkpoint_format` is 'marlin'"),
    (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "changes the quantization of '+:.*down_proj'"),
    (LAYOUTS["awq"].config | {"bits": 8}, "`quantization_config.bits` is 8; supported: 4"),
    (LAYOUTS["awq"].config | {"version": "gemv"}, "`quantization_config.version` is 'gemv'"),
    (INT4 | {"format": "marlin-24"}, "`quantization_config.format` is 'marlin-24'"),
    (INT4 | {"format": "nvfp4-pack-quantized"}, "is 'nvfp4-pack-quantized'"),
    (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "`quantization_config.sparsity_config`"),
    (INT4 | {"transform_config": {"config_groups": {"R1": {}}}}, "`quantization_config.transform_config`"),
    (
        INT4 | {"config_groups": {"group_0": INT4_GROUP | {"weights": INT4_GROUP["weights"] | {"num_bits": 3}}}},
        "`quantization_config.config_groups.group_0.weights.num_bits` is 3",
    ),
    (LAYOUTS["fp8-block"].config | {"fmt": "e5m2"}, "`quantization_config.fmt` is 'e5m2'"),
    (LAYOUTS["fp8-block"].config | {"weight_block_size": [128]}, "must be two positive integers, got [128]"),
]


@pytest.mark.parametrize(("config", "message"), UNSUPPORTED)
def test_unsupported_configuration_is_named_with_next_step(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError) as error:
        find_reader(tmp_path, load_plugins().checkpoint_formats)
    assert message in error.value.message
    assert "Use" in error.value.message or "use" in error.value.message


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": None},
        {"text_config": {"hidden_size": 64}},
    ],
)
def test_unquantized_checkpoint_has_no_reader(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_reader(tmp_path, load_plugins().checkpoint_formats) is None


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"quantization_config": INT4}},
        {"compression_config": {key: value for key, value in INT4.items() if key != "quant_method"}},
        {"quantization_config": INT4 | {"kv_cache_scheme": {"num_bits": 8}, "sparsity_config": {"format": "dense"}}},
    ],
)
def test_other_notations_of_the_configuration(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_reader(tmp_path, load_plugins().checkpoint_formats).name == "compressed-tensors"


# All experts of a layer in one tensor ---------------------------------------------------------------------------------

EXPERTS = "model.layers.0.mlp.experts.down_proj"


def fp8_experts(block=(48, 40)):
    """Return three experts of 56 outputs and 100 inputs in FP8, and their weights."""
    packed = [
        pack_fp8(random_matrix(56, 100, seed), scales="weight_scale_inv", block=block or (0, 0)) for seed in range(3)
    ]
    tensors = {name: torch.stack([expert.tensors[name] for expert in packed]) for name in packed[0].tensors}
    rows = block[0] if block else 56
    tensors["weight_scale_inv"] = tensors["weight_scale_inv"].reshape(3, -(-56 // rows), -1)
    return tensors, torch.stack([expert.weight for expert in packed])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [(48, 40), None])
def test_experts_in_one_tensor_equal_those_that_were_packed(tmp_path, block, transposed):
    tensors, expected = fp8_experts(block)
    if transposed:
        tensors = {name: tensor.transpose(1, 2) for name, tensor in tensors.items()}
    layout = LAYOUTS["fp8-block"]
    layout = replace(layout, config=layout.config | {"weight_block_size": block and list(block)})
    into = torch.empty(3, 56, 100)
    save_modules(tmp_path, layout, {EXPERTS: tensors}).read_experts(EXPERTS, into, transposed=transposed)
    assert torch.equal(into, expected)


@pytest.mark.parametrize(
    ("layout", "damage", "message"),
    [
        ("fp8-block", changed("weight_scale_inv", lambda x: x[:2]), "'{}.weight_scale_inv' is [2, 2, 3], but"),
        ("fp8-block", changed("weight", lambda x: x.float()), "'{}.weight' is float32, expected float8_e4m3fn"),
        ("fp8-block", without("weight_scale_inv"), "'{}.weight' is F8_E4M3, but its module has no scales"),
        ("gptq", changed("qweight", lambda x: x), "'{}.qweight' is of several experts, which the format gptq"),
    ],
)
def test_damaged_experts_are_named_with_their_file(tmp_path, layout, damage, message):
    tensors = fp8_experts()[0] | {"qweight": torch.zeros(3, 4, dtype=torch.int32)}
    damage(tensors)
    weights = save_modules(tmp_path, LAYOUTS[layout], {EXPERTS: tensors})
    with pytest.raises(CheckpointError) as error:
        weights.read_experts(EXPERTS, torch.empty(3, 56, 100), transposed=False)
    assert message.format(EXPERTS) in error.value.message
    assert error.value.message.startswith(str(tmp_path / "model.safetensors"))


# Memory, plugins, decoders --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_is_described_before_loading(written, name):
    folder = written(name).quantized
    spec = load_plugins().load_spec(folder)
    weights = Weights(folder, spec.tensor_renames, spec.quantization)
    tensors = load_file(folder / "model.safetensors")
    modules = [name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in weights.reader.markers]
    stored = sum(
        tensor.nbytes
        for name, tensor in tensors.items()
        if name.rpartition(".")[0] in modules and not name.endswith(".bias")
    )
    memory = weight_memory(weights.headers(), weights.reader, supported={"int4", "int8"}, itemsize=2)
    bits = weights.reader.stored_bits
    assert memory.kept + memory.widened == 14
    assert (memory.kept_bytes, memory.widened_bytes) == ((0, stored) if bits == "none" else (stored, 0))
    without_kernels = weight_memory(weights.headers(), weights.reader, supported=(), itemsize=2)
    twin = load_file(written(name).twin / "model.safetensors")
    assert without_kernels.memory_bytes == sum(2 * twin[f"{module}.weight"].numel() for module in set(modules))


def test_plugin_can_register_a_format(tmp_path):
    """A reader of weights that are stored as powers of two."""

    class Powers:
        name = "powers"
        markers = ("exponents",)
        stored_bits = "none"

        def create_reader(self, config):
            return self

        def read(self, tensors, shape, dtype):
            return torch.ldexp(torch.ones(shape), tensors.load("exponents", ("int8",), shape)).to(dtype)

    @hookimpl
    def register_checkpoint_formats(register):
        register(Powers())

    registry = load_plugins()
    plugin = SimpleNamespace(register_checkpoint_formats=register_checkpoint_formats)
    assert registry.add_plugin(plugin, name="powers") == ("checkpoint format powers",)
    exponents = torch.randint(-8, 8, (4, 6), dtype=torch.int8)
    save_file({f"{MODULE}.exponents": exponents}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "powers"}}))
    weights = Weights(tmp_path, (), find_reader(tmp_path, registry.checkpoint_formats))
    assert torch.equal(read(weights, (4, 6)), torch.ldexp(torch.ones(4, 6), exponents))


def test_dashinfer_rejects_quantized_checkpoints(written):
    spec = load_plugins().load_spec(written("awq").quantized)
    support = DashInferFactory().check_support(spec, EngineConfig(device="cpu"))
    assert (support.score, support.reason) == (
        0,
        "Its converter takes unquantized weights, not awq: use the decoder torch.",
    )
