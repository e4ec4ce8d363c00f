"""`dashinfer-vlm verify` from a checkout: neither an installation nor its entry points are needed.

Exit codes: 0 all checks passed, 1 a check failed, 2 it cannot run. Nothing is downloaded or installed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dashinfer_vlm_core.plugins import Registry

ROOT = Path(__file__).resolve().parents[1]
MISSING = (
    "The module {name!r} is missing in {python}. Install the package there, or on a machine without a network the"
    " folder of wheels that `scripts/make-wheelhouse` makes elsewhere: see docs/gpu.md."
)


def run() -> int:
    """Run the command, and return the exit code."""
    sys.path[:0] = [str(ROOT), str(ROOT / "adapters"), str(ROOT / "plugins")]
    try:
        from dashinfer_vlm_cli.verify import verify
        from dashinfer_vlm_core.errors import DashInferVLMError

        try:
            verify.main(prog_name="scripts/verify-gpu", obj=built_in_registry())  # click exits with the command's code
        except DashInferVLMError as error:
            print(f"scripts/verify-gpu: {error.message}", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(MISSING.format(name=error.name, python=sys.executable), file=sys.stderr)
    return 2


def built_in_registry() -> Registry:
    """Return the parts whose entry points pyproject.toml lists; those whose extras are missing are not verified."""
    from dashinfer_vlm_core.plugins import Registry

    registry = Registry()
    for name, module in read_entry_points().items():
        with contextlib.suppress(ModuleNotFoundError):
            registry.add_plugin(importlib.import_module(module), name=name)
    return registry


def read_entry_points() -> dict[str, str]:
    """Return the modules of the built-in plugins, by name."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["entry-points"]["dashinfer_vlm"])


if __name__ == "__main__":
    sys.exit(run())
