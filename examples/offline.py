"""Describe images with the bundled model in this process: python offline.py [IMAGE...]"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from dashinfer_vlm_core import VLM, SamplingParams

PICTURES = Path(__file__).parent / "pictures"

paths = sys.argv[1:] or [PICTURES / "circle.png", PICTURES / "pair.png"]
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
    for path in paths
]
with VLM("demo") as vlm:
    for path, output in zip(paths, vlm.chat(conversations, SamplingParams(temperature=0)), strict=True):
        print(f"{Path(path).name}: {output.error or output.outputs[0].text}")
