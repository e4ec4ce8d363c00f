"""Select the kernels that run a model on this machine. This module does not import torch; factories do."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ..config import EngineConfig
from ..errors import ConfigError
from .choice_cache import ChoiceCache, Conditions, StoredChoice
from .cpu import cpu_flags, cpu_model
from .workload import TEXT_MODEL, VISION_ENCODER, Workload, text_workload

if TYPE_CHECKING:
    import torch

    from ..text_spec import TextModelSpec
    from .measure import Figures
    from .types import Kernels

TORCH = "torch"
"""Name of the fallback kernels, which run every model."""

PYTORCH_SETS = (TORCH, "onednn")
"""Names of the kernel sets that consist of PyTorch's operators."""

BUDGET = 1.5
"""Seconds for the measurement of one part of a model: its text model or its vision encoder."""

MARGIN = 0.9
"""A kernel set replaces one of higher priority if it needs at most this share of its time. Only linear layers are
measured: sets of higher priority also fuse norms and attention, and a choice must not depend on noise."""

NOISY_MARGIN = 0.5
"""`MARGIN` if the measurement is not reliable."""

MAX_SPREAD = 1.3
"""A measurement is reliable if every set that could be the fastest has at most this `Figures.spread`; otherwise, other
processes use the processor."""

logger: logging.Logger = logging.getLogger(__name__)


class LoadedKernels(NamedTuple):
    """Kernels, or the reason why they are not available.

    Attributes:
        kernels: the kernels, or None.
        reason: why faster kernels, or any at all, are not used; empty if none were expected.
        fix: how to make them available; empty if this machine does not support them.
        origin: where the kernels come from, such as "prebuilt"; empty if there is only one possibility.
    """

    kernels: Kernels | None
    reason: str = ""
    fix: str = ""
    origin: str = ""

    @property
    def explanation(self) -> str:
        return "; ".join(filter(None, (self.reason, self.fix)))


class KernelFactory(Protocol):
    """A factory for one kernel set; plugins register it in the `register_kernels` hook.

    A factory may have two more members. `identity() -> str` identifies the code of the kernels, such as a digest of
    their source: a choice that was measured with another identity is not used. The default is a digest of the module
    that defines the factory. `family: str` is shared by sets that are the same kernels for different processors: only
    the one with the highest priority that can be loaded is measured, and the others are not compiled.

    Attributes:
        name: the value of `cpu_kernels` that selects it.
        priority: sets that are not measured are tried from the highest priority to the lowest.
    """

    name: str
    priority: int

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        """Whether the kernel set is meant for models on `device` in `dtype`; if not, it is skipped silently."""

    def unsupported_reason(self, text: TextModelSpec) -> str:
        """Return why the kernel set cannot run a text model; empty if it can."""

    def load(self, device: str, config: EngineConfig) -> LoadedKernels:
        """Load the kernels, or report why they cannot run on this machine. May compile them into `config`'s cache."""


class Candidates(NamedTuple):
    """The kernel sets for a device, dtype and model.

    Attributes:
        loaded: the sets that can run, by name, from the highest priority to the lowest.
        failed: the sets that cannot run on this machine, with the reasons.
    """

    loaded: dict[str, Kernels]
    failed: dict[str, LoadedKernels]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """Selected kernels, and why.

    Attributes:
        kernels: the kernels.
        source: `option`: `cpu_kernels` names them; `priority`: nothing was measured; `measurement`; `stored`: an
            earlier measurement.
        reason: why nothing was measured; empty if something was.
        scores: seconds of the reference request of each measured set, see `Workload`.
        figures: the measured speed of each set.
        is_reliable: whether the measurement was repeated with similar times; otherwise, it is not stored.
    """

    kernels: Kernels
    source: Literal["option", "priority", "measurement", "stored"]
    reason: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, Figures] = field(default_factory=dict)
    is_reliable: bool = True

    @property
    def explanation(self) -> str:
        """One sentence part, such as `by measurement (avx512 1.2 s, onednn 1.5 s for a reference request)`."""
        if not self.scores:
            return self.reason
        best = sorted(self.scores.items(), key=lambda item: item[1])[:2]
        times = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in best)
        source = "by measurement" if self.source == "measurement" else "by an earlier measurement"
        noise = "" if self.is_reliable else ", which is not stored, since the processor is busy"
        return f"{source} ({times} for a reference request){noise}"


