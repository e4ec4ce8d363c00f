"""Compile the C kernels when the package is installed or a wheel is built: hatchling calls this for each wheel.

Without a compiler, and on other platforms than Linux on x86-64, the wheel is pure Python.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("plugins", "dashinfer_vlm_cpu")


class KernelsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        module = runpy.run_path(str(Path(self.root, KERNELS, "build.py")))
        if module["build"]() and version == "standard":  # an editable installation imports the source folders
            build_data["artifacts"].append(f"/{KERNELS / module['LIBRARY'].name}")
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
