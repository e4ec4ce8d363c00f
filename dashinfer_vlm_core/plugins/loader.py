"""Find plugins, survive the broken ones, and keep what they register. The built-in parts come in by the same door."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..config import EngineConfig, PluginOptions
from ..config.plugin_options import check_options
from ..errors import MissingDependency, PluginError
from ..hookspecs import GROUP, Finding
from ..hookspecs.discovery import call_hooks, identity, import_plugin, manager_of, missing, plugin_entries
from ..models.checkpoint import model_type

if TYPE_CHECKING:
    import click
    import pluggy

    from ..decoders import DecoderFactory
    from ..kernels.choice import KernelFactory
    from ..media.types import VideoReader
    from ..models.interface import ModelFamily

ADAPTER_GROUP = f"{GROUP}.adapters"

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginRow:
    """What became of one entry point: a line of `dashinfer-vlm plugins`.

    Attributes:
        name: of the entry point.
        value: the object it points to.
        distribution: the package that brought it, with its version.
        status: `ok`, or why it is not in use.
        provides: what it registered, such as `decoder torch`.
        problem: for a person: what went wrong and how to mend it; empty if nothing did.
    """

    name: str
    value: str
    distribution: str
    status: Literal["ok", "broken", "duplicate"]
    provides: tuple[str, ...] = ()
    problem: str = ""


@dataclass(kw_only=True, slots=True)
class Registry:
    """Everything that plugins registered, by name."""

    models: dict[str, Path] = field(default_factory=dict)
    families: dict[str, ModelFamily] = field(default_factory=dict)
    decoders: dict[str, DecoderFactory] = field(default_factory=dict)
    kernels: dict[str, KernelFactory] = field(default_factory=dict)
    video_readers: dict[str, VideoReader] = field(default_factory=dict)
    checks: dict[str, Callable[[EngineConfig], Iterable[Finding]]] = field(default_factory=dict)
    options: dict[str, type[PluginOptions]] = field(default_factory=dict)
    rows: list[PluginRow] = field(default_factory=list)

    def family(self, model_type: str) -> ModelFamily:
        return _named("model family", model_type, self.families)

    def family_of(self, folder: Path) -> ModelFamily:
        """What reads the checkpoint in a folder.

        Raises:
            CheckpointError: it does not say what it is.
            PluginError: nobody reads such checkpoints.
        """
        return self.family(model_type(folder))

    def decoder(self, name: str) -> DecoderFactory:
        return _named("decoder", name, self.decoders)

    def add_plugin(self, plugin: object, *, name: str) -> tuple[str, ...]:
        """Register everything that `plugin` brings; what it provides, for people.

        Raises:
            PluginError: it was written for another version of the plugin API, a hook is misspelt or has other
                arguments, a name is taken, or the plugin's own code fails. Nothing of the plugin is kept then.
        """
        manager = manager_of(plugin, name)
        staged = Registry()
        try:
            staged.call(manager)
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(f"Plugin {name!r} failed while registering: {error}") from error
        provides = staged.names()
        self._take(staged, plugin_name=name)
        return provides

    def call(self, manager: pluggy.PluginManager) -> None:
        hook = manager.hook
        hook.register_models(register=functools.partial(_put, "model", self.models))
        hook.register_model_families(register=self._add_family)
        hook.register_decoders(register=lambda item: _put("decoder", self.decoders, item.name, item))
        hook.register_kernels(register=lambda item: _put("kernels", self.kernels, item.name, item))
        hook.register_checks(register=functools.partial(_put, "check", self.checks))
        hook.register_options(register=self._add_options)
        hook.register_video_readers(register=lambda item: _put("video reader", self.video_readers, item.name, item))

    def _add_family(self, family: ModelFamily) -> None:
        for name in sorted(family.model_types):
            _put("model family", self.families, name, family)

    def _add_options(self, options: type[PluginOptions]) -> None:
        for name in check_options(options).model_fields:
            if name in EngineConfig.model_fields:
                raise PluginError(f"The option {name!r} is one of the engine's.")
            _put("option", self.options, name, options)

    def names(self) -> tuple[str, ...]:
        return tuple(f"{kind} {name}" for kind, items in self._tables() for name in items)

    def _tables(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        return (
            ("model", self.models),
            ("model family", self.families),
            ("decoder", self.decoders),
            ("kernels", self.kernels),
            ("video reader", self.video_readers),
            ("check", self.checks),
            ("option", self.options),
        )

    def _take(self, staged: Registry, *, plugin_name: str) -> None:
        pairs = [
            (kind, mine, theirs) for (kind, mine), (_, theirs) in zip(self._tables(), staged._tables(), strict=True)
        ]
        for kind, mine, theirs in pairs:
            if taken := sorted(mine.keys() & theirs.keys()):
                raise PluginError(
                    f"Plugin {plugin_name!r} registers the {kind} {taken[0]!r}, which another plugin has already."
                )
        for _, mine, theirs in pairs:
            mine.update(theirs)


def load_plugins(*, strict: bool = False) -> Registry:
    """Register every plugin that an installed distribution declares: the built-in ones first, then by name.

    A broken plugin is left out, named in the log, and listed in `Registry.rows` with what would mend it.

    Raises:
        PluginError, MissingDependency: with `strict`, for the first plugin that is broken.
    """
    registry = Registry()
    seen: set[str] = set()
    for entry in plugin_entries():
        row = _load(entry, registry, seen, strict=strict)
        seen.add(entry.name)
        registry.rows.append(row)
    return registry


def add_commands(group: click.Group) -> None:
    """Let every plugin that loads add its commands; one that is broken costs its own commands only."""
    for entry in plugin_entries():
        call_hooks(entry, lambda hook: hook.register_commands(group=group))


def load_adapter(name: str) -> Any:
    """The object that an adapter's entry point names, such as the server's `create_app`.

    Raises:
        PluginError: no adapter of that name is installed.
        MissingDependency: its extra is not installed.
    """
    entries = {entry.name: entry for entry in entry_points(group=ADAPTER_GROUP)}
    entry = _named("adapter", name, entries)
    try:
        return entry.load()
    except ImportError as error:
        raise missing(entry, error) from error


def _load(entry: EntryPoint, registry: Registry, seen: set[str], *, strict: bool) -> PluginRow:
    distribution = " ".join(identity(entry.dist)) if entry.dist else "unknown"
    row = functools.partial(PluginRow, name=entry.name, value=entry.value, distribution=distribution)
    if entry.name in seen:
        return row(
            status="duplicate", problem="Another distribution has a plugin of this name; uninstall one of the two."
        )
    try:
        return row(status="ok", provides=registry.add_plugin(import_plugin(entry), name=entry.name))
    except (PluginError, MissingDependency) as error:
        if strict:
            raise
        logger.warning("%s", error.message)
        return row(status="broken", problem=error.message)


def _put(kind: str, table: dict[str, Any], name: str, item: Any) -> None:
    if name in table:
        raise PluginError(f"The {kind} {name!r} is registered twice by one plugin.")
    table[name] = item


def _named(kind: str, name: str, table: dict[str, T]) -> T:
    try:
        return table[name]
    except KeyError:
        known = ", ".join(sorted(table)) or "none"
        raise PluginError(
            f"No {kind} is called {name!r}; there is: {known}. `dashinfer-vlm plugins` says which ones are broken."
        ) from None