class KernelSelector:
    """Selects one of the kernel sets that plugins registered. Thread-safe.

    A choice holds for all row counts of a model part: the results of a row must not depend on its batch.

    Args:
        factories: the registered factories, including that of `TORCH`.
        config: its `cpu_kernels` is the name of a kernel set or `auto`.
        vision: the workload of the vision encoder; without it, its kernels are selected by priority.
        budget: seconds for the measurement of one part of a model.
        stored_bits: data type of the checkpoint's quantized weights, see `ModuleReader`. Kernels are measured with it
            if any of them keep it, otherwise with the dequantized weights.
    """

    def __init__(
        self,
        factories: Iterable[KernelFactory],
        config: EngineConfig,
        *,
        vision: Workload | None = None,
        budget: float = BUDGET,
        stored_bits: str = "none",
    ) -> None:
        self._factories = sorted(factories, key=lambda factory: -factory.priority)
        self._config = config
        self._vision = vision
        self._budget = budget
        self._stored_bits = stored_bits
        self._cache = _choice_cache(config)
        self._lock = threading.Lock()
        self._choices: dict[tuple[str, str, TextModelSpec | None], KernelChoice] = {}
        self._names: dict[str, str] = {}
        self._devices: dict[str, str] = {}

    def choose(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> Kernels:
        """Return the fastest kernels for models on `device` in `dtype`, both resolved.

        On a CPU, the sets are measured with the model's linear layers, unless the model is small, `cpu_kernels` names
        a set, or an earlier measurement is stored. The result is logged, and stays the same for this selector.

        Logs the reason when PyTorch's kernels are used although faster ones are registered for this device and dtype.

        Args:
            device: torch's name of the device.
            dtype: the dtype of the weights.
            text: the text model that the kernels will run; None for the vision encoder.

        Raises:
            ConfigError: `cpu_kernels` names a kernel set that cannot run on this machine.
        """
        key = device, str(dtype), text
        with self._lock:
            if key not in self._choices:
                self._choices[key] = self._choose(device, dtype, text)
            return self._choices[key].kernels

    def chosen_name(self, part: str) -> str:
        """Return the name of the kernels of `TEXT_MODEL` or `VISION_ENCODER`; empty if `choose` was not called for it.

        Results that are shared between engines depend on it, since sets round differently.
        """
        return self._names.get(part, "")

    def chosen_identity(self, part: str) -> str:
        """Return what the rounding of the kernels of `TEXT_MODEL` or `VISION_ENCODER` depends on.

        Unlike the name, it is valid for results that other processes use: it covers the code of the kernels, torch, and
        the GPU or, for PyTorch's kernels, the processor and the number of threads, by which its libraries choose how
        they compute.
        """
        torch = importlib.import_module("torch")  # as in _measure
        name, device = self.chosen_name(part), self._devices.get(part, "cpu")
        codes = [factory_identity(factory) for factory in self._factories if factory.name == name]
        if not _is_cpu(device):
            where = str(torch.cuda.get_device_name(device)) if device.startswith("cuda") else device
        elif codes and name not in PYTORCH_SETS:
            where = str(torch.backends.cpu.get_cpu_capability())  # also of the operators that are not kernels
        else:
            where = f"{_processor()} {torch.get_num_threads()}"
        return " ".join([name, *codes, str(torch.__version__), where])

    def measure(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> KernelChoice:
        """Measure the kernel sets now, store the choice if starts use it, and return it; see `choose`.

        Small models are measured too, but their choice is not stored: a start selects their kernels by priority.

        Raises:
            ConfigError: the device is not a CPU, the model family does not describe the linear layers, or no kernel set
                supports the quantization.
        """
        workload = self.workload(text)
        if not _is_cpu(device) or workload is None:
            raise ConfigError(f"The kernel sets cannot be measured: {_unmeasured_reason(device, workload)}.")
        workload, usable = self._usable(self.candidates(device, dtype, text).loaded, workload)
        if not usable:
            message = f"No kernel set that can run here supports `quantization` {workload.quantization}. Remove it."
            raise ConfigError(message, param="quantization")
        with self._cache.locked():
            return self._measure(usable, dtype, workload)

    def workload(self, text: TextModelSpec | None = None) -> Workload | None:
        """Return the workload of a text model, or of the vision encoder, if its model family describes it."""
        if text is None:
            return self._vision
        configured = self._config.quantization.removeprefix("u")
        return text_workload(text, quantization=configured if self._stored_bits == "none" else self._stored_bits)

    def candidates(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> Candidates:
        """Load every kernel set for models on `device` in `dtype`, but only one of each family; see `KernelFactory`."""
        found, families = Candidates({}, {}), set[str]()
        for factory in self._factories:
            family = getattr(factory, "family", factory.name)
            if family in families:
                continue
            loaded = self._load(factory, device, dtype, text)
            if loaded.kernels is not None:
                found.loaded[factory.name] = loaded.kernels
                families.add(family)
            elif loaded.reason:
                found.failed[factory.name] = loaded
        return found

    def find_kernels(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> LoadedKernels:
        """Return the kernels of the highest priority, with the reason why the next higher ones cannot run here.

        Raises:
            ConfigError: `cpu_kernels` names a kernel set that no plugin registers.
        """
        requested, failed = self._config.cpu_kernels, LoadedKernels(None)
        names = sorted(factory.name for factory in self._factories)
        if requested not in ("auto", *names):
            message = f"`cpu_kernels` {requested!r} is not registered by any plugin. Choose auto, {', '.join(names)}."
            raise ConfigError(message, param="cpu_kernels")
        for factory in self._factories:
            if requested in ("auto", factory.name) or factory.name == TORCH:
                loaded = self._load(factory, device, dtype, text)
                if loaded.kernels is not None:
                    return failed._replace(kernels=loaded.kernels, origin=loaded.origin)
                if loaded.reason and not (failed.reason and factory.name in PYTORCH_SETS):
                    failed = loaded
        return failed

    def stored(self) -> list[StoredChoice]:
        """Return the choices in the cache folder that were measured on this machine, with this version of torch."""
        here = self._conditions(Workload(name="", groups=(), passes=()), "", ())
        return [choice for choice in self._cache.all() if choice.conditions.same_machine(here)]

    def _choose(self, device: str, dtype: torch.dtype, text: TextModelSpec | None) -> KernelChoice:
        part = VISION_ENCODER if text is None else TEXT_MODEL
        choice = self._without_measurement(device, dtype, text) or self._by_measurement(device, dtype, text)
        self._names[part], self._devices[part] = choice.kernels.name, device
        logger.info("Kernels of the %s: %s, %s.", part, choice.kernels.name, choice.explanation)
        return choice

    def _without_measurement(self, device: str, dtype: torch.dtype, text: TextModelSpec | None) -> KernelChoice | None:
        """Choose by option or by priority; None if the kernels are chosen by measurement."""
        if self._config.cpu_kernels != "auto":
            return self._by_option(device, dtype, text)
        workload = self.workload(text)
        if _is_cpu(device) and workload is not None and workload.is_measured:
            return None
        return self._by_priority(device, dtype, text, f"by priority: {_unmeasured_reason(device, workload)}")

    def _by_option(self, device: str, dtype: torch.dtype, text: TextModelSpec | None) -> KernelChoice:
        requested = self._config.cpu_kernels
        kernels, loaded = self._find_any(device, dtype, text)
        if kernels.name == TORCH and loaded.reason:
            message = f"`cpu_kernels` {requested!r} cannot be used: {loaded.explanation}. Omit it, or use `torch`."
            raise ConfigError(message, param="cpu_kernels")
        reason = f"as set by `cpu_kernels` {requested}"
        if kernels.name != requested:
            reason = f"since `cpu_kernels` {requested} has no kernels for {device} in {dtype}"
        return KernelChoice(kernels=kernels, source="option", reason=reason)

    def _by_priority(self, device: str, dtype: torch.dtype, text: TextModelSpec | None, reason: str) -> KernelChoice:
        kernels, loaded = self._find_any(device, dtype, text)
        _warn_about_fallback(kernels, loaded)
        return KernelChoice(kernels=kernels, source="priority", reason=reason)

    def _find_any(self, device: str, dtype: torch.dtype, text: TextModelSpec | None) -> tuple[Kernels, LoadedKernels]:
        """Return the kernels of `find_kernels`, and all that it returns.

        Raises:
            ConfigError: no kernels are registered, or not those of `cpu_kernels`.
        """
        loaded = self.find_kernels(device, dtype, text)
        if loaded.kernels is None:
            raise ConfigError("No kernels are registered. Run `dashinfer-vlm plugins` to list broken plugins.")
        return loaded.kernels, loaded

    def _by_measurement(self, device: str, dtype: torch.dtype, text: TextModelSpec | None) -> KernelChoice:
        workload, candidates = self.workload(text), self.candidates(device, dtype, text).loaded
        assert workload is not None
        workload, usable = self._usable(candidates, workload)
        if not usable:  # the decoder reports it
            return self._by_priority(device, dtype, text, f"since none supports `quantization` {workload.quantization}")
        if usable.keys() <= set(PYTORCH_SETS):
            _warn_about_fallback(*self._find_any(device, dtype, text))
        if len(usable) == 1:
            (only,) = usable.values()
            return KernelChoice(kernels=only, source="priority", reason="the only set that can run it here")
        conditions = self._conditions(workload, str(dtype), usable)
        if found := self._stored_choice(conditions, usable):
            return found
        with self._cache.locked():
            return self._stored_choice(conditions, usable) or self._measure(usable, dtype, workload)

    def _usable(self, loaded: Mapping[str, Kernels], workload: Workload) -> tuple[Workload, dict[str, Kernels]]:
        """Return the sets that support the quantization of a workload, and the workload to measure them with."""
        usable = _supporting(loaded, workload)
        if usable or self._config.quantization != "none":
            return workload, usable
        return replace(workload, quantization="none"), dict(loaded)  # stored weights are then dequantized

    def _stored_choice(self, conditions: Conditions, usable: Mapping[str, Kernels]) -> KernelChoice | None:
        stored = self._cache.load(conditions)
        if stored is None:
            return None
        return KernelChoice(kernels=usable[stored.chosen], source="stored", scores=stored.scores)

    def _measure(self, usable: Mapping[str, Kernels], dtype: torch.dtype, workload: Workload) -> KernelChoice:
        # Imported by name, because it imports torch: packages that do not need torch import this module.
        measure = importlib.import_module(".measure", __package__).measure
        figures: dict[str, Figures] = measure(usable, workload, dtype, budget=self._budget)
        scores = {name: workload.score(found.seconds) for name, found in figures.items()}
        is_reliable = _is_reliable(scores, figures)
        name = fastest(scores, MARGIN if is_reliable else NOISY_MARGIN)
        if workload.is_measured and is_reliable:
            self._cache.store(
                StoredChoice(
                    conditions=self._conditions(workload, str(dtype), usable),
                    model=self._config.name,
                    part=workload.name,
                    chosen=name,
                    scores=scores,
                    seconds={name: found.seconds for name, found in figures.items()},
                )
            )
        return KernelChoice(
            kernels=usable[name], source="measurement", scores=scores, figures=figures, is_reliable=is_reliable
        )

    def _conditions(self, workload: Workload, dtype: str, names: Iterable[str]) -> Conditions:
        torch = importlib.import_module("torch")  # as in _measure
        factories = {factory.name: factory for factory in self._factories}
        return Conditions(
            processor=_processor(),
            threads=int(torch.get_num_threads()),
            torch=str(torch.__version__),
            dtype=dtype.removeprefix("torch."),
            workload=f"{workload.name}: {' '.join(_describe(workload))}",
            quantization=workload.quantization,
            sets=tuple((name, factory_identity(factories[name])) for name in names),
        )

    def _load(
        self, factory: KernelFactory, device: str, dtype: torch.dtype, text: TextModelSpec | None
    ) -> LoadedKernels:
        if not factory.applies(device, dtype):
            return LoadedKernels(None)
        reason = factory.unsupported_reason(text) if text else ""
        return LoadedKernels(None, reason) if reason else factory.load(device, self._config)


def _processor() -> str:
    return f"{cpu_model()} {hashlib.sha256(' '.join(sorted(cpu_flags())).encode()).hexdigest()[:16]}"


def _choice_cache(config: EngineConfig) -> ChoiceCache:
    try:
        return ChoiceCache(config.cache_folder)
    except RuntimeError:  # no home folder
        return ChoiceCache(None)


def _warn_about_fallback(kernels: Kernels, loaded: LoadedKernels) -> None:
    if kernels.name in PYTORCH_SETS and loaded.reason:
        logger.warning("Using PyTorch's kernels, which are slower than the C kernels: %s.", loaded.explanation)


def _supporting(loaded: Mapping[str, Kernels], workload: Workload) -> dict[str, Kernels]:
    """Return the sets that support the quantization of a workload."""
    if workload.quantization == "none":
        return dict(loaded)
    attribute = f"supports_{workload.quantization}"
    return {name: kernels for name, kernels in loaded.items() if getattr(kernels, attribute, False)}


def fastest(scores: Mapping[str, float], margin: float = MARGIN) -> str:
    """Return the name of the fastest set.

    Args:
        scores: seconds by name, from the highest priority to the lowest.
        margin: see `MARGIN`.
    """
    best = ""
    for name, seconds in scores.items():
        if not best or seconds < margin * scores[best]:
            best = name
    return best


def _is_reliable(scores: Mapping[str, float], figures: Mapping[str, Figures]) -> bool:
    """Whether the sets that could be the fastest were measured repeatedly, with similar times."""
    limit = min(scores.values()) / MARGIN
    return all(figures[name].spread <= MAX_SPREAD for name, score in scores.items() if score <= limit)


def factory_identity(factory: KernelFactory) -> str:
    """Return what identifies the code of a factory's kernels, see `KernelFactory`."""
    identity = getattr(factory, "identity", None)
    if identity is not None:
        return str(identity())
    module = inspect.getmodule(type(factory))
    file = getattr(module, "__file__", None)
    name = f"{type(factory).__module__}.{type(factory).__qualname__}"
    return f"{name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}" if file else name


def _is_cpu(device: str) -> bool:
    return device.partition(":")[0] == "cpu"


def _unmeasured_reason(device: str, workload: Workload | None) -> str:
    if not _is_cpu(device):
        return f"kernel sets are measured only on a CPU, not on {device}"
    if workload is None:
        return "the model family does not describe its linear layers"
    return f"with {workload.weights:,} weights, it is too small to be measured"


def _describe(workload: Workload) -> Iterator[str]:
    """Yield the shapes of a workload, and its passes."""
    for group in workload.groups:
        shapes = ",".join(f"{shape.outputs}x{shape.inputs}:{shape.activation}" for shape in group.shapes)
        yield f"{group.repeats}*({shapes}){' head' if group.is_head else ''}"
    yield ",".join(f"{rows}:{count:g}" for rows, count in workload.passes)
