"""The registry of what plugins provide."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import create_model

from ..config import EngineConfig, PluginOptions
from ..config.options import check_options
from ..errors import PluginError
from ..findings import Finding
from ..models.checkpoint import model_type
from ..models.formats.detection import find_reader
from ..models.model_card import ModelCard, read_generation_config
from .discovery import create_manager, located

if TYPE_CHECKING:
    import pluggy

    from ..decoders import DecoderFactory
    from ..embedding_store import EmbeddingStoreFactory
    from ..kernels.choice import KernelFactory
    from ..media.types import VideoReader
    from ..models.formats.interface import CheckpointFormat
    from ..models.interface import ModelFamily
    from ..models.spec import ModelSpec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginRow:
    """The status of one entry point: a line of `dashinfer-vlm plugins`.

    Attributes:
        name: the name of the entry point.
        value: the object that it names.
        distribution: the distribution that declares it, with its version.
        status: `ok`, or why it is not in use.
        provides: what it registered, such as `decoder torch`.
        problem: what is wrong and how to fix it, human-readable; empty if nothing is.
    """

    name: str
    value: str
    distribution: str
    status: Literal["ok", "broken", "duplicate", "disabled"]
    provides: tuple[str, ...] = ()
    problem: str = ""


@dataclass(kw_only=True, slots=True)
class Registry:
    """Everything that plugins registered, by name."""

    models: dict[str, Path] = field(default_factory=dict)
    cards: dict[Path, ModelCard] = field(default_factory=dict)
    families: dict[str, ModelFamily] = field(default_factory=dict)
    decoders: dict[str, DecoderFactory] = field(default_factory=dict)
    kernels: dict[str, KernelFactory] = field(default_factory=dict)
    video_readers: dict[str, VideoReader] = field(default_factory=dict)
    checkpoint_formats: dict[str, CheckpointFormat] = field(default_factory=dict)
    embedding_stores: dict[str, EmbeddingStoreFactory] = field(default_factory=dict)
    checks: dict[str, Callable[[EngineConfig], Iterable[Finding]]] = field(default_factory=dict)
    options: dict[str, type[PluginOptions]] = field(default_factory=dict)
    rows: list[PluginRow] = field(default_factory=list)

    def family(self, model_type: str) -> ModelFamily:
        return lookup("model family", model_type, self.families)

    def family_of(self, folder: Path) -> ModelFamily:
        """Return the model family of the checkpoint in a folder.

        Raises:
            CheckpointError: the checkpoint does not declare its `model_type`.
            PluginError: no plugin supports this `model_type`.
        """
        return self.family(model_type(folder))

    def load_spec(self, folder: Path) -> ModelSpec:
        """Load the configuration of the checkpoint in a folder, with its card and the reader of its quantized weights.

        Raises:
            CheckpointError: a file is missing, invalid or requires an unsupported feature.
            PluginError: no plugin supports its `model_type`.
        """
        spec = self.family_of(folder).load_spec(folder)
        card = replace(self.cards.get(folder, ModelCard()), generation_config=read_generation_config(folder))
        return replace(spec, card=card, quantization=find_reader(folder, self.checkpoint_formats))

    def decoder(self, name: str) -> DecoderFactory:
        return lookup("decoder", name, self.decoders)

    @property
    def option_classes(self) -> tuple[type[PluginOptions], ...]:
        return tuple(dict.fromkeys(self.options.values()))

    def resolve_options(self, config: EngineConfig) -> EngineConfig:
        """Return `config` with the values of the options of plugins that are given or set by the environment.

        Raises:
            ConfigError: neither EngineConfig nor a plugin has an option of that name, or a value is out of range; the
                message contains all such options. Or two options cannot be combined.
        """
        options = _combined(self.option_classes)(**config.plugin_options)
        given = {name: value for name, value in options if name in options.model_fields_set}
        resolved = config.model_copy(update=given)
        for kind in self.option_classes:
            resolved.options_of(kind).check_combination(dict(resolved))
        return resolved

    def add_plugin(self, plugin: object, *, name: str) -> tuple[str, ...]:
        """Register everything that `plugin` provides, and return a human-readable summary, such as `decoder torch`.

        Raises:
            PluginError: it was written for another version of the plugin API, a hook has an unknown name or argument, a
                name is already registered, or the plugin's code raises an exception. Nothing is registered then.
        """
        hook = create_manager(plugin, name).hook
        staged = Registry()
        for table, copied in zip(self._tables().values(), staged._tables().values(), strict=True):
            copied.update(table)
        before = set(self.names())
        try:
            staged.call(hook)
        except Exception as error:
            raise PluginError(f"Plugin {name!r} failed during registration: {located(error)}") from error
        for table, copied in zip(self._tables().values(), staged._tables().values(), strict=True):
            table.update(copied)
        self.cards.update(staged.cards)
        return tuple(each for each in self.names() if each not in before)

    def call(self, hook: pluggy.HookRelay) -> None:
        hook.register_models(register=self._add_model)
        hook.register_checks(register=partial(_register, "check", self.checks))
        hook.register_decoders(register=partial(_register_named, "decoder", self.decoders))
        hook.register_kernels(register=partial(_register_named, "kernels", self.kernels))
        hook.register_video_readers(register=partial(_register_named, "video reader", self.video_readers))
        hook.register_checkpoint_formats(
            register=partial(_register_named, "checkpoint format", self.checkpoint_formats)
        )
        hook.register_model_families(register=self._add_family)
        hook.register_embedding_stores(register=self._add_embedding_store)
        hook.register_options(register=self.add_options)

    def _add_model(
        self, name: str, folder: Path, *, description: str = "", example_prompts: Iterable[str] = ()
    ) -> None:
        _register("model", self.models, name, folder)
        if description:
            self.cards[folder] = ModelCard(description=description, example_prompts=tuple(example_prompts))

    def _add_family(self, family: ModelFamily) -> None:
        for name in sorted(family.model_types):
            _register("model family", self.families, name, family)

    def _add_embedding_store(self, factory: EmbeddingStoreFactory) -> None:
        for scheme in sorted(factory.schemes):
            _register("embedding store", self.embedding_stores, scheme, factory)

    def add_options(self, options: type[PluginOptions]) -> None:
        for name in check_options(options).model_fields:
            if name in EngineConfig.model_fields:
                raise PluginError(f"The option {name!r} already exists in EngineConfig. Rename it.")
            _register("option", self.options, name, options)

    def names(self) -> tuple[str, ...]:
        return tuple(f"{kind} {name}" for kind, table in self._tables().items() for name in table)

    def _tables(self) -> dict[str, dict[str, Any]]:
        return {
            "model": self.models,
            "model family": self.families,
            "decoder": self.decoders,
            "kernels": self.kernels,
            "video reader": self.video_readers,
            "checkpoint format": self.checkpoint_formats,
            "embedding store": self.embedding_stores,
            "check": self.checks,
            "option": self.options,
        }


class _InstalledOptions(PluginOptions):
    @classmethod
    def known_options(cls) -> list[str]:
        return [*EngineConfig.option_fields(), *super().known_options()]


@lru_cache(maxsize=4)
def _combined(classes: tuple[type[PluginOptions], ...]) -> type[PluginOptions]:
    # One class with the options of all, so that one error contains all invalid ones.
    return create_model("InstalledOptions", __base__=(_InstalledOptions, *classes))


def _register(kind: str, table: dict[str, Any], name: str, item: Any) -> None:
    if name in table:
        raise PluginError(f"The {kind} {name!r} is already registered. Choose another name.")
    table[name] = item


def _register_named(kind: str, table: dict[str, Any], item: Any) -> None:
    _register(kind, table, item.name, item)


def lookup(kind: str, name: str, table: dict[str, T]) -> T:
    try:
        return table[name]
    except KeyError:
        known = ", ".join(sorted(table)) or "none"
        raise PluginError(
            f"No {kind} is named {name!r}; available: {known}. `dashinfer-vlm plugins` lists broken plugins."
        ) from None
