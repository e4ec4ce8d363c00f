"""The bundled model: a tiny checkpoint, trained from scratch on synthetic shapes (`training/`, not in the wheel)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dashinfer_vlm_core import hookimpl

__all__ = ["CHECKPOINT", "register_models"]

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the trained model, in its family's published file layout."""


@hookimpl
def register_models(register: Callable[[str, Path], None]) -> None:
    register("demo", CHECKPOINT)
