"""A chain with a prompt template: python chain.py IMAGE SHAPE"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from dashinfer_vlm_langchain import ChatDashInferVLM

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
image = base64.b64encode(Path(sys.argv[1]).read_bytes()).decode()
print(chain.invoke({"image": image, "shape": sys.argv[2]}))
