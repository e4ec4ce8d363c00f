"""The fastest kernel set is chosen by measurement, and the choice is stored for equal conditions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import math
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.engine.engine import _load_vision
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels import LoadedKernels, OneDnnKernelFactory, TorchKernelFactory, choice, cpu, workload
from dashinfer_vlm_core.kernels import measure as measure_module
from dashinfer_vlm_core.kernels.choice import KernelSelector, factory_identity, fastest
from dashinfer_vlm_core.kernels.choice_cache import FOLDER
from dashinfer_vlm_core.kernels.measure import measure
from dashinfer_vlm_core.kernels.onednn import OneDnnKernels, unavailable_reason
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.workload import (
    TEXT_MODEL,
    VISION_ENCODER,
    LinearGroup,
    LinearShape,
    text_workload,
    vision_workload,
)
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_core.plugins import Registry
from dashinfer_vlm_cpu import NativeKernelFactory
from dashinfer_vlm_demo import CHECKPOINT
from dashinfer_vlm_qwen2_5_vl import Qwen25VL
from dashinfer_vlm_qwen3_vl import Qwen3VL
from dashinfer_vlm_torch.decoder import TorchDecoder
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint
from tests.tiny import write_qwen2_5_vl
from tests.waiting import HANG

DEMO = Qwen2VL().load_spec(CHECKPOINT).text
LARGE = replace(DEMO, num_hidden_layers=10_000)
"""A text model that is large enough to be measured, with small layers."""

BFLOAT16 = torch.bfloat16
VISION = vision_workload([LinearGroup((LinearShape(64, 64), LinearShape(96, 64, "quick_gelu")), 10_000)])


class RepeatingLayer:
    """A linear layer or LM head that computes its result many times."""

    def __init__(self, layer, repeats):
        self._layer, self._repeats = layer, repeats

    def __call__(self, x):
        return [self._layer(x) for _ in range(self._repeats)][-1]

    def argmax(self, x):
        return None


class RepeatingKernels(TorchKernels):
    """PyTorch's kernels with slower linear layers, which it counts."""

    def __init__(self, name, repeats, *, supports_int8):
        super().__init__("cpu")
        self.name, self.supports_int8 = name, supports_int8
        self.linears = 0
        self._repeats = repeats

    def linear(self, weight, bias=None, *, quantization=None, **options):
        self.linears += 1
        return RepeatingLayer(super().linear(weight, bias, **options), self._repeats)

    def head(self, weight, *, quantization=None):
        return self.linear(weight, fp32_output=True)


class Factory:
    """A kernel set of a plugin that was written without `identity` and `family`."""

    def __init__(self, name, priority, *, repeats=1, supports_int8=True, reason=""):
        self.name, self.priority = name, priority
        self.kernels = RepeatingKernels(name, repeats, supports_int8=supports_int8)
        self.loads = 0
        self._reason = reason

    def applies(self, device, dtype):
        return device == "cpu" and dtype == BFLOAT16

    def unsupported_reason(self, text):
        return ""

    def load(self, device, config):
        self.loads += 1
        return LoadedKernels(None, self._reason, "buy another one") if self._reason else LoadedKernels(self.kernels)


class IdentifiedFactory(Factory):
    def __init__(self, *arguments, identity="1", **options):
        super().__init__(*arguments, **options)
        self.code = identity

    def identity(self):
        return self.code


SLOW = 200
"""How often the slow set computes each product: the outcome must not depend on the machine."""


@pytest.fixture(autouse=True)
def small_samples(monkeypatch):
    monkeypatch.setattr(measure_module, "SAMPLE_WEIGHTS_PER_THREAD", 2000)
    monkeypatch.setattr(choice, "MAX_SPREAD", math.inf)  # tests run on busy machines


@pytest.fixture
def factories():
    """A slow set with a high priority, and a fast one with a low priority."""
    return [IdentifiedFactory("slow", 50, repeats=SLOW), IdentifiedFactory("quick", 10)]


@pytest.fixture
def start(tmp_path, factories):
    """Choose as a new process does: `start(text=LARGE, **options)`; returns the name of the chosen set."""

    def start(text=LARGE, **options):
        config = EngineConfig(**{"cache_dir": tmp_path, **options})
        return KernelSelector(factories, config, vision=VISION, budget=0.05).choose("cpu", BFLOAT16, text).name

    return start


