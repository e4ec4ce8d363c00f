"""A chain with a prompt template: python chain.py [IMAGE [SHAPE]]"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from dashinfer_vlm_langchain import ChatDashInferVLM

PICTURES = Path(__file__).parents[1] / "pictures"

prompt = ChatPromptTemplate.from_messages(
    [
        (
            "user",
            [
                {"type": "image", "base64": "{image}", "mime_type": "image/png"},
                {"type": "text", "text": "What colour is the {shape}?"},
            ],
        )
    ]
)
chain = prompt | ChatDashInferVLM(temperature=0) | StrOutputParser()
image = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES / "stone.png"
shape = sys.argv[2] if len(sys.argv) > 2 else "triangle"
print(chain.invoke({"image": base64.b64encode(image.read_bytes()).decode(), "shape": shape}))
