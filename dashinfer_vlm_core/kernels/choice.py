"""Select the kernels that run a model on this machine. This module does not import torch; factories do."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..config import EngineConfig
from ..errors import ConfigError
from .devices import cpu_flags, cpu_model, is_cpu
from .threads import threads_of_process
from .tuned import Conditions, TunedKernels, load_tuned, model_of

if TYPE_CHECKING:
    import torch

    from ..text_spec import TextModelSpec
    from .types import Kernels

TORCH = "torch"
"""Name of the fallback kernels, which run every model."""

PYTORCH_SETS = (TORCH, "onednn")
"""Names of the kernel sets that consist of PyTorch's operators."""

SLOWER = "with which responses take 1.5 to 2 times as long as with the C kernels"
"""What it costs to use PyTorch's kernels: with `onednn`, a reference request took 1.55 and 1.75 times as long as with
`avx512` (Qwen2-VL-2B and a model of 0.6 billion parameters on an AMD EPYC with AVX-512 BF16)."""

logger: logging.Logger = logging.getLogger(__name__)


class LoadedKernels(NamedTuple):
    """Kernels, or the reason why they are not available.

    Attributes:
        kernels: the kernels, or None.
        reason: why they cannot be used.
        fix: how to make them available; empty if this machine does not support them.
    """

    kernels: Kernels | None
    reason: str = ""
    fix: str = ""

    @property
    def explanation(self) -> str:
        return "; ".join(filter(None, (self.reason, self.fix)))


class KernelFactory(Protocol):
    """A factory for one kernel set; plugins register it in the `register_kernels` hook.

    Attributes:
        name: the value of `cpu_kernels` that selects it.
        priority: the set with the highest priority of those that can be loaded is the default.
    """

    name: str
    priority: int

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        """Whether the kernel set is meant for models on `device` in `dtype`; if not, it is skipped silently."""

    def unsupported_reason(self, text: TextModelSpec) -> str:
        """Return why the kernel set cannot run a text model; empty if it can."""

    def load(self, device: str) -> LoadedKernels:
        """Load the kernels, or report why they cannot run on this machine."""

    def identity(self) -> str:
        """Return what identifies the code of the kernels, such as a digest of their source.

        Measurements and shared embeddings of another identity are not used.
        """


class KernelChoice(NamedTuple):
    """Selected kernels.

    Attributes:
        kernels: the kernels.
        reason: why these were selected, as part of a sentence.
        unavailable: if they are PyTorch's, why the C kernels or those of plugins cannot be used; empty if none were
            expected.
    """

    kernels: Kernels
    reason: str
    unavailable: LoadedKernels = LoadedKernels(None)


