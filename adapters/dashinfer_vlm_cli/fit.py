"""Whether a model fits this machine, and how fast it decodes: `models --fits`, `show` and `pull`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dashinfer_vlm_core.config import EngineConfig

if TYPE_CHECKING:
    from dashinfer_vlm_core.models.memory import MemoryEstimate, ModelSize
    from dashinfer_vlm_core.plugins import Registry

TUNE_STEP = "`dashinfer-vlm tune demo` measures the memory, from which tokens per second follow."

USABLE = 0.95
"""The part of the memory that a model may take; the system needs the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A model with some bits per weight.

    Attributes:
        bits: `16 bits`, `int4` and so on.
        options: the options that select them, for a command line.
        estimate: what the model needs.
        tokens_per_second: of one conversation; None if the memory was not measured.
    """

    bits: str
    options: str
    estimate: MemoryEstimate
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A model on the CPU of this machine.

    Attributes:
        name: its name.
        memory: the memory of this machine, in bytes.
        variants: the model as it is stored, and quantized to 4 bits if that helps.
    """

    name: str
    memory: int
    variants: tuple[Variant, ...]

    @property
    def fitting(self) -> Variant | None:
        """The first variant that fits."""
        return next((each for each in self.variants if each.estimate.total <= USABLE * self.memory), None)

    def describe(self) -> str:
        """Return needs and speed as a part of a sentence."""
        first = self.variants[0]
        needs = f"needs {size_text(first.estimate.total)} of {size_text(self.memory)}"
        speeds = [
            f"{_rate(each.tokens_per_second)} {'tokens per second ' * (not number)}with {each.bits}"
            for number, each in enumerate(self.variants)
            if each.tokens_per_second is not None
        ]
        return "; ".join([needs, *([f"about {', '.join(speeds)}"] if speeds else [])])

    def advice(self) -> str:
        """Return what to do if the model does not fit as it is; empty if it does."""
        fitting = self.fitting
        if fitting is self.variants[0]:
            return ""
        if fitting is None:
            return "It does not fit in the memory of this machine. `dashinfer-vlm models --fits` lists those that do."
        return f"It fits in the memory of this machine with `{fitting.options}` only: {_needs(fitting)}."


def _needs(variant: Variant) -> str:
    return f"it then needs {size_text(variant.estimate.total)}"


class FitEstimator:
    """Estimates models with the options of one engine, on the CPU."""

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        from dashinfer_vlm_core.kernels.choice import this_machine
        from dashinfer_vlm_core.kernels.tuned import fastest_tuned
        from dashinfer_vlm_core.models.memory import memory_limit

        self._config = config
        self._registry = registry
        self._tuned = fastest_tuned(config, this_machine())
        self._memory = memory_limit()

    @property
    def is_measured(self) -> bool:
        """Whether the memory was measured, so that tokens per second are known."""
        return self._tuned is not None

    def fit(self, name: str, size: ModelSize) -> Fit:
        """Estimate a model."""
        return Fit(name=name, memory=self._memory, variants=tuple(self._variants(name, size)))

    def _variants(self, name: str, size: ModelSize) -> Iterator[Variant]:
        config = self._config.model_copy(update={"model": name})  # the choice of `tune` depends on the model
        stored = self._variant(size, _bits(size), config)
        yield stored
        if size.stored_bits is None and config.quantization == "none":
            smaller = self._variant(size, "int4", config.model_copy(update={"quantization": "int4"}))
            if smaller.estimate.weights < stored.estimate.weights:
                yield smaller

    def _variant(self, size: ModelSize, bits: str, config: EngineConfig) -> Variant:
        from dashinfer_vlm_core.kernels.choice import KernelSelector
        from dashinfer_vlm_core.models.placement import estimate_model

        kernels = KernelSelector(self._registry.kernels.values(), config)
        estimate = estimate_model(size, config, kernels)
        tuned = self._tuned
        rate = None if tuned is None else estimate.tokens_per_second(tuned.bandwidth, tuned.rates)
        return Variant(
            bits=bits if config.quantization == "none" else config.quantization,
            options="" if config.quantization == "none" else f"--quantization {config.quantization}",
            estimate=estimate,
            tokens_per_second=rate,
        )


def _bits(size: ModelSize) -> str:
    if size.stored_bits in {"int4", "int8"}:
        return f"{size.stored_bits[-1:]} bits"
    return "32 bits" if size.dtype == "float32" else "16 bits"


def size_text(count: float) -> str:
    """Return a number of bytes for people, such as `8.9 GB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def rate_text(rate: float | None) -> str:
    """Return tokens per second for a table; empty if unknown."""
    return "" if rate is None else _rate(rate)
