"""A tiny Qwen2-VL that was trained from scratch on drawn shapes, and everything that made it.

Importing this package is free of torch: whoever only wants the folder of the checkpoint pays for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dashinfer_vlm_core import hookimpl

__all__ = ["CHECKPOINT", "register_models"]

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the trained model in the published Qwen2-VL file layout."""


@hookimpl
def register_models(register: Callable[[str, Path], None]) -> None:
    register("demo", CHECKPOINT)
