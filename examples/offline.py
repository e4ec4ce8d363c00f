"""Ask the bundled model about pictures in this process: python offline.py PICTURE..."""

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
    for path, answer in zip(sys.argv[1:], vlm.chat(conversations, SamplingParams(temperature=0)), strict=True):
        print(f"{path}: {answer.error or answer.outputs[0].text}")
