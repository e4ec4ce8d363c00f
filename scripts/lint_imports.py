"""Check the import contracts of pyproject.toml: `python scripts/lint_imports.py`.

The packages that contracts are about are found by their folders, so that a new one is checked without being listed.
"""

from __future__ import annotations

import configparser
import sys
import tempfile
from pathlib import Path
from typing import Any

from importlinter.cli import lint_imports

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "PACKAGES"


def main() -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".ini", encoding="utf-8") as file:
        write_configuration(ROOT).write(file)
        file.flush()
        return int(lint_imports(config_filename=file.name))


def write_configuration(root: Path) -> configparser.ConfigParser:
    """Return the settings and contracts of a checkout in the form of an INI file."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    packages = find_packages(root)
    contracts = settings.pop("contracts")
    parser = configparser.ConfigParser(interpolation=None)
    parser["importlinter"] = _options(settings, packages)
    for number, contract in enumerate(contracts):
        parser[f"importlinter:contract:{number}"] = _options(contract, packages)
    return parser


def find_packages(root: Path) -> list[str]:
    """Return the names of the packages in `adapters/` and `plugins/`."""
    return [
        file.parent.name for folder in ("adapters", "plugins") for file in sorted((root / folder).glob("*/__init__.py"))
    ]


def _options(values: dict[str, Any], packages: list[str]) -> dict[str, str]:
    return {name: _as_text(value, packages) for name, value in values.items()}


def _as_text(value: Any, packages: list[str]) -> str:
    if not isinstance(value, list):
        return str(value)
    return "\n".join(line for item in value for line in (packages if item == PLACEHOLDER else [item]))


if __name__ == "__main__":
    sys.exit(main())
