"""Read a checkpoint's JSON files, with errors that name the file and the field. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointError

CONFIG = "config.json"
GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonFields:
    """An object of a JSON file. Errors name the file and the field.

    Attributes:
        file: the file.
        values: its members; null counts as absent.
        prefix: path of the object in the file, ending in a dot, or empty.
    """

    file: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def fail(self, name: str, problem: str, step: str = "Download the published file again.") -> NoReturn:
        """Raise a `CheckpointError` that names the file and the field."""
        raise CheckpointError(f"{self.file}: `{self.prefix}{name}` {problem}. {step}")

    def fail_value(self, name: str, requirement: str) -> NoReturn:
        """Raise a `CheckpointError` for a value that is missing, or does not meet a requirement (`must be true`)."""
        value = self.get(name)
        self.fail(name, "is missing" if value is None else f"{requirement}, got {value!r}")

    def get(self, name: str) -> Any:
        """Return the value, or None if it is absent or null."""
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer, or a token id of 0 or more."""
        value = default if self.get(name) is None else self.get(name)
        if type(value) is not int or value < (0 if name.endswith("_token_id") else 1):
            self.fail_value(name, "must be a positive integer")
        return value

    def number(self, name: str) -> float:
        """Return a positive finite number."""
        value = self.get(name)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.fail_value(name, "must be a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean, false if it is absent."""
        value = self.get(name)
        if value not in (None, True, False):
            self.fail_value(name, "must be true or false")
        return bool(value)

    def triple(self, name: str) -> tuple[Any, Any, Any]:
        """Return three positive numbers."""
        value = self.get(name)
        numbers = isinstance(value, list) and all(type(item) in (int, float) and item > 0 for item in value)
        if not numbers or len(value) != 3:
            self.fail_value(name, "must be three positive numbers")
        return value[0], value[1], value[2]

    def integers(self, name: str) -> tuple[int, int, int]:
        """Return three positive integers."""
        values = self.triple(name)
        if any(type(item) is not int for item in values):
            self.fail_value(name, "must be three positive integers")
        return values

    def with_defaults(self, defaults: Mapping[str, Any]) -> JsonFields:
        """Return these members, and those of `defaults` that are absent."""
        present = {name: value for name, value in self.values.items() if value is not None}
        return replace(self, values={**defaults, **present})

    def section(self, name: str) -> JsonFields:
        """Return a member that is an object."""
        value = self.get(name)
        if not isinstance(value, dict):
            self.fail_value(name, "must be an object")
        return JsonFields(file=self.file, values=value, prefix=f"{self.prefix}{name}.")


def read_fields(file: Path) -> JsonFields:
    """Read a JSON file that contains an object.

    Raises:
        CheckpointError: it is missing or is not a JSON object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing. Set `model` to a folder with a complete checkpoint.") from None
    except (ValueError, RecursionError) as error:  # also if it is not UTF-8
        raise CheckpointError(f"{file} is not valid JSON: {error}. Copy or download it again.") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Copy or download it again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is not a JSON object. Copy or download it again.")
    return JsonFields(file=file, values=values)
