"""Draw the images and the video of the examples: `python -m training.gallery FOLDER`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from training.drawing import Backdrop, Rgb, Scene, SceneObject, paint, render, render_video

WHITE = Backdrop(rgb=(250, 250, 248))
NIGHT = Backdrop(rgb=(22, 24, 34), slope=18, slope_angle=1.2)
PAPER = Backdrop(rgb=(222, 220, 212), slope=30, slope_angle=0.4, cloud=7, field=3)
STONE = Backdrop(rgb=(150, 152, 150), cloud=22, colored=True, field=9, offset=(40, 80))
MEADOW = Backdrop(
    rgb=(150, 180, 215), slope=30, slope_angle=1.6, cloud=34, grain=8, colored=True, field=5,
    horizon=(0.55, 0.15, (70, 110, 60)),
)  # fmt: skip
FRAMES, FRAMES_PER_SECOND = 8, 4


def item(words: str, x: float, y: float, radius: float, tilt: float = 0.05) -> SceneObject:
    """Create an object from its color and shape, such as "red circle", centered at the pixel (x, y)."""
    color, shape = words.split()
    rgb: Rgb = paint(color, 0, 0.88, 0.92)
    return SceneObject(color=color, shape=shape, x=x, y=y, radius=radius, tilt=tilt, rgb=rgb)


def scene(width: int, height: int, backdrop: Backdrop, *objects: SceneObject) -> Scene:
    return Scene(width=width, height=height, objects=objects, backdrop=backdrop)


IMAGES = {
    "circle.png": scene(224, 224, WHITE, item("red circle", 62, 60, 36)),
    "pair.png": scene(320, 240, NIGHT, item("yellow star", 85, 128, 44), item("purple square", 235, 118, 42)),
    "three.png": scene(
        384, 256, PAPER, item("green triangle", 66, 160, 42), item("blue circle", 196, 84, 40),
        item("orange cross", 318, 170, 42),
    ),
    "stone.png": scene(240, 320, STONE, item("pink cross", 120, 84, 44), item("cyan triangle", 128, 236, 46)),
    "before.png": scene(256, 256, WHITE, item("blue square", 74, 80, 42), item("green star", 182, 176, 46)),
    "after.png": scene(256, 256, WHITE, item("red square", 74, 80, 42), item("green star", 182, 176, 46)),
    "meadow.png": scene(320, 240, MEADOW),
}  # fmt: skip


def video() -> list[Image.Image]:
    """Render a blue circle that moves to the right."""
    steps = np.linspace(24, 88, FRAMES)
    mover = item("blue circle", 0, 58, 18)
    return render_video([scene(112, 112, WHITE, replace(mover, x=float(x))) for x in steps])


def write_video(path: Path, frames: Sequence[Image.Image]) -> None:
    """Write an mp4 file with H.264 in high quality; the file is small anyway."""
    import av  # an optional dependency that only this function needs

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(FRAMES_PER_SECOND), options={"crf": "12"})
        stream.width, stream.height, stream.pix_fmt = frames[0].width, frames[0].height, "yuv420p"
        for frame in frames:
            image = av.VideoFrame.from_image(frame)  # type: ignore[no-untyped-call]  # av's types are partial
            container.mux(stream.encode(image))
        container.mux(stream.encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.gallery", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, shown in IMAGES.items():
        render(shown).save(folder / name, optimize=True)
    write_video(folder / "moving.mp4", video())


if __name__ == "__main__":
    main()
