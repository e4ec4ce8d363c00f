"""The kernels are chosen by priority, by option, or by what `tune` measured."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch

from dashinfer_vlm_cli.tune import fastest
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.engine.loading import _load_vision
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels import Activation, LoadedKernels, OneDnnKernelFactory, TorchKernelFactory, cpu
from dashinfer_vlm_core.kernels import measure as measure_module
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.kernels.measure import measure
from dashinfer_vlm_core.kernels.onednn import OneDnnKernels, unavailable_reason
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.tuned import TunedKernels, store_tuned
from dashinfer_vlm_core.kernels.workload import LinearGroup, LinearShape, text_workload, vision_workload
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_core.plugins import Registry
from dashinfer_vlm_demo import CHECKPOINT
from dashinfer_vlm_qwen2_5_vl import Qwen25VL
from dashinfer_vlm_qwen3_vl import Qwen3VL
from dashinfer_vlm_torch.decoder import TorchDecoder
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint
from tests.tiny import write_qwen2_5_vl

DEMO = Qwen2VL().load_spec(CHECKPOINT).text
BFLOAT16 = torch.bfloat16
VISION = vision_workload([LinearGroup((LinearShape(64, 64), LinearShape(96, 64, "quick_gelu")), 10)])


class NamedKernels(TorchKernels):
    def __init__(self, name, *, supports_int8):
        super().__init__("cpu")
        self.name, self.supports_int8 = name, supports_int8


class Factory:
    def __init__(self, name, priority, *, supports_int8=True, reason="", identity="1"):
        self.name, self.priority, self.code = name, priority, identity
        self.kernels = NamedKernels(name, supports_int8=supports_int8)
        self._reason = reason

    def applies(self, device, dtype):
        return device == "cpu" and dtype == BFLOAT16

    def unsupported_reason(self, text):
        return ""

    def load(self, device):
        return LoadedKernels(None, self._reason, "buy another one") if self._reason else LoadedKernels(self.kernels)

    def identity(self):
        return self.code


@pytest.fixture
def factories():
    return [Factory("low", 10), Factory("high", 50)]


@pytest.fixture
def select(tmp_path, factories):
    """Return the selector of a new process: `select(**options)`."""

    def select(**options):
        return KernelSelector(factories, EngineConfig(**{"cache_dir": tmp_path, **options}), vision=VISION)

    return select


@pytest.fixture
def tune(select, tmp_path):
    """Store a choice as `tune` does: `tune("low", text=DEMO)`; returns the file."""

    def tune(chosen, text=DEMO, **options):
        selector = select(**options)
        workload, sets = selector.tuning("cpu", BFLOAT16, text)
        conditions = selector.conditions(workload, BFLOAT16, sets)
        scores = {name: 1.0 if name == chosen else 2.0 for name in sets}
        tuned = TunedKernels(model="demo", conditions=conditions, chosen=chosen, scores=scores)
        return store_tuned(EngineConfig(cache_dir=tmp_path), tuned)

    return tune


def test_highest_priority_is_the_default_and_logged(select, caplog):
    caplog.set_level(logging.INFO)
    assert select().choose("cpu", BFLOAT16, DEMO).name == "high"
    assert "Kernels of the text model: high, the default for this processor." in caplog.text


@pytest.mark.parametrize("text", [DEMO, None])
def test_tuned_choice_is_used_and_logged(select, tune, caplog, text):
    assert tune("low", text).parent.stat().st_mode & 0o777 == 0o700
    caplog.set_level(logging.INFO)
    assert select().choose("cpu", BFLOAT16, text).name == "low"
    part = "text model" if text else "vision encoder"
    message = f"{part}: low, measured by `dashinfer-vlm tune` (low 1 s, high 2 s for a reference request)."
    assert f"Kernels of the {message}" in caplog.text
    assert select().choose("cpu", BFLOAT16, None if text else DEMO).name == "high"


def change_identity(factories, monkeypatch):
    factories[1].code = "2"
    return {}


def change_torch(factories, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    return {}


def change_threads(factories, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    return {}


def change_processor(factories, monkeypatch):
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: "model name : Abacus\nflags : beads\n")
    return {}


def change_quantization(factories, monkeypatch):
    return {"quantization": "int8"}


def add_set(factories, monkeypatch):
    factories.append(Factory("other", 30))
    return {}


@pytest.mark.parametrize(
    "change", [change_identity, change_torch, change_threads, change_processor, change_quantization, add_set]
)
def test_tuned_choice_of_other_conditions_is_not_used(select, tune, factories, monkeypatch, change):
    tune("low")
    assert select().choose("cpu", BFLOAT16, DEMO).name == "low"
    assert select().choose("cpu", BFLOAT16, replace(DEMO, intermediate_size=64)).name == "high"
    assert select(**change(factories, monkeypatch)).choose("cpu", BFLOAT16, DEMO).name == "high"


@pytest.mark.parametrize("content", ["", "[]", '{"model": "demo"}', "\x00", None])
def test_damaged_file_is_logged_and_ignored(select, tune, caplog, content):
    file = tune("low")
    if content is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_text(content)
    assert select().choose("cpu", BFLOAT16, DEMO).name == "high"
    assert f"{file} is ignored: " in caplog.text
    assert "Run `dashinfer-vlm tune` to measure again." in caplog.text


def test_choice_of_a_selector_does_not_change(select, tune):
    """A decoder that is restarted uses the same kernels."""
    selector = select()
    first = selector.choose("cpu", BFLOAT16, DEMO)
    tune("low")
    assert selector.choose("cpu", BFLOAT16, DEMO) is first


@pytest.mark.parametrize("name", ["high", "low"])
def test_option_overrides_tuned_choice(select, tune, name, caplog):
    tune("low")
    caplog.set_level(logging.INFO)
    assert select(cpu_kernels=name).choose("cpu", BFLOAT16, DEMO).name == name
    assert f"Kernels of the text model: {name}, as set by `cpu_kernels` {name}." in caplog.text


def test_unknown_set_is_rejected_with_the_known_ones(select):
    with pytest.raises(
        ConfigError, match=r"`cpu_kernels` 'fast' is not registered by any plugin. Choose auto, high, low"
    ):
        select(cpu_kernels="fast").choose("cpu", BFLOAT16)


def test_sets_without_int8_are_not_tuned_for_int8(select, factories):
    factories[0] = Factory("low", 10, supports_int8=False)
    assert list(select(quantization="int8").tuning("cpu", BFLOAT16, DEMO)[1]) == ["high"]
    assert list(select().tuning("cpu", BFLOAT16, DEMO)[1]) == ["high", "low"]
    factories[1] = Factory("high", 50, supports_int8=False)
    with pytest.raises(ConfigError, match=r"No kernel set that can run here supports `quantization` int8. Remove it"):
        select(quantization="int8").tuning("cpu", BFLOAT16, DEMO)
    assert select(quantization="int8").choose("cpu", BFLOAT16, DEMO).name == "high"  # the decoder reports it


@pytest.mark.parametrize(("supports_int8", "quantization"), [(True, "int8"), (False, "none")])
def test_stored_bits_are_tuned_if_a_set_keeps_them(tmp_path, supports_int8, quantization):
    sets = [Factory("low", 10), Factory("high", 50)]
    for factory in sets:
        factory.kernels.supports_int8 = supports_int8
    selector = KernelSelector(sets, EngineConfig(cache_dir=tmp_path), stored_bits="int8")
    workload, usable = selector.tuning("cpu", BFLOAT16, DEMO)
    assert (workload.quantization, list(usable)) == (quantization, ["high", "low"])


def test_what_cannot_be_tuned_is_rejected(factories, tmp_path):
    selector = KernelSelector(factories, EngineConfig(cache_dir=tmp_path))
    with pytest.raises(ConfigError, match="does not describe the linear layers of its vision encoder"):
        selector.tuning("cpu", BFLOAT16)
    with pytest.raises(ConfigError, match="only on a CPU, not on cuda"):
        selector.tuning("cuda", BFLOAT16, DEMO)
    assert selector.choose("cpu", BFLOAT16).name == "high"


def test_missing_kernels_are_an_error():
    with pytest.raises(ConfigError, match="No kernels are registered"):
        KernelSelector([], EngineConfig()).choose("cpu", BFLOAT16)


def test_cost_of_pytorchs_kernels_is_logged_once(tmp_path, caplog):
    factories = [Factory("broken", 50, reason="it broke"), TorchKernelFactory(), Factory("onednn", 1)]
    selector = KernelSelector(factories, EngineConfig(cache_dir=tmp_path))
    assert {selector.choose("cpu", BFLOAT16, text).name for text in (DEMO, None)} == {"onednn"}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == (
        "Using PyTorch's kernels, with which responses take 1.5 to 2 times as long as with the C kernels: it broke;"
        " buy another one."
    )


def test_tuned_choice_does_not_hide_missing_kernels(select, tune, factories, caplog):
    factories[:] = [Factory("broken", 50, reason="it broke"), Factory("onednn", 1), Factory("torch", 0)]
    tune("torch")
    assert select().choose("cpu", BFLOAT16, DEMO).name == "torch"
    assert "with the C kernels: it broke; buy another one." in caplog.text


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"a": 1.0, "b": 0.95}, "a"),  # not clearly faster
        ({"a": 1.0, "b": 0.5, "c": 0.49}, "b"),
        ({"a": 1.0, "b": 2.0, "c": 0.5}, "c"),
        ({"a": 1.0}, "a"),
    ],
)
def test_lower_priority_must_be_clearly_faster(seconds, expected):
    assert fastest(seconds) == expected


class CountingLayer:
    """A layer without a result, which counts its rows."""

    def __init__(self, rows):
        self._rows = rows

    def __call__(self, x):
        self._rows[len(x)] += 1

    def argmax(self, x):
        return None


class CountingKernels(TorchKernels):
    def __init__(self):
        super().__init__("cpu")
        self.layers, self.heads = Counter(), Counter()

    def linear(self, weight, bias=None, **options):
        return CountingLayer(self.layers)

    def head(self, weight, **options):
        return CountingLayer(self.heads)


def test_measurement_runs_every_pass_and_the_head_only_to_decode(monkeypatch):
    monkeypatch.setattr(measure_module, "SAMPLE_WEIGHTS", 1)  # one layer of each group
    monkeypatch.setattr(measure_module, "PASS_SECONDS", 0)
    kernels = CountingKernels()
    seconds = measure(kernels, text_workload(DEMO), BFLOAT16)
    assert list(seconds) == [1, 4, 16, 64, 256]
    assert all(value > 0 for value in seconds.values())
    assert kernels.layers == dict.fromkeys(seconds, 4 * measure_module.MIN_RUNS)
    assert kernels.heads == dict.fromkeys([1, 4, 16], measure_module.MIN_RUNS)


def test_reference_request_weights_passes():
    assert text_workload(DEMO).score({1: 1, 4: 0, 16: 0, 64: 0, 256: 0}) == 48
    assert VISION.score({256: 1.0, 512: 3.0}) == 7


needs_onednn = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "available")


class RecordingKernels(TorchKernels):
    """PyTorch's kernels, which record the shapes of the linear layers."""

    def __init__(self):
        super().__init__("cpu")
        self.shapes = []

    def linear(self, weight, bias=None, *, activation=Activation.NONE, **options):
        self.shapes.append(LinearShape(*weight.shape, activation.name.lower()))
        return super().linear(weight, bias, activation=activation, **options)


