"""`dashinfer-vlm verify` from a checkout: neither an installation nor its entry points are needed.

Exit codes: 0 all checks passed, 1 a check failed, 2 it cannot run. Nothing is downloaded or installed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dashinfer_vlm_core.plugins import Registry

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = {
    "kernels": "dashinfer_vlm_core.kernels",
    "cpu": "dashinfer_vlm_cpu",
    "torch": "dashinfer_vlm_torch",
    "dashinfer": "dashinfer_vlm_core.decoders.dashinfer",
    "qwen2_vl": "dashinfer_vlm_core.models.qwen2_vl",
    "qwen2_5_vl": "dashinfer_vlm_qwen2_5_vl",
    "qwen3_vl": "dashinfer_vlm_qwen3_vl",
}
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
    """Return the parts that are verified, registered by hand."""
    from dashinfer_vlm_core.plugins import Registry

    registry = Registry()
    for name, module in PLUGINS.items():
        registry.add_plugin(importlib.import_module(module), name=name)
    return registry


if __name__ == "__main__":
    sys.exit(run())
