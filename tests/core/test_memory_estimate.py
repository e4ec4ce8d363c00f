"""Estimates of memory: weights are counted from the configuration, and agree with the files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.models import SHAPES
from dashinfer_vlm_core.config import MIB, EngineConfig
from dashinfer_vlm_core.engine.managed_models import estimate_bytes
from dashinfer_vlm_core.kernels import devices
from dashinfer_vlm_core.kernels.onednn import OneDnnKernels
from dashinfer_vlm_core.kernels.progressive import BYTES
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.tuned import WeightRates
from dashinfer_vlm_core.kernels.types import StepCost, WeightBits
from dashinfer_vlm_core.models.memory import (
    INT4_ROUNDED,
    MIN_KV_MIB,
    ModelSize,
    count_layer_weights,
    count_mtp_weights,
    count_weights,
    estimate_memory,
    kv_budget_mib,
    loaded_bytes,
    state_bytes,
    step_bytes,
    weight_bytes,
)
from dashinfer_vlm_core.models.pooling import PoolingSpec
from dashinfer_vlm_core.models.published import MODELS, VisionEncoder
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.text_spec import AttentionSpec, LayerSpec, MlpSpec, RotarySpec
from dashinfer_vlm_torch.kv_cache import KVCache
from dashinfer_vlm_torch.state_cache import create_states
from tests.cases import cases
from tests.qwen3_5.tiny_mtp import write_mtp_checkpoint
from tests.qwen3_5.tiny_qwen3_5 import write_checkpoint as write_qwen3_5
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint as write_qwen3_vl
from tests.tiny import write_checkpoint, write_qwen2_5_vl

WRITERS = {"qwen2_vl": write_checkpoint, "qwen2_5_vl": write_qwen2_5_vl, "qwen3_vl": write_qwen3_vl,
           "qwen3_5": write_qwen3_5}  # fmt: skip


class CompressingKernels(TorchKernels):
    """Kernels with the memory of the C kernels."""

    supports_int8 = True
    supports_int4 = True
    weight_bits = WeightBits(layer=12, head=20, tied_head=20, argmax=8)
    step_cost = StepCost(slowdown=1, layer_seconds=0.12e-3, delta_net_seconds=0.15e-3)


@pytest.mark.parametrize("family", WRITERS)
def test_count_of_weights_is_that_of_files(tmp_path, family):
    folder = WRITERS[family](tmp_path / family)
    size = ModelSize.of(load_plugins().load_spec(folder))
    tensors = load_file(folder / "model.safetensors")
    matrices = sum(tensor.numel() for name, tensor in tensors.items() if tensor.ndim > 1 and "conv1d" not in name)
    assert count_weights(size) == matrices
    assert size.file_bytes == (folder / "model.safetensors").stat().st_size


def size_of(tiny_checkpoint, **changes):
    return replace(ModelSize.of(load_plugins().load_spec(tiny_checkpoint)), **changes)


@pytest.mark.parametrize(
    ("kernels", "quantization", "stored", "expected"),
    [
        (TorchKernels, "none", None, (2.0, 2.0)),
        (TorchKernels, "int8", None, (2.0, 2.0)),
        (TorchKernels, "none", "int4", (2.0, 2.0)),
        (CompressingKernels, "none", None, (1.5, 2.5)),
        (CompressingKernels, "int8", None, (1, 1)),
        (CompressingKernels, "none", "int4", (4.25 / 8, 2.5)),
        (CompressingKernels, "int8", "int4", (4.25 / 8, 1)),
        (CompressingKernels, "none", "none", (1.5, 2.5)),
    ],
)
def test_bytes_per_weight_follow_kernels_and_format(tiny_checkpoint, kernels, quantization, stored, expected):
    config = EngineConfig(quantization=quantization)
    size = size_of(tiny_checkpoint, stored_bits=stored)
    found = weight_bytes(size, config, kernels("cpu"), itemsize=2, int8_vision=False)
    assert (sum(found.layers), found.head) == expected


def test_int8_leaves_output_projections_of_pooling_models():
    size = replace(small(), pools=True)
    found = weight_bytes(
        size, EngineConfig(quantization="int8"), CompressingKernels("cpu"), itemsize=2, int8_vision=True
    )
    shape = SHAPES["small"]
    kept = (shape.heads * 64 + shape.inner) / count_layer_weights(size.text) * shape.hidden * shape.layers
    assert found.layers == pytest.approx((1.5 * kept, 1 - kept, 0))
    assert found.vision == pytest.approx(1.5 * 5 / 12 + 7 / 12)


def test_bytes_of_rounded_weights_are_those_of_the_kernels():
    assert INT4_ROUNDED == BYTES


def test_int4_leaves_8_bits_to_first_and_last_layer():
    size = MODELS["Qwen3-VL-4B"]
    found = weight_bytes(
        size, EngineConfig(quantization="int4"), CompressingKernels("cpu"), itemsize=2, int8_vision=True
    )
    assert sum(found.layers) == pytest.approx((2 + 34 * 4.5 / 8) / 36)
    assert (found.head, found.vision) == (1, 1)


def small():
    """Return the size of `small` of benchmarks/models.py."""
    shape = SHAPES["small"]
    layer = LayerSpec(
        mixer=AttentionSpec(
            num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=64, rotary=RotarySpec(theta=1e6, axes=())
        ),
        mlp=MlpSpec(intermediate_size=shape.inner),
    )
    text = replace(
        MODELS["Qwen2-VL-2B"].text, hidden_size=shape.hidden, layers=(layer,) * shape.layers, tie_word_embeddings=True
    )
    vision = VisionEncoder(width=shape.vision_width, inner=4 * shape.vision_width, depth=shape.vision_layers)
    return replace(MODELS["Qwen2-VL-2B"], text=text, vision_weights=vision.weights(shape.hidden))


@cases(
    ("size", "quantization", "stored", "measured"),
    [
        (small(), "none", None, (1301, 27.2)),
        (small(), "int8", None, (863, 27.2 * 0.73)),
        (small(), "int4", None, (717, 27.2 * 0.55)),
        (small(), "none", "int4", (950, 27.2 * 0.52)),
        (small(), "none", "int8", (1143, 27.2 * 0.71)),
        (MODELS["Qwen2-VL-2B"], "none", None, (4081, 81)),
        (MODELS["Qwen2-VL-2B"], "int8", None, (2688, 81 * 0.63)),
        (MODELS["Qwen2-VL-2B"], "int4", None, (2264, 81 * 0.47)),
        (MODELS["Qwen2-VL-2B"], "none", "int4", (2810, 81 * 0.42)),
        (MODELS["Qwen2-VL-2B"], "int8", "int4", (2102, 81 * 0.42)),
        (MODELS["Qwen2-VL-2B"], "none", "int8", (3408, 81 * 0.64)),
    ],
)
def test_estimates_are_close_to_measurements(size, quantization, stored, measured):
    """Memory of the weights in MB within 10 %, and time of a step in ms at 30 GB/s within 15 %."""
    config = EngineConfig(quantization=quantization)
    size = replace(size, stored_bits=stored)
    weights = weight_bytes(size, config, CompressingKernels("cpu"), itemsize=2, int8_vision=quantization != "none")
    found = estimate_memory(size, config, weights, kernels=CompressingKernels("cpu"), memory=None)
    assert found.weights / 1e6 == pytest.approx(measured[0], rel=0.1)
    assert found.tokens_per_second(30e9, {}) == pytest.approx(1000 / measured[1], rel=0.15)


@pytest.mark.parametrize(
    ("kernels", "flags", "factor"),
    [
        (TorchKernels, "avx2", 2.26),
        (OneDnnKernels, "avx512bw avx512_bf16", 1.75),
        (OneDnnKernels, "avx512bw", 1.75 * 34 / 20.4),
    ],
)
def test_steps_of_torch_take_longer_than_those_of_c_kernels(monkeypatch, tmp_path, kernels, flags, factor):
    """Within 35 % of the factors in docs/lab, which are for whole requests, and for one row."""
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    devices.CPUINFO.write_text(f"flags\t\t: {flags}\n")
    rates = []
    for each in (CompressingKernels("cpu"), kernels("cpu")):
        weights = weight_bytes(small(), EngineConfig(), each, itemsize=2, int8_vision=False)
        found = estimate_memory(small(), EngineConfig(), weights, kernels=each, memory=None)
        rates.append(found.tokens_per_second(30e9, {}))
    assert rates[0] / rates[1] == pytest.approx(factor, rel=0.35)


@pytest.mark.parametrize(("quantization", "megabytes"), [("none", 1811), ("int8", 1328), ("int4", 1223)])
def test_estimate_is_close_to_memory_of_engine(quantization, megabytes):
    """Resident memory of an engine with `small`, whose KV cache is still empty."""
    config = EngineConfig(quantization=quantization)
    weights = weight_bytes(small(), config, CompressingKernels("cpu"), itemsize=2, int8_vision=quantization != "none")
    found = estimate_memory(small(), config, weights, kernels=CompressingKernels("cpu"), memory=None)
    assert (found.weights + found.process) / 1e6 == pytest.approx(megabytes, rel=0.1)


@cases(
    ("uses_mtp", "change", "has_mtp", "has_head"),
    [
        (True, {}, True, True),
        (False, {}, False, True),
        (True, {"pooling": PoolingSpec(task="embed", instruction="")}, False, False),
    ],
)
def test_only_what_is_loaded_is_counted(tiny_checkpoint, uses_mtp, change, has_mtp, has_head):
    plain = load_plugins().load_spec(tiny_checkpoint)
    spec = replace(plain, text=replace(plain.text, mtp_layer=plain.text.layers[0]), **change)

    def estimated(size):
        weights = weight_bytes(size, EngineConfig(), CompressingKernels("cpu"), itemsize=2, int8_vision=False)
        return estimate_memory(size, EngineConfig(), weights, kernels=CompressingKernels("cpu"), memory=None).weights

    head = 2.5 * plain.text.vocab_size * plain.text.hidden_size
    mtp = 1.5 * count_mtp_weights(spec.text)
    more = estimated(ModelSize.of(spec, uses_mtp=uses_mtp)) - estimated(ModelSize.of(plain))
    assert more == pytest.approx(has_mtp * mtp - (not has_head) * head, abs=2)


def test_head_for_multi_token_prediction_is_counted_if_it_drafts(tmp_path):
    folder = write_mtp_checkpoint(tmp_path)
    size = ModelSize.of(load_plugins().load_spec(folder))
    auto, ngram = (
        estimate_bytes(EngineConfig(model=str(folder), device="cpu", kv_cache_mib=1, speculative_method=method))
        for method in ("auto", "ngram")
    )
    assert auto - ngram == pytest.approx(4 * count_mtp_weights(size.text), rel=0.01)  # the cache has whole tokens
    with_draft = replace(load_plugins().load_spec(folder), draft=load_plugins().load_spec(folder))
    assert ModelSize.of(with_draft).text.mtp_layer is None


def test_measured_rates_of_kernels_replace_the_bandwidth():
    kernels = CompressingKernels("cpu")
    weights = weight_bytes(small(), EngineConfig(), kernels, itemsize=2, int8_vision=False)
    found = estimate_memory(small(), EngineConfig(), weights, kernels=kernels, memory=None)
    rates = {"torch": WeightRates(wide=5e9, int8=10e9, int4=1)}
    step = found.step.wide / 5e9 + found.step.int8 / 10e9 + 24 * 0.12e-3
    assert found.tokens_per_second(20e9, rates) == pytest.approx(1 / step)
    assert found.tokens_per_second(20e9, {"other": rates["torch"]}) == found.tokens_per_second(20e9, {})


def test_mixture_reads_active_experts_only():
    size = MODELS["Qwen3-VL-30B-A3B"]
    weights = weight_bytes(size, EngineConfig(), TorchKernels("cpu"), itemsize=2, int8_vision=False)
    assert sum(step_bytes(size.text, weights)) < loaded_bytes(size, weights) / 8


@cases(
    ("options", "memory", "mib"),
    [({}, 64 << 30, 4096), ({}, 8 << 30, 2048), ({}, 1 << 30, MIN_KV_MIB), ({}, None, 4096),
     ({"kv_cache_mib": 8}, 64 << 30, 8), ({"kv_cache_mib": 9999}, 1 << 30, 9999)],
)  # fmt: skip
def test_default_of_kv_cache_follows_memory(options, memory, mib):
    assert kv_budget_mib(EngineConfig(**options), weights=4 << 30, memory=memory) == mib


@pytest.mark.parametrize("options", [{}, {"kv_cache_mib": 64}, {"kv_cache_dtype": "int8", "max_model_len": 1024}])
def test_cache_is_that_of_decoder(tmp_path, options):
    """With recurrent states, of which the decoder creates as many as fit in half of the memory."""
    spec = load_plugins().load_spec(write_qwen3_5(tmp_path))
    config = EngineConfig(device="cpu", max_batch_size=2, **options)
    weights = weight_bytes(ModelSize.of(spec), config, TorchKernels("cpu"), itemsize=4, int8_vision=False)
    found = estimate_memory(
        ModelSize.of(spec), config, weights, kernels=CompressingKernels("cpu"), memory=64 << 30
    ).kv_cache
    state = sum(tensor.nbytes for tensor in create_states(spec.text, 1, device="meta", dtype=torch.float32))
    assert state_bytes(spec.text, 4) == state
    cache = KVCache(spec.text, 1, device="meta", dtype=torch.int8 if "kv_cache_dtype" in options else torch.float32)
    per_token = sum(tensor.nbytes for tensor in (cache.pool, cache.scales) if tensor is not None)
    budget = options.get("kv_cache_mib", 4096) * MIB
    states = budget // 2 // state * state
    rows = options.get("max_model_len", spec.max_model_len) * 2
    assert found == states + min((budget - states) // per_token, rows) * per_token


def test_manager_estimates_with_kernels_of_this_machine(tiny_checkpoint):
    config = EngineConfig(model=str(tiny_checkpoint), device="cpu", vision_cache_mib=7, kv_cache_mib=1)
    size = ModelSize.of(load_plugins().load_spec(tiny_checkpoint))
    weights = 4 * count_weights(size)
    found = estimate_bytes(config)
    assert weights < found - 7 * MIB - 300 * MIB < weights + 2 * MIB
