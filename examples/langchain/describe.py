"""Describe an image without a server: python describe.py [IMAGE [PROMPT]]"""

from __future__ import annotations

import base64
import mimetypes
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage

from dashinfer_vlm_langchain import ChatDashInferVLM

PICTURES = Path(__file__).parents[1] / "pictures"

image = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES / "circle.png"
prompt = sys.argv[2] if len(sys.argv) > 2 else "Describe the picture."
kind = mimetypes.guess_type(image.name)[0] or "image/png"
block = {"type": kind.partition("/")[0], "base64": base64.b64encode(image.read_bytes()).decode(), "mime_type": kind}

chat = ChatDashInferVLM(model="demo", temperature=0)  # or a checkpoint folder, or a Hugging Face model ID
for chunk in chat.stream([HumanMessage([block, {"type": "text", "text": prompt}])]):
    print(chunk.text, end="", flush=True)
print()
