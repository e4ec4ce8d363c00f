"""Two pictures, asked about at once and then together: python compare.py FIRST SECOND QUESTION"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage

from dashinfer_vlm_langchain import ChatDashInferVLM


def block(path: str) -> dict[str, str]:
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return {"type": "image", "base64": data, "mime_type": "image/png"}


def ask(question: str, *paths: str) -> list[HumanMessage]:
    return [HumanMessage([*map(block, paths), {"type": "text", "text": question}])]


*paths, question = sys.argv[1:]
chat = ChatDashInferVLM(temperature=0)
for answer in chat.batch([ask("Describe the picture.", path) for path in paths]):  # decoded side by side
    print(answer.text)
print(chat.invoke(ask(question, *paths)).text)