def measured(factories):
    """Return the number of layers that were created since the last call, as a measurement does."""
    created = sum(factory.kernels.linears for factory in factories)
    for factory in factories:
        factory.kernels.linears = 0
    return created


def stored_files(folder):
    return sorted((folder / FOLDER).glob("*.json"))


@pytest.mark.parametrize("text", [LARGE, None])
def test_fastest_set_is_chosen_and_logged(start, text, caplog):
    caplog.set_level(logging.INFO)
    assert start(text) == "quick"
    part = TEXT_MODEL if text else VISION_ENCODER
    (line,) = [record.getMessage() for record in caplog.records if "Kernels of" in record.getMessage()]
    assert line.startswith(f"Kernels of the {part}: quick, by measurement (quick ")
    assert ", slow " in line


def test_second_start_uses_stored_choice(start, factories, caplog):
    assert (start(), measured(factories) > 0) == ("quick", True)
    caplog.set_level(logging.INFO)
    assert (start(), measured(factories)) == ("quick", 0)
    assert "quick, by an earlier measurement (quick " in caplog.text


def test_stored_choice_is_private(start, tmp_path):
    start()
    (file,) = stored_files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # no temporary files


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


def change_shapes(factories, monkeypatch):
    return {"text": replace(LARGE, intermediate_size=2 * LARGE.intermediate_size)}


def change_quantization(factories, monkeypatch):
    return {"quantization": "int8"}


def add_set(factories, monkeypatch):
    factories.append(IdentifiedFactory("other", 30))
    return {}


CHANGES = [change_identity, change_torch, change_threads, change_processor, change_shapes, change_quantization, add_set]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_condition_is_measured_again(start, factories, monkeypatch, tmp_path, change):
    start()
    measured(factories)
    start(**change(factories, monkeypatch))
    assert measured(factories) > 0
    assert len(stored_files(tmp_path)) == 2


def test_models_of_equal_shape_share_a_choice(start, factories):
    start(served_model_name="first")
    measured(factories)
    start(served_model_name="second")
    assert measured(factories) == 0


def edit(**changes):
    def write(file):
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return write


def replace_by_link(file):
    other = file.with_name("other")
    file.rename(other)
    file.symlink_to(other)


def open_to_others(file):
    file.chmod(0o666)


def truncate(file):
    file.write_text(file.read_text()[:100])


def exchange(file):
    conditions = json.loads(file.read_text())["conditions"]
    edit(conditions={**conditions, "threads": conditions["threads"] + 1})(file)


