"""The models of a `ModelManager`: their configurations and names, checked before any of them is loaded."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import MIB, EngineConfig
from ..config.folders import expand_user
from ..errors import ConfigError
from ..kernels.choice import KernelSelector
from ..kernels.threads import program_threads
from ..models.checkpoint import HUB_ID, find_model
from ..models.memory import MemoryEstimate, ModelSize
from ..models.spec import ModelSpec
from ..models.task import read_pooling
from ..plugins import Registry, load_plugins, options_registry
from ..protocol import DEFAULT_MODEL
from ..tokenization.tokenizer import TokenizerCache
from .drafts import with_draft

MODEL_KEYS = ("model", "aliases", "pinned")
"""Options that only a model among several has, and the one that it must have."""

Estimate = Callable[[EngineConfig], int]
"""Returns how many bytes a model needs when it is loaded, before it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagedModel:
    """A model that can be loaded.

    Attributes:
        config: what to load and how; its `name` is the model's.
        aliases: other names that requests can use.
        pinned: whether it is loaded at the start and never unloaded.
    """

    config: EngineConfig
    aliases: tuple[str, ...] = ()
    pinned: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests can use, those of LoRA adapters included."""
        return (self.config.name, *self.aliases, *(module.name for module in self.config.lora))


def configure_models(shared: EngineConfig, models: Iterable[tuple[str, object]]) -> tuple[ManagedModel, ...]:
    """Return the models of a configuration file or a command line.

    Args:
        shared: the options of all models.
        models: for each name either `model`, or a mapping of options that replace the shared ones, with `aliases` and
            `pinned`. Without `model`, the name must be that of a model.

    Raises:
        ConfigError: an option is unknown or invalid; the message names the model.
    """
    given = shared.model_dump(exclude_unset=True)
    return tuple(_configure(given, name, options) for name, options in models)


def _configure(shared: Mapping[str, Any], name: str, given: object) -> ManagedModel:
    location = f"models.{name}"
    options = {"model": given} if isinstance(given, str) else given
    if not isinstance(options, Mapping):
        raise ConfigError(f"models: {name!r} must be a folder or model ID, or a mapping of options.", param=location)
    keys = {str(key).replace("-", "_"): str(key) for key in options}
    values: dict[str, Any] = {key: options[written] for key, written in keys.items()}
    _check_keys(location, name, keys)
    aliases = values.pop("aliases", ())
    pinned = values.pop("pinned", "false")
    if str(pinned).lower() not in {"true", "false"}:
        message = f"models: {name!r}: `pinned` must be true or false, got {pinned!r}."
        raise ConfigError(message, param=f"{location}.pinned")
    config = _engine_config(location, name, {**shared, "model": name, **values, "served_model_name": name}, keys)
    if "model" not in values and not _is_model(name):
        step = "Set it to a registered name, a folder or a model ID."
        raise ConfigError(f"models: {name!r} has no `model`. {step}", param=location)
    return ManagedModel(
        config=config,
        aliases=(aliases,) if isinstance(aliases, str) else tuple(map(str, aliases)),
        pinned=str(pinned).lower() == "true",
    )


def _engine_config(location: str, name: str, values: Mapping[str, Any], keys: Mapping[str, str]) -> EngineConfig:
    try:
        config = EngineConfig(**values)
        options_registry().resolve_options(config)
    except ConfigError as error:
        key = keys.get(error.param or "")
        param = f"{location}.{key}" if key else location
        raise ConfigError(f"models: {name!r}: {error.message}", param=param) from None
    return config


def _check_keys(location: str, name: str, keys: Mapping[str, str]) -> None:
    """Reject a key that is similar to one of a model; `EngineConfig` and plugins reject others."""
    known = [*MODEL_KEYS, *EngineConfig.option_fields(), *options_registry().options]
    for key, written in keys.items():
        close = () if key in known else difflib.get_close_matches(key, known, n=1)
        if close and close[0] in MODEL_KEYS:
            message = f"models: {name!r}: `{written}` is not a known option. Did you mean `{close[0]}`?"
            raise ConfigError(message, param=f"{location}.{written}")


def _is_model(name: str) -> bool:
    is_folder = bool(name) and expand_user(name).is_dir()  # an empty name would mean the current folder
    return is_folder or name in load_plugins().models or HUB_ID.fullmatch(name) is not None


def check_names(models: Iterable[ManagedModel]) -> None:
    """Check that no two models have the same name, alias or LoRA adapter.

    Raises:
        ConfigError: they have; the message contains the name.
    """
    owners: dict[str, ManagedModel] = {}
    for model in models:
        for name in model.names:
            if name in owners:
                raise ConfigError(
                    f"The name {name!r} is used twice, {_users(owners[name], model)}: names, aliases"
                    " and LoRA adapters of all models must differ. Write NAME=FOLDER, or choose another name.",
                    param="models",
                )
            owners[name] = model


def _users(first: ManagedModel, second: ManagedModel) -> str:
    if first is second:
        return "by one model"
    names = first.config.name, second.config.name
    return "by two models" if names[0] == names[1] else f"by {names[0]!r} and {names[1]!r}"


def check_memory(models: Sequence[ManagedModel], sizes: Mapping[str, int], limit: int) -> None:
    """Check that each model fits next to the pinned ones.

    Args:
        models: the models.
        sizes: their estimated memory in bytes, by name.
        limit: the limit in bytes.

    Raises:
        ConfigError: one does not; the message contains its name.
    """
    pinned = sum(sizes[model.config.name] for model in models if model.pinned)
    for model in models:
        name = model.config.name
        needed = pinned if model.pinned else pinned + sizes[name]
        if needed > limit:
            others = " with the pinned models" if pinned and needed != sizes[name] else ""
            raise ConfigError(
                f"--memory-limit: the model {name!r} needs about {_size(needed)}{others}, but the limit is"
                f" {_size(limit)}. Raise it, or reduce `kv_cache_mib` or `max_model_len`, or set `quantization`.",
                param="memory_limit",
            )


def estimate_bytes(config: EngineConfig) -> int:
    """Return how many bytes a model needs: its weights as they are kept in memory, its caches, and its processes.

    A model ID that is not in the cache is downloaded.

    Raises:
        CheckpointError: there is no such model, or its configuration is invalid.
        ConfigError: an option cannot be used on this machine.
    """
    program_threads()  # before torch is imported here
    registry = load_plugins()
    config = registry.resolve_options(config)
    uses_mtp = all(config.options_of(kind).uses_mtp for kind in registry.option_classes)
    size = ModelSize.of(find_spec(config, registry, TokenizerCache()), uses_mtp=uses_mtp)
    # Imported by name, because it imports torch: packages that do not need torch import this module.
    placement = importlib.import_module("dashinfer_vlm_core.models.placement")
    estimate: MemoryEstimate = placement.estimate_model(size, config, KernelSelector(registry.kernels.values(), config))
    return estimate.total


def find_spec(config: EngineConfig, registry: Registry, tokenizers: TokenizerCache) -> ModelSpec:
    """Return the configuration of a model's checkpoint. A model ID that is not in the cache is downloaded.

    Raises:
        CheckpointError: there is no such model, or its configuration is invalid.
        ConfigError: it cannot be used for the task, or with the draft model.
    """
    spec = registry.load_spec(find_model(config.model, registered=registry.models, revision=config.revision))
    spec = replace(spec, pooling=read_pooling(spec, config.task, tokenizers))
    return with_draft(spec, config, registry, tokenizers)


def names_of(models: Iterable[ManagedModel]) -> dict[str, str]:
    """Return the name of the model by each name that requests can use; those without `model` use the first one."""
    listed = list(models)
    found = {name: model.config.name for model in listed for name in model.names}
    for model in listed:
        found.setdefault(model.config.model, model.config.name)
    found.setdefault(DEFAULT_MODEL, listed[0].config.name)
    return found


def _size(num_bytes: int) -> str:
    if num_bytes < MIB:
        return f"{num_bytes} bytes"
    return f"{num_bytes / MIB:.0f} MiB" if num_bytes < 100 * MIB else f"{num_bytes / 1024**3:.1f} GiB"
