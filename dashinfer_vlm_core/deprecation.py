"""Old public names, which work for one minor version with a warning that names the new one."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

REMOVED_IN = "0.3"
"""The version without the old names of 0.1."""


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that `old` has become `new`; by default at the caller of the function that calls this one."""
    message = f"`{old}` is now `{new}`; the old name will be removed in {REMOVED_IN}."
    warnings.warn(message, DeprecationWarning, stacklevel)


class RenamedAttribute:
    """An attribute or method under its old name.

    Args:
        new: the name under which the value is found.
    """

    def __init__(self, new: str) -> None:
        self._new = new
        self._old = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Any:
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}")
        return getattr(owner if instance is None else instance, self._new)


def renamed_names(module: str, names: Mapping[str, str], *, stacklevel: int = 3) -> Callable[[str], Any]:
    """Make a module's `__getattr__`, which finds names that have been renamed.

    Args:
        module: `__name__` of the module.
        names: old name -> new name of the same module.
        stacklevel: 3 if it is the `__getattr__` itself, 4 if that calls it.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}", stacklevel=stacklevel)
        return getattr(importlib.import_module(module), names[name])

    return find


def renamed_arguments(**names: str) -> Callable[[T], T]:
    """Let a function or class accept keyword arguments under their old names.

    Args:
        names: old name -> new name.
    """

    def decorate(target: T) -> T:
        function = vars(target)["__init__"] if isinstance(target, type) else target

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not names.keys().isdisjoint(kwargs):
                for old in names.keys() & kwargs.keys():
                    if names[old] in kwargs:
                        raise TypeError(f"{target.__name__}() got both `{old}` and `{names[old]}`; use `{names[old]}`")
                    warn_renamed(f"{target.__name__}({old}=)", f"{target.__name__}({names[old]}=)")
                    kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        if not isinstance(target, type):
            return wrapper  # type: ignore[return-value]  # the same signature, as `wraps` says
        target.__init__ = wrapper  # type: ignore[misc]  # its own class, no subclass
        return target

    return decorate
