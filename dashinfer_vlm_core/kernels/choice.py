"""Select the kernels that run a model on this machine. This module does not import torch; factories do."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..config import EngineConfig
from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ..models.spec import TextModelSpec
    from .types import Kernels

TORCH = "torch"
"""Name of the fallback kernels, which run every model."""

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

    Attributes:
        name: the value of `cpu_kernels` that selects it.
        priority: kernel sets are tried from the highest priority to the lowest.
    """

    name: str
    priority: int

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        """Whether the kernel set is meant for models on `device` in `dtype`; if not, it is skipped silently."""

    def unsupported_reason(self, text: TextModelSpec) -> str:
        """Return why the kernel set cannot run a text model; empty if it can."""

    def load(self, device: str, config: EngineConfig) -> LoadedKernels:
        """Load the kernels, or report why they cannot run on this machine. May compile them into `config`'s cache."""


class KernelSelector:
    """Selects one of the kernel sets that plugins registered.

    Args:
        factories: the registered factories, including that of `TORCH`.
        config: its `cpu_kernels` is the name of a kernel set or `auto`.
    """

    def __init__(self, factories: Iterable[KernelFactory], config: EngineConfig) -> None:
        self._factories = sorted(factories, key=lambda factory: -factory.priority)
        self._config = config

    def choose(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> Kernels:
        """Return the fastest kernels for models on `device` in `dtype`, both resolved.

        Logs the reason when PyTorch's kernels are used although faster ones are registered for this device and dtype.

        Args:
            device: torch's name of the device.
            dtype: the dtype of the weights.
            text: the text model that the kernels will run; None for other models.

        Raises:
            ConfigError: `cpu_kernels` names a kernel set that cannot run on this machine.
        """
        loaded = self.find_kernels(device, dtype, text)
        if loaded.kernels is None:
            raise ConfigError("No kernels are registered. Run `dashinfer-vlm plugins` to list broken plugins.")
        requested = self._config.cpu_kernels
        if loaded.kernels.name == TORCH and loaded.reason and requested != "auto":
            message = f"`cpu_kernels` {requested!r} cannot be used: {loaded.explanation}. Omit it, or use `torch`."
            raise ConfigError(message, param="cpu_kernels")
        if loaded.kernels.name == TORCH and loaded.reason:
            logger.warning("Using PyTorch's kernels, which are slower than the C kernels: %s.", loaded.explanation)
        return loaded.kernels

    def find_kernels(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> LoadedKernels:
        """Like `choose`, but with the reason why the next faster applicable kernels cannot run on this machine.

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
                failed = loaded if loaded.reason else failed
        return failed

    def _load(
        self, factory: KernelFactory, device: str, dtype: torch.dtype, text: TextModelSpec | None
    ) -> LoadedKernels:
        if not factory.applies(device, dtype):
            return LoadedKernels(None)
        reason = factory.unsupported_reason(text) if text else ""
        return LoadedKernels(None, reason) if reason else factory.load(device, self._config)
