"""Add prebuilt kernels to a wheel: hatchling calls this for each wheel that it builds.

scripts/build_wheel.py sets the variables. Without them, as in `pip install .`, the wheel is pure Python and needs no
compiler.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltKernels(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = os.environ.get("WHEEL_KERNELS")
        if library and version == "standard":  # not "editable": developers change the sources
            build_data["force_include"][library] = "dashinfer_vlm_cpu/libkernels.so"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{os.environ['WHEEL_PLATFORM']}"
