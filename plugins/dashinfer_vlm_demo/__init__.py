"""The bundled model: a tiny checkpoint, trained from scratch on synthetic shapes (`training/`, not in the wheel)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dashinfer_vlm_core import hookimpl

if TYPE_CHECKING:
    from dashinfer_vlm_core.plugins.hookspecs import RegisterModel

__all__ = ["CHECKPOINT", "register_models"]

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the trained model, in its family's published file layout."""


DESCRIPTION = (
    "A tiny model to try the API with. It knows five shapes (circle, square, triangle, star, cross) in eight colors"
    " (red, orange, yellow, green, cyan, blue, purple, pink), where they are, and which way they move in short videos."
)
EXAMPLE_PROMPTS = ("Describe the picture.", "Where is the star?", "Which way does the circle move?")


@hookimpl
def register_models(register: RegisterModel) -> None:
    register("demo", CHECKPOINT, description=DESCRIPTION, example_prompts=EXAMPLE_PROMPTS)
