"""Describe an image through LiteLLM without a server: python in_process.py [IMAGE [PROMPT]]"""

from __future__ import annotations

import base64
import mimetypes
import sys
from pathlib import Path

import litellm

import dashinfer_vlm_litellm

PICTURES = Path(__file__).parents[1] / "pictures"

image = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES / "circle.png"
prompt = sys.argv[2] if len(sys.argv) > 2 else "Describe the picture."
url = f"data:{mimetypes.guess_type(image.name)[0]};base64,{base64.b64encode(image.read_bytes()).decode()}"
content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": prompt}]

dashinfer_vlm_litellm.register()
chunks = litellm.completion(
    "dashinfer_vlm/demo",  # or a checkpoint folder, or a Hugging Face model ID
    messages=[{"role": "user", "content": content}],
    temperature=0,
    stream=True,
)
for chunk in chunks:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
