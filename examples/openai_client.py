"""Ask a running server (`dashinfer-vlm serve`) about a picture: python openai_client.py PICTURE [QUESTION]"""

from __future__ import annotations

import base64
import mimetypes
import os
import sys
from pathlib import Path

import openai

picture = Path(sys.argv[1])
question = sys.argv[2] if len(sys.argv) > 2 else "What is this?"
kind = mimetypes.guess_type(picture.name)[0]
data = base64.b64encode(picture.read_bytes()).decode()
messages = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}},
            {"type": "text", "text": question},
        ],
    }
]

client = openai.OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="not needed")
for chunk in client.chat.completions.create(model="model", messages=messages, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
