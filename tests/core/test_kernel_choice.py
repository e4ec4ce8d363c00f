"""The kernels are chosen by priority, by option, or by what `tune` measured."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from dashinfer_vlm_cli.tune import fastest
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.engine.loading import _load_vision
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels import devices
from dashinfer_vlm_core.kernels.bandwidth import measure_bandwidth, measure_rates
from dashinfer_vlm_core.kernels.choice import KernelSelector, LoadedKernels
from dashinfer_vlm_core.kernels.factories import OneDnnKernelFactory, TorchKernelFactory
from dashinfer_vlm_core.kernels.onednn import OneDnnKernels, unavailable_reason
from dashinfer_vlm_core.kernels.threads import Machine
from dashinfer_vlm_core.kernels.topology import Core
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.tuned import TunedKernels, fastest_tuned, store_tuned
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_core.plugins import Registry, load_plugins
from dashinfer_vlm_demo import CHECKPOINT
from tests.kernels import needs_native

DEMO = Qwen2VL().load_spec(CHECKPOINT).text
BFLOAT16 = torch.bfloat16


class NamedKernels(TorchKernels):
    def __init__(self, name):
        super().__init__("cpu")
        self.name = name


class Factory:
    def __init__(self, name, priority, *, reason="", identity="1"):
        self.name, self.priority, self.code = name, priority, identity
        self.kernels = NamedKernels(name)
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
        return KernelSelector(factories, EngineConfig(**{"cache_dir": tmp_path, **options}))

    return select


@pytest.fixture
def tune(select, tmp_path):
    """Store a choice as `tune` does: `tune("low")`; returns the file."""

    def tune(chosen, *, bandwidth=1.0, **options):
        conditions = select(**options).conditions()
        seconds = {name: 1.0 if name == chosen else 2.0 for name in conditions.sets}
        tuned = TunedKernels(conditions=conditions, chosen=chosen, seconds=seconds, bandwidth=bandwidth, rates={})
        return store_tuned(EngineConfig(cache_dir=tmp_path), tuned)

    return tune


def test_highest_priority_is_the_default_and_logged(select, caplog):
    caplog.set_level(logging.INFO)
    assert select().choose("cpu", BFLOAT16, DEMO).name == "high"
    assert "Kernels of the text model: high, the default for this processor." in caplog.text


@pytest.mark.parametrize(("text", "part"), [(DEMO, "text model"), (None, "vision encoder")])
def test_tuned_choice_is_used_and_logged(select, tune, caplog, text, part):
    assert tune("low").parent.stat().st_mode & 0o777 == 0o700
    caplog.set_level(logging.INFO)
    assert select().choose("cpu", BFLOAT16, text).name == "low"
    assert f"Kernels of the {part}: low, measured by `dashinfer-vlm tune` (low 1 s, high 2 s)." in caplog.text


def change_identity(factories, monkeypatch):
    factories[1].code = "2"
    return {}


def change_torch(factories, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    return {}


def change_threads(factories, monkeypatch):
    cores = tuple(Core(socket=0, node=0, cpus=(cpu,)) for cpu in range(64))
    monkeypatch.setattr(Machine, "read", lambda: Machine(cores=cores, quota=None))
    return {"cpu_threads": 61}


def change_processor(factories, monkeypatch):
    monkeypatch.setattr(devices, "_cpuinfo", lambda: "model name : Abacus\nflags : beads\n")
    return {}


def change_quantization(factories, monkeypatch):
    return {"quantization": "int8"}


def change_model(factories, monkeypatch):
    return {"model": "other"}


def change_dtype(factories, monkeypatch):
    return {"dtype": "bfloat16"}


def add_set(factories, monkeypatch):
    factories.append(Factory("other", 30))
    return {}


@pytest.mark.parametrize(
    "change",
    [
        change_identity,
        change_torch,
        change_threads,
        change_processor,
        change_quantization,
        change_model,
        change_dtype,
        add_set,
    ],
)
def test_tuned_choice_of_other_conditions_is_not_used(select, tune, factories, monkeypatch, change):
    tune("low")
    assert select().choose("cpu", BFLOAT16, DEMO).name == "low"
    assert select(**change(factories, monkeypatch)).choose("cpu", BFLOAT16, DEMO).name == "high"


@pytest.mark.parametrize("content", ["", "[]", '{"model": "demo"}', "\x00", None])
def test_damaged_file_is_logged_and_ignored(select, tune, caplog, content):
    file = tune("low")
    if content is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_text(content)
    selector = select()
    assert selector.choose("cpu", BFLOAT16, DEMO).name == selector.choose("cpu", BFLOAT16).name == "high"
    assert caplog.text.count(f"{file} is ignored: ") == 1
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


def test_folder_is_the_same_model_by_any_path(select, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert select(model="model").conditions() == select(model=str(tmp_path / "model")).conditions()


def test_tuned_choice_that_cannot_run_is_not_used(select, tune, factories):
    tune("low")
    factories[0] = Factory("low", 10, reason="it broke")
    assert select().choose("cpu", BFLOAT16, DEMO).name == "high"


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


needs_onednn = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "available")


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


def test_measurement_with_highest_bandwidth_is_used(tune, select, tmp_path):
    config, machine = EngineConfig(cache_dir=tmp_path), select().conditions().machine
    assert fastest_tuned(config, machine) is None
    for model, bandwidth in (("a", 2e9), ("b", 3e9), ("c", 1e9)):
        tune("low", model=model, bandwidth=bandwidth)
    assert fastest_tuned(config, machine).bandwidth == 3e9
    assert fastest_tuned(config, "another machine") is None


def test_bandwidth_is_measured():
    assert measure_bandwidth(0) > 1e8


@needs_native
def test_rates_are_measured_for_each_format():
    kernels = KernelSelector(load_plugins().kernels.values(), EngineConfig()).choose("cpu", BFLOAT16)
    rates = measure_rates(kernels, BFLOAT16, seconds=0, size=1 << 20, width=256)
    assert len(set(rates)) == 3
    assert min(rates) > 1e6


def test_formats_that_kernels_do_not_support_have_the_rate_of_the_dtype():
    rates = measure_rates(TorchKernels("cpu"), torch.float32, seconds=0, size=1 << 20, width=256)
    assert rates.wide == rates.int8 == rates.int4
