"""Send an image to a running server (`dashinfer-vlm serve`): python openai_client.py [IMAGE [PROMPT]]"""

from __future__ import annotations

import base64
import mimetypes
import os
import sys
from pathlib import Path

import openai

PICTURES = Path(__file__).parent / "pictures"

image = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES / "circle.png"
prompt = sys.argv[2] if len(sys.argv) > 2 else "Describe the picture."
kind = mimetypes.guess_type(image.name)[0]
data = base64.b64encode(image.read_bytes()).decode()
messages = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}},
            {"type": "text", "text": prompt},
        ],
    }
]

client = openai.OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),  # a server without keys accepts any
)
for chunk in client.chat.completions.create(model="model", messages=messages, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
