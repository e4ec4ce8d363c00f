"""EngineConfig on the command line: one option per field, generated from the fields."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from ..config import MIB, EngineConfig
from ..config.options import Options
from ..plugins import load_plugins, options_registry
from .config_file import FileOption

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

REPEATABLE = {"lora"}
"""Options that are given once for each value, which may contain commas."""

UNITS = {"mib": "MIB", "bytes": "BYTES", "pixels": "PIXELS", "patches": "PATCHES", "seconds": "SECONDS",
         "timeout": "SECONDS", "ttl": "SECONDS", "frames": "FRAMES"}  # fmt: skip
"""Placeholders by the last word of a field's name, for fields with a unit."""


SECTIONS = {
    "model": "Model",
    "max_model_len": "Scheduling and memory",
    "min_pixels": "Images and videos",
    "allow_remote_media": "Media sources",
}
"""The first field of `EngineConfig` in each section of the help, and the section's title."""


MODEL_ARGUMENT = "model_argument"


class EngineOption(FileOption):
    """An option of the engine, shared by many commands. pydantic reads its environment variable."""


class ModelArgument(click.Argument):
    """The argument MODEL of an `EngineCommand`, which has the effect of `--model`."""

    def __init__(self) -> None:
        complete = functools.partial(_complete, "model", str)
        super().__init__([MODEL_ARGUMENT], required=False, metavar="[MODEL]", shell_complete=complete)


def engine_options() -> list[EngineOption]:
    """Return the options of EngineConfig and of the installed plugins."""
    classes: list[type[Options]] = [EngineConfig, *options_registry().option_classes]
    options = []
    for kind in classes:
        section = kind.title
        for name, field in kind.option_fields().items():
            section = SECTIONS.get(name, section)
            options.append(EngineOption(default=None, section=section, **option_attributes(kind, name, field)))
    return options


def option_attributes(kind: type[Any], name: str, field: FieldInfo) -> dict[str, Any]:
    """Return the attributes of a click option for a field, but for the type: pydantic validates values.

    Args:
        kind: the class of the field.
        name: the field's name.
        field: its type and default. Its title is the placeholder for values in the help, if its type and unit do not
            determine it.
    """
    flag = name.replace("_", "-")
    default = _default_text(name, field.default)
    description = field.description or docstring(kind, name)
    text = f"{description}  [default: {default}]" if default else description
    if _member_types(field.annotation) == [bool]:
        return {"param_decls": [f"--{flag}/--no-{flag}", name], "help": text}
    return {
        "param_decls": [f"--{flag}", name],
        "multiple": name in REPEATABLE,
        "metavar": field.title or _metavar(name, field.annotation),
        "help": text,
        "shell_complete": functools.partial(_complete, name, field.annotation),
    }


def docstring(kind: type[Any], name: str) -> str:
    """Return the docstring of a field in one line; empty if there is none, or no source.

    Read when options are created: pydantic's `use_attribute_docstrings` takes 7 ms for each class that is imported.
    """
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except OSError:
        return ""
    return _docstrings(source).get((kind.__name__, name), "")


@functools.lru_cache(maxsize=16)
def _docstrings(source: str) -> dict[tuple[str, str], str]:
    found = {}
    for kind in ast.parse(source).body:
        if isinstance(kind, ast.ClassDef):
            for field, text in itertools.pairwise(kind.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[kind.name, ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def _complete(
    name: str, annotation: Any, _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    words = model_names() if name == "model" else _choices(annotation)
    found = [CompletionItem(word) for word in words if word.startswith(incomplete)]
    return found or (
        [CompletionItem(incomplete, type="file")] if name == "model" or _member_types(annotation)[0] is Path else []
    )


def model_names() -> list[str]:
    """Return the models that need no download: registered ones, and those in the Hugging Face cache."""
    from ..models.checkpoint import cached_models

    return [*sorted(load_plugins().models), *sorted(cached_models())]


def _choices(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _default_text(name: str, default: object) -> str:
    if default is None or default in ((), ""):
        return ""
    if isinstance(default, bool):
        return name.replace("_", "-") if default else f"no-{name.replace('_', '-')}"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, int) and name.endswith("_bytes"):
        return f"{default}, {default // MIB} MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _metavar(name: str, annotation: Any) -> str:
    if words := _choices(annotation):
        return f"[{'|'.join(words)}]"
    if unit := UNITS.get(name.rsplit("_", maxsplit=1)[-1]):
        return unit
    return {int: "INT", float: "NUMBER", Path: "PATH"}.get(_member_types(annotation)[0], "NAME")


def _member_types(annotation: Any) -> list[Any]:
    return [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None) and kind is not Ellipsis]