DAMAGES = {
    "truncated": truncate,
    "empty": lambda file: file.write_text(""),
    "list": lambda file: file.write_text("[]"),
    "binary": lambda file: file.write_bytes(b"\xff\x00"),
    "other format": edit(format="0"),
    "unknown set": edit(chosen="mystery"),
    "set without figures": edit(scores={"slow": 1.0}),
    "no figures": edit(scores={}, seconds={}),
    "infinite": edit(scores={"slow": float("inf"), "quick": 1.0}),
    "text as figure": edit(scores={"slow": "long", "quick": 1.0}),
    "of other conditions": exchange,
    "unknown condition": edit(conditions={"weather": "fine", "sets": []}),
    "link": replace_by_link,
    "writable by others": open_to_others,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unusable_file_is_logged_and_replaced(start, factories, tmp_path, caplog, damage):
    start()
    (file,) = stored_files(tmp_path)
    DAMAGES[damage](file)
    measured(factories)
    assert (start(), measured(factories) > 0) == ("quick", True)
    assert f"{file} is ignored: " in caplog.text
    caplog.clear()
    assert (start(), measured(factories)) == ("quick", 0)
    assert "ignored" not in caplog.text


def test_unwritable_cache_is_logged(start, factories, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    options = {"cache_dir": tmp_path / "file" / "cache"}
    assert start(**options) == start(**options) == "quick"
    assert measured(factories) > 0
    assert "The choice of kernels cannot be stored in" in caplog.text


def test_choice_of_a_selector_does_not_change(tmp_path, factories):
    """A decoder that is restarted uses the same kernels, even if nothing can be stored."""
    (tmp_path / "file").write_text("")
    selector = KernelSelector(factories, EngineConfig(cache_dir=tmp_path / "file" / "cache"), budget=0.05)
    first = selector.choose("cpu", BFLOAT16, LARGE)
    measured(factories)
    assert selector.choose("cpu", BFLOAT16, LARGE) is first
    assert measured(factories) == 0


def test_concurrent_starts_measure_once(start, factories, tmp_path):
    start(cache_dir=tmp_path / "alone")
    alone = measured(factories)
    begin = threading.Barrier(4)

    def choose(_):
        begin.wait(HANG)
        return start()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(choose, range(4))) == {"quick"}
    assert measured(factories) == alone


def test_measurement_on_a_busy_machine_is_not_stored(start, factories, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(choice, "MAX_SPREAD", 0.0)
    caplog.set_level(logging.INFO)
    assert (start(), stored_files(tmp_path)) == ("quick", [])
    assert " for a reference request), which is not stored, since the processor is busy." in caplog.text
    measured(factories)
    assert (start(), measured(factories) > 0) == ("quick", True)


@pytest.mark.parametrize("name", ["slow", "quick"])
def test_option_overrides_measurement(start, factories, name, caplog):
    caplog.set_level(logging.INFO)
    assert start(cpu_kernels=name) == name
    assert measured(factories) == 0
    assert f"Kernels of the text model: {name}, as set by `cpu_kernels` {name}." in caplog.text


def test_unknown_set_is_rejected_with_the_known_ones(start):
    with pytest.raises(
        ConfigError, match=r"`cpu_kernels` 'fast' is not registered by any plugin. Choose auto, quick, s"
    ):
        start(cpu_kernels="fast")


def test_small_models_use_priority_without_measurement(start, factories, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert (start(DEMO), measured(factories), stored_files(tmp_path)) == ("slow", 0, [])
    assert "slow, by priority: with 2,949,120 weights, it is too small to be measured." in caplog.text


def test_vision_encoder_without_description_uses_priority(factories, tmp_path):
    selector = KernelSelector(factories, EngineConfig(cache_dir=tmp_path))
    assert selector.choose("cpu", BFLOAT16).name == "slow"
    with pytest.raises(ConfigError, match="cannot be measured: the model family does not describe its linear layers"):
        selector.measure("cpu", BFLOAT16)
    with pytest.raises(ConfigError, match="cannot be measured: kernel sets are measured only on a CPU, not on cuda"):
        selector.measure("cuda", BFLOAT16, LARGE)


def test_sets_without_int8_are_not_measured_for_int8(start, factories):
    factories[1] = IdentifiedFactory("quick", 10, supports_int8=False)
    assert start(quantization="int8") == "slow"
    assert start() == "quick"


def test_quantization_without_any_set_is_left_to_the_decoder(start, factories, tmp_path):
    for factory in factories:
        factory.kernels.supports_int8 = False
    assert (start(quantization="int8"), measured(factories)) == ("slow", 0)
    selector = KernelSelector(factories, EngineConfig(cache_dir=tmp_path, quantization="int8"))
    with pytest.raises(ConfigError, match=r"No kernel set that can run here supports `quantization` int8. Remove it"):
        selector.measure("cpu", BFLOAT16, LARGE)


def test_only_sets_that_keep_stored_bits_are_measured(factories, tmp_path):
    factories[1] = IdentifiedFactory("quick", 10, supports_int8=False)
    options = {"budget": 0.2, "stored_bits": "int8"}
    selector = KernelSelector(factories, EngineConfig(cache_dir=tmp_path), **options)
    assert selector.workload(LARGE).quantization == "int8"
    assert selector.choose("cpu", BFLOAT16, LARGE).name == "slow"


def test_without_sets_that_keep_stored_bits_dequantized_weights_are_measured(factories, tmp_path):
    for factory in factories:
        factory.kernels.supports_int8 = False
    selector = KernelSelector(factories, EngineConfig(cache_dir=tmp_path), budget=0.2, stored_bits="int8")
    choice = selector.measure("cpu", BFLOAT16, LARGE)
    assert choice.kernels.name == "quick"
    assert {stored.conditions.quantization for stored in selector.stored()} == {"none"}


def test_missing_kernels_are_an_error(start, factories):
    factories.clear()
    with pytest.raises(ConfigError, match="No kernels are registered"):
        start()


def test_only_best_set_of_a_family_is_loaded(start, factories):
    factories[0].family = factories[1].family = "same"
    assert start() == "slow"
    assert (factories[1].loads, measured(factories)) == (0, 0)


def test_set_that_cannot_be_loaded_leaves_its_family_to_others(start, factories):
    factories[0] = Factory("slow", 50, reason="it broke")
    factories[0].family = factories[1].family = "same"
    assert start() == "quick"


def test_missing_faster_kernels_are_logged_if_pytorchs_are_used(tmp_path, caplog):
    factories = [Factory("broken", 50, reason="it broke"), TorchKernelFactory(), Factory("onednn", 1)]
    selector = KernelSelector(factories, EngineConfig(cache_dir=tmp_path))
    assert selector.choose("cpu", BFLOAT16, LARGE).name in {"torch", "onednn"}
    assert "Using PyTorch's kernels, which are slower than the C kernels: it broke; buy another one." in caplog.text


def test_default_identity_depends_on_module_and_class(factories):
    class Other(Factory):
        pass

    first, other = (factory_identity(kind("a", 1)) for kind in (Factory, Other))
    assert first != other
    assert first == factory_identity(Factory("b", 2))
    assert factory_identity(factories[0]) == "1"
    assert factory_identity(TorchKernelFactory()) == factory_identity(OneDnnKernelFactory())
    assert len(NativeKernelFactory("amx", 20).identity()) == 16


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


def test_measurement_ends_when_budget_is_used():
    """Only the pass of one row is run; the others are estimated from it, and the LM head is not part of prefill."""
    model = text_workload(LARGE)
    found = measure({"quick": RepeatingKernels("quick", 1, supports_int8=True)}, model, BFLOAT16, budget=0)["quick"]
    assert found.estimated == {4, 16, 64, 256}
    assert found.seconds[16] == found.seconds[1]
    share = model.weights_at(64) / model.weights_at(16)
    assert 0 < share < 1
    assert found.seconds[256] == pytest.approx(16 * share * found.seconds[1])


def test_hopeless_pass_is_estimated_and_the_set_not_repeated():
    sets = {name: RepeatingKernels(name, n, supports_int8=True) for name, n in (("quick", 1), ("slow", SLOW))}
    found = measure(sets, VISION, BFLOAT16, budget=HANG)
    assert not found["quick"].estimated
    assert found["slow"].estimated == {512}
    assert found["slow"].spread == math.inf
    assert 1 <= found["quick"].spread < math.inf


def test_reference_request_weights_passes():
    assert text_workload(DEMO).score({1: 1, 4: 0, 16: 0, 64: 0, 256: 0}) == 48
    assert VISION.score({256: 1.0, 512: 3.0}) == 7


needs_onednn = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "available")


class RecordingKernels(TorchKernels):
    """PyTorch's kernels, which record the shapes of the linear layers."""

    def __init__(self):
        super().__init__("cpu")
        self.shapes = []

    def linear(self, weight, bias=None, *, activation=measure_module.Activation.NONE, **options):
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
    for name in ("slow", "quick"):
        config = EngineConfig(cpu_kernels=name, device="cpu", dtype="bfloat16")
        family, selector = Qwen2VL(), KernelSelector(factories, config)
        service = _load_vision(family, family.load_spec(tiny_checkpoint), config, selector, Registry())
        keys.append(service._model_key)
        asyncio.run(service.close())
    assert keys == [b"slow", b"quick"]


@needs_onednn
@pytest.mark.slow
def test_engine_starts_with_measured_kernels(tiny_checkpoint, tmp_path, monkeypatch, caplog):
    """Both parts are measured at the first start; the second one uses the stored choices."""
    monkeypatch.setattr(workload, "MIN_MEASURED_WEIGHTS", 0)
    caplog.set_level(logging.INFO)
    config = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", device="cpu", cache_dir=tmp_path)
    texts = []
    for source in ("by measurement", "by an earlier measurement"):
        caplog.clear()
        with Engine(config) as engine:
            request = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
            texts.append(engine.chat(request).choices[0].message.content)
        lines = [record.getMessage() for record in caplog.records if "Kernels of" in record.getMessage()]
        assert len(lines) == 2
        assert all(f", {source} (" in line for line in lines)
    assert texts[0] == texts[1]


@needs_onednn
def test_onednn_is_only_for_bfloat16_on_a_cpu():
    factory = OneDnnKernelFactory()
    assert isinstance(factory.load("cpu", EngineConfig()).kernels, OneDnnKernels)
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
