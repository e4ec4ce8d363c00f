"""The bundled model: a tiny checkpoint, trained from scratch on drawn shapes (`training/`, not in the wheel)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dashinfer_vlm_core import hookimpl

__all__ = ["CHECKPOINT", "register_models"]

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the trained model, in the published file layout of its family."""


@hookimpl
def register_models(register: Callable[[str, Path], None]) -> None:
    register("demo", CHECKPOINT)
