"""Find plugins, survive the broken ones, and keep what they register. The built-in parts come in by the same door."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pluggy

from .. import hookspecs
from ..errors import MissingDependency, PluginError
from ..hookspecs import API_VERSION, GROUP, Finding
from ..models.checkpoint import model_type

if TYPE_CHECKING:
    import click

    from ..config import EngineConfig
    from ..decoders import DecoderFactory
    from ..kernels.choice import KernelFactory
    from ..media.types import VideoReader
    from ..models.interface import ModelFamily

ADAPTER_GROUP = f"{GROUP}.adapters"
DISTRIBUTION = "dashinfer-vlm-adapters"

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
        _check_version(plugin, name)
        manager = new_manager()
        staged = Registry()
        try:
            manager.register(plugin, name=name)
            manager.check_pending()
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
        hook.register_video_readers(register=lambda item: _put("video reader", self.video_readers, item.name, item))

    def _add_family(self, family: ModelFamily) -> None:
        for name in sorted(family.model_types):
            _put("model family", self.families, name, family)

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


def new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


def load_plugins(*, strict: bool = False) -> Registry:
    """Register every plugin that an installed distribution declares: the built-in ones first, then by name.

    A broken plugin is left out, named in the log, and listed in `Registry.rows` with what would mend it.

    Raises:
        PluginError, MissingDependency: with `strict`, for the first plugin that is broken.
    """
    registry = Registry()
    seen: set[str] = set()
    for entry in _entries():
        row = _load(entry, registry, seen, strict=strict)
        seen.add(entry.name)
        registry.rows.append(row)
    return registry


def add_commands(group: click.Group) -> None:
    """Let every plugin that loads add its commands; one that is broken costs its own commands only."""
    for entry in _entries():
        manager = new_manager()
        try:
            plugin = entry.load()
            _check_version(plugin, entry.name)
            manager.register(plugin, name=entry.name)
            manager.hook.register_commands(group=group)
        except Exception as error:  # noqa: BLE001 - `plugins` lists it with its remedy; the command line itself must come up
            logger.debug("plugin %s adds no commands: %s", entry.name, error)


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
        raise _missing(entry, error) from error


def _entries() -> list[EntryPoint]:
    """Entry points of plugins; ours come first, so that nobody takes a built-in part's name."""
    return sorted(entry_points(group=GROUP), key=lambda entry: (_owner(entry) != DISTRIBUTION, entry.name, entry.value))


def _owner(entry: EntryPoint) -> str:
    return _identity(entry.dist)[0] if entry.dist else "unknown"


@functools.lru_cache(maxsize=64)
def _identity(distribution: Distribution) -> tuple[str, str]:
    """Name and version. A distribution parses its metadata anew for each of them, which was half of `load_plugins`."""
    metadata = distribution.metadata
    return metadata["Name"], metadata["Version"]


def _load(entry: EntryPoint, registry: Registry, seen: set[str], *, strict: bool) -> PluginRow:
    distribution = " ".join(_identity(entry.dist)) if entry.dist else "unknown"
    row = functools.partial(PluginRow, name=entry.name, value=entry.value, distribution=distribution)
    if entry.name in seen:
        return row(
            status="duplicate", problem="Another distribution has a plugin of this name; uninstall one of the two."
        )
    try:
        return row(status="ok", provides=registry.add_plugin(_import(entry), name=entry.name))
    except (PluginError, MissingDependency) as error:
        if strict:
            raise
        logger.warning("%s", error.message)
        return row(status="broken", problem=error.message)


def _import(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except ImportError as error:
        raise _missing(entry, error) from error
    except Exception as error:
        raise PluginError(f"Plugin {entry.name!r} ({entry.value}) failed while it was imported: {error}") from error


def _missing(entry: EntryPoint, error: ImportError) -> MissingDependency:
    wanted = f"{_owner(entry)}{f'[{entry.extras[0]}]' if entry.extras else ''}"
    return MissingDependency(f"{entry.name!r} ({entry.value}) cannot be imported: {error}. Try: pip install '{wanted}'")


def _check_version(plugin: object, name: str) -> None:
    version = getattr(plugin, "dashinfer_vlm_api", API_VERSION)
    if version != API_VERSION:
        raise PluginError(
            f"Plugin {name!r} was written for version {version!r} of the plugin API, and this is version {API_VERSION}:"
            " install a release of it that fits."
        )


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