@pytest.mark.parametrize("family", [Qwen2VL(), Qwen25VL(), Qwen3VL()], ids=lambda family: type(family).__name__)
def test_workloads_are_the_models_linear_layers(family, tiny_checkpoint, tmp_path):
    recording, factory = RecordingKernels(), Factory("recording", 1)
    factory.kernels = recording
    config = EngineConfig(device="cpu", dtype="bfloat16", decoder="torch")
    write = {Qwen25VL: write_qwen2_5_vl, Qwen3VL: write_checkpoint}.get(type(family))
    spec = family.load_spec(write(tmp_path) if write else tiny_checkpoint)
    selector = KernelSelector([factory], config)
    TorchDecoder(spec, config, selector)._load()
    expected = [shape for group in text_workload(spec.text).groups for shape in group.shapes * group.repeats]
    assert sorted(recording.shapes) == sorted(expected)
    recording.shapes.clear()
    family.load_vision_encoder(spec, config, selector)
    (blocks,) = family.vision_linears(spec)
    assert Counter(blocks.shapes * blocks.repeats) <= Counter(recording.shapes)
    assert len(recording.shapes) <= len(blocks.shapes) * blocks.repeats + 7  # patch embedding, merger, levels


def test_workload_of_experts_is_that_of_one_token(tmp_path):
    text = Qwen3VL().load_spec(write_checkpoint(tmp_path, moe=True)).text
    layers, _ = text_workload(text).groups
    assert text.experts
    assert len(layers.shapes) == 2 + 2 * text.experts.experts_per_token
    assert layers.shapes[3] == LinearShape(text.hidden_size, text.experts.intermediate_size)


