"""Check the import contracts of pyproject.toml, and that no import is circular: `python scripts/lint_imports.py`.

The packages that contracts are about are found by their folders, so that a new one is checked without being listed.
import-linter 2.16 has a contract against circles, but requires a version of rich that LiteLLM's proxy does not allow.
"""

from __future__ import annotations

import configparser
import sys
import tempfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
from importlinter.cli import lint_imports

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "PACKAGES"


def main() -> int:
    configurations = list(write_configurations(ROOT))
    failed = [_lint(configuration) for configuration in configurations]
    circles = list(find_circles(configurations[0]["importlinter"]["root_packages"].split()))
    print("\n".join(["Circular imports:", *circles] if circles else ["No import is circular."]))
    return int(any(failed) or bool(circles))


def _lint(configuration: configparser.ConfigParser) -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".ini", encoding="utf-8") as file:
        configuration.write(file)
        file.flush()
        # The cache compares the times of files, which can be equal after `git cherry-pick`.
        return int(lint_imports(config_filename=file.name, no_cache=True))


def find_circles(packages: list[str]) -> Iterator[str]:
    """Describe circles of modules, and of the modules and packages within a package; imports for types count."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    try:
        TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
    except CycleError as error:
        yield " <- ".join(error.args[1])
    for name in sorted(graph.modules):
        for importer, imported in sorted(graph.nominate_cycle_breakers(name)):
            yield f"in {name}: {importer} -> {imported} closes a circle"


def write_configurations(root: Path) -> Iterator[configparser.ConfigParser]:
    """Yield the settings and contracts of a checkout in the form of INI files.

    Imports for types count, except for contracts with `at_runtime`: import-linter has this setting for all contracts of
    a file together.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    packages = find_packages(root)
    groups: dict[bool, list[dict[str, Any]]] = {}
    for contract in settings.pop("contracts"):
        groups.setdefault(contract.pop("at_runtime", False), []).append(contract)
    for at_runtime, group in groups.items():
        parser = configparser.ConfigParser(interpolation=None)
        parser["importlinter"] = _options({**settings, "exclude_type_checking_imports": at_runtime}, packages)
        for number, contract in enumerate(group):
            parser[f"importlinter:contract:{number}"] = _options(contract, packages)
        yield parser


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