class KernelSelector:
    """Selects one of the kernel sets that plugins registered. Thread-safe.

    It is the set with the highest priority that can run on this machine, unless `cpu_kernels` names one, or
    `dashinfer-vlm tune` measured that another one is faster. A choice holds for all row counts of a model part: the
    results of a row must not depend on its batch.

    Args:
        factories: the registered factories, including that of `TORCH`.
        config: its `cpu_kernels` is the name of a kernel set or `auto`.
    """

    def __init__(self, factories: Iterable[KernelFactory], config: EngineConfig) -> None:
        self._factories = {factory.name: factory for factory in sorted(factories, key=lambda item: -item.priority)}
        self._config = config
        self._lock = threading.Lock()
        self._choices: dict[tuple[str, str, TextModelSpec | None], KernelChoice] = {}
        self._vision_device = "cpu"
        self.vision_name = ""
        """The name of the vision encoder's kernels; empty if `choose` was not called for it.

        Results that are shared between engines depend on it, since sets round differently."""

    def choose(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> Kernels:
        """Return the kernels for models on `device` in `dtype`, both resolved.

        The choice is logged, and stays the same for this selector. A warning states the reason and the cost if
        PyTorch's kernels are used although faster ones are registered for this device and dtype.

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
                choice = self.find(device, dtype, text)
                self._report("text model" if text else "vision encoder", choice)
                self._choices[key] = choice
                if text is None:
                    self._vision_device = device
                    self.vision_name = choice.kernels.name
            return self._choices[key].kernels

    def vision_identity(self) -> str:
        """Return what the rounding of the vision encoder's kernels depends on.

        Unlike the name, it is valid for results that other processes use: it covers the code of the kernels, torch, and
        the GPU or, for PyTorch's kernels, the processor and the number of threads, by which its libraries choose how
        they compute.
        """
        torch = _torch()
        name = self.vision_name
        device = self._vision_device
        codes = [self._factories[name].identity()] if name in self._factories else []
        if not is_cpu(device):
            where = str(torch.cuda.get_device_name(device)) if device.startswith("cuda") else device
        elif codes and name not in PYTORCH_SETS:
            where = str(torch.backends.cpu.get_cpu_capability())  # also of the operators that are not kernels
        else:
            return " ".join([name, *codes, this_machine(), f"{torch.get_num_threads()} threads"])
        return " ".join([name, *codes, f"torch {torch.__version__}", where])

    def candidates(
        self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None
    ) -> dict[str, LoadedKernels]:
        """Load every kernel set for models on `device` in `dtype`, from the highest priority to the lowest."""
        return {
            name: self._load(factory, device, text)
            for name, factory in self._factories.items()
            if factory.applies(device, dtype)
        }

    def find(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> KernelChoice:
        """Return what `choose` chooses at first, without logging it.

        Raises:
            ConfigError: `cpu_kernels` names a kernel set that no plugin registers, or that cannot run on this machine.
        """
        requested = self._config.cpu_kernels
        names = sorted(self._factories)
        if requested not in ("auto", *names):
            message = f"`cpu_kernels` {requested!r} is not registered by any plugin. Choose auto, {', '.join(names)}."
            raise ConfigError(message, param="cpu_kernels")
        if requested == "auto":
            return self._find_best(device, dtype, text)
        if not self._factories[requested].applies(device, dtype):
            reason = f"since `cpu_kernels` {requested} has no kernels for {device} in {dtype}"
            return self._find_best(device, dtype, text)._replace(reason=reason)
        loaded = self._load(self._factories[requested], device, text)
        if loaded.kernels is None:
            message = f"`cpu_kernels` {requested!r} cannot be used: {loaded.explanation}. Omit it, or use `torch`."
            raise ConfigError(message, param="cpu_kernels")
        return KernelChoice(loaded.kernels, f"as set by `cpu_kernels` {requested}")

    def conditions(self) -> Conditions:
        """Return what a measurement with this configuration is valid for."""
        return Conditions(
            machine=this_machine(),
            threads=threads_of_process(self._config).count,
            model=model_of(self._config),
            dtype=self._config.dtype,
            quantization=self._config.quantization,
            vision_quantization=self._config.vision_quantization,
            sets={name: factory.identity() for name, factory in self._factories.items()},
        )

    @functools.cached_property
    def _tuned(self) -> TunedKernels | None:
        return load_tuned(self._config, self.conditions())

    def _find_best(self, device: str, dtype: torch.dtype, text: TextModelSpec | None) -> KernelChoice:
        found = self.candidates(device, dtype, text)
        loaded = {name: item.kernels for name, item in found.items() if item.kernels is not None}
        if not loaded:
            raise ConfigError("No kernels are registered. Run `dashinfer-vlm plugins` to list broken plugins.")
        best = next(iter(loaded))
        missing = [item for name, item in found.items() if item.kernels is None and name not in PYTORCH_SETS]
        unavailable = missing[-1] if missing and best in PYTORCH_SETS else LoadedKernels(None)
        if not is_cpu(device):
            return KernelChoice(loaded[best], f"the default for {device}", unavailable)
        tuned = self._tuned
        if tuned and tuned.chosen in loaded:
            reason = f"measured by `dashinfer-vlm tune` ({tuned.describe()})"
            return KernelChoice(loaded[tuned.chosen], reason, unavailable)
        return KernelChoice(loaded[best], "the default for this processor", unavailable)

    def _load(self, factory: KernelFactory, device: str, text: TextModelSpec | None) -> LoadedKernels:
        reason = factory.unsupported_reason(text) if text else ""
        return LoadedKernels(None, reason) if reason else factory.load(device)

    def _report(self, part: str, choice: KernelChoice) -> None:
        logger.info("Kernels of the %s: %s, %s.", part, choice.kernels.name, choice.reason)
        reported = {earlier.unavailable for earlier in self._choices.values()}
        if choice.unavailable.reason and choice.unavailable not in reported:
            logger.warning("Using PyTorch's kernels, %s: %s.", SLOWER, choice.unavailable.explanation)


def this_machine() -> str:
    """Return what the speed and the rounding of a CPU's kernels depend on, apart from threads: processor and torch."""
    features = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:16]
    return f"{cpu_model()} {features}, torch {_torch().__version__}"


def _torch() -> Any:
    # By its name: packages that do not need torch import this module.
    return importlib.import_module("torch")
