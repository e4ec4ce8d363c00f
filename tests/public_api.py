"""The public API: `python -m tests.public_api > tests/public_api.txt` regenerates the snapshot."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

MODULES = (
    "dashinfer_vlm_core",
    "dashinfer_vlm_core.config",
    "dashinfer_vlm_core.decoders",
    "dashinfer_vlm_core.embedding_store",
    "dashinfer_vlm_core.engine",
    "dashinfer_vlm_core.engine.remote",
    "dashinfer_vlm_core.engine.shared",
    "dashinfer_vlm_core.errors",
    "dashinfer_vlm_core.findings",
    "dashinfer_vlm_core.hooks",
    "dashinfer_vlm_core.kernels",
    "dashinfer_vlm_core.kernels.types",
    "dashinfer_vlm_core.media",
    "dashinfer_vlm_core.models.interface",
    "dashinfer_vlm_core.models.spec",
    "dashinfer_vlm_core.offline",
    "dashinfer_vlm_core.plugins",
    "dashinfer_vlm_core.plugins.hookspecs",
    "dashinfer_vlm_core.protocol",
    "dashinfer_vlm_core.testing",
    "dashinfer_vlm_core.text_spec",
    "dashinfer_vlm_server",
    "dashinfer_vlm_litellm",
    "dashinfer_vlm_langchain",
    "dashinfer_vlm_ray",
)


def describe() -> Iterator[str]:
    """Return a line for each public name, and for each member of a project class where the class is listed first."""
    seen: set[type] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", None) or _defined(module):
            thing = getattr(module, public)
            yield f"{name}.{public}{_signature(thing)}"
            if inspect.isclass(thing) and thing.__module__.startswith("dashinfer_vlm") and thing not in seen:
                seen.add(thing)
                yield from (f"{name}.{public}.{member}" for member in _members(thing))


def _defined(module: Any) -> list[str]:
    return sorted(
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
    )


def _members(kind: type) -> Iterator[str]:
    """Return the members of a class and of those base classes of the project that users cannot import by themselves."""
    annotated: dict[str, Any] = {}
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base is kind or _is_unlisted(base):
            annotated |= vars(base).get("__annotations__", {})
            members |= vars(base)
    for name in sorted(name for name in {*annotated, *members} if not name.startswith("_")):
        yield f"{name}: {annotated[name]}" if name in annotated else f"{name}{_signature(members[name])}"


def _is_unlisted(kind: type) -> bool:
    in_project = kind.__module__.startswith("dashinfer_vlm")
    return in_project and not any(vars(importlib.import_module(name)).get(kind.__name__) is kind for name in MODULES)


def _signature(thing: Any) -> str:
    if isinstance(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    if isinstance(thing, property):
        return f" -> {inspect.signature(thing.fget).return_annotation}" if thing.fget else ""
    if inspect.isfunction(thing):
        text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(thing)))
        return re.sub(r"(?<=frozenset\(\{)[^}]*", lambda found: ", ".join(sorted(found[0].split(", "))), text)
    return ""


if __name__ == "__main__":
    print("\n".join(describe()))  # noqa: T201 - a program
