"""Describe images with the bundled model in this process: python offline.py IMAGE..."""

from __future__ import annotations

import sys

from PIL import Image

from dashinfer_vlm_core import VLM, SamplingParams

conversations = [
    [
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": Image.open(path)},
                {"type": "text", "text": "Describe the picture."},
            ],
        }
    ]
    for path in sys.argv[1:]
]
with VLM("demo") as vlm:
    for path, output in zip(sys.argv[1:], vlm.chat(conversations, SamplingParams(temperature=0)), strict=True):
        print(f"{path}: {output.error or output.outputs[0].text}")
