"""Which kernels run a model here. No torch: factories import it."""

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
"""The kernels that run whatever the others do not."""

logger: logging.Logger = logging.getLogger(__name__)


class LoadedKernels(NamedTuple):
    """Kernels, or why there are none.

    Attributes:
        kernels: they, or None.
        reason: why faster ones are not used, or none at all; empty if nobody would expect them.
        remedy: what helps; empty where this machine cannot have them.
    """

    kernels: Kernels | None
    reason: str = ""
    fix: str = ""

    @property
    def explanation(self) -> str:
        return "; ".join(filter(None, (self.reason, self.fix)))


class KernelFactory(Protocol):
    """Makes one set of kernels; a plugin registers one by `register_kernels`.

    Attributes:
        name: what `cpu_kernels` calls it.
        priority: sets are tried from the highest to the lowest.
    """

    name: str
    priority: int

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        """Whether the set is made for models on such a device, in such a number type; if not, it is left out without a
        word."""

    def unsupported_reason(self, text: TextModelSpec) -> str:
        """Why the set cannot run a text model; empty if it can."""

    def load(self, device: str, config: EngineConfig) -> LoadedKernels:
        """The kernels, or why they cannot run on this machine. It may compile them, into the cache of `config`."""


class KernelSelector:
    """Chooses among the kernels that plugins registered.

    Args:
        factories: of the registered sets, `TORCH` among them.
        config: `cpu_kernels` of it names one, or `auto`.
    """

    def __init__(self, factories: Iterable[KernelFactory], config: EngineConfig) -> None:
        self._factories = sorted(factories, key=lambda factory: -factory.priority)
        self._config = config

    def choose(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> Kernels:
        """The fastest kernels for models on `device` in `dtype`, both resolved.

        Why others than PyTorch's are not taken where they could have been is logged.

        Args:
            device: as torch names it.
            dtype: of the weights.
            text: the text model that they are to run, if it is one.

        Raises:
            ConfigError: `cpu_kernels` names a set that cannot run here.
        """
        found = self.find(device, dtype, text)
        if found.kernels is None:
            raise ConfigError("No kernels are registered: `dashinfer-vlm plugins` says which plugins are broken.")
        wanted = self._config.cpu_kernels
        if found.kernels.name == TORCH and found.reason and wanted != "auto":
            fault = f"`cpu_kernels` {wanted!r} cannot be used: {found.explanation}. Leave it out, or take `torch`."
            raise ConfigError(fault, param="cpu_kernels")
        if found.kernels.name == TORCH and found.reason:
            logger.warning("PyTorch's kernels are used, which are slower than those in C: %s.", found.explanation)
        return found.kernels

    def find(self, device: str, dtype: torch.dtype, text: TextModelSpec | None = None) -> LoadedKernels:
        """As `choose`, with the reason why the next faster ones cannot run here, if they could have been taken.

        Raises:
            ConfigError: `cpu_kernels` names a set that no plugin registers.
        """
        wanted, failed = self._config.cpu_kernels, LoadedKernels(None)
        names = sorted(factory.name for factory in self._factories)
        if wanted not in ("auto", *names):
            fault = f"`cpu_kernels` {wanted!r} is registered by no plugin; there are: auto, {', '.join(names)}."
            raise ConfigError(fault, param="cpu_kernels")
        for factory in self._factories:
            if wanted in ("auto", factory.name) or factory.name == TORCH:
                loaded = self._load(factory, device, dtype, text)
                if loaded.kernels is not None:
                    return failed._replace(kernels=loaded.kernels)
                failed = loaded if loaded.reason else failed
        return failed

    def _load(
        self, factory: KernelFactory, device: str, dtype: torch.dtype, text: TextModelSpec | None
    ) -> LoadedKernels:
        if not factory.applies(device, dtype):
            return LoadedKernels(None)
        reason = factory.unsupported_reason(text) if text else ""
        return LoadedKernels(None, reason) if reason else factory.load(device, self._config)