def test_kernel_set_is_part_of_embedding_cache_keys(tiny_checkpoint, factories):
    keys = []
    for name in ("high", "low"):
        config = EngineConfig(cpu_kernels=name, device="cpu", dtype="bfloat16")
        family, selector = Qwen2VL(), KernelSelector(factories, config)
        service = _load_vision(family, family.load_spec(tiny_checkpoint), config, selector, Registry())
        keys.append(service._model_key)
        asyncio.run(service.close())
    assert keys == [b"high", b"low"]


@needs_onednn
def test_onednn_is_only_for_bfloat16_on_a_cpu():
    factory = OneDnnKernelFactory()
    assert isinstance(factory.load("cpu").kernels, OneDnnKernels)
    assert factory.applies("cpu:0", BFLOAT16)
    assert not factory.applies("cpu", torch.float32)
    assert not factory.applies("cuda", BFLOAT16)


def test_missing_onednn_is_reported(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    selector = KernelSelector([OneDnnKernelFactory(), TorchKernelFactory()], EngineConfig(cpu_kernels="onednn"))
    with pytest.raises(
        ConfigError, match=r"`cpu_kernels` 'onednn' cannot be used: this build of torch has no oneDNN. O"
    ):
        selector.choose("cpu", BFLOAT16)


def test_set_for_another_dtype_is_logged(caplog):
    caplog.set_level(logging.INFO)
    selector = KernelSelector([OneDnnKernelFactory(), TorchKernelFactory()], EngineConfig(cpu_kernels="onednn"))
    assert selector.choose("cpu", torch.float32).name == "torch"
    assert "torch, since `cpu_kernels` onednn has no kernels for cpu in torch.float32." in caplog.text
