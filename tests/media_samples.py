"""The sample files of `media_workers/self_test.py`: a small file of each image format and video codec, and a document.

    python -m tests.media_samples

writes them again. They are committed, because encoders start threads and take longer than decoders.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from dashinfer_vlm_core.media.image import FORMATS
from dashinfer_vlm_core.media_workers.self_test import SAMPLES
from tests.pdfs import document

VIDEOS = {
    "h264.mp4": ("libx264", "yuv420p"),
    "hevc.mkv": ("libx265", "yuv420p"),
    "vp8.webm": ("libvpx", "yuv420p"),
    "vp9.webm": ("libvpx-vp9", "yuv420p"),
    "av1.webm": ("libsvtav1", "yuv420p"),
    "mpeg4.avi": ("mpeg4", "yuv420p"),
    "mjpeg.mov": ("mjpeg", "yuvj420p"),
    "h263.3gp": ("h263", "yuv420p"),
    "mpeg1.mkv": ("mpeg1video", "yuv420p"),
    "mpeg2.ts": ("mpeg2video", "yuv420p"),
    "prores.mov": ("prores_ks", "yuv422p10le"),
}
"""Encoder and pixel format of each file; its suffix is the container."""
CONTAINERS = {"mkv": "matroska", "ts": "mpegts"}
WIDTH, HEIGHT = 128, 96  # the smallest size of H.263
FRAMES = 5


def encode_image(codec: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 100, 50)).save(buffer, codec)
    return buffer.getvalue()


def encode_video(name: str) -> bytes:
    import av

    codec, pixel_format = VIDEOS[name]
    suffix = name.rpartition(".")[2]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=CONTAINERS.get(suffix, suffix)) as file:
        stream = file.add_stream(
            codec, rate=25, options={"x265-params": "log-level=none:info=0"} if codec == "libx265" else {}
        )
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, pixel_format
        for index in range(FRAMES):
            pixels = np.full((HEIGHT, WIDTH, 3), 40 * index + 60, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=pixel_format)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def main() -> None:
    SAMPLES.mkdir(exist_ok=True)
    files = {f"image.{codec.lower()}": encode_image(codec) for codec in FORMATS}
    files["document.pdf"] = document("Sample", size=(72, 36), font="Sample")  # a font that is searched for
    for name, data in {**files, **{name: encode_video(name) for name in VIDEOS}}.items():
        (SAMPLES / name).write_bytes(data)


if __name__ == "__main__":
    main()
