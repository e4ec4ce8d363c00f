"""Describe two images in one batch, then compare them: python compare.py [IMAGE IMAGE PROMPT]"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage

from dashinfer_vlm_langchain import ChatDashInferVLM

PICTURES = Path(__file__).parents[1] / "pictures"


def block(path: str | Path) -> dict[str, str]:
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return {"type": "image", "base64": data, "mime_type": "image/png"}


def messages(prompt: str, *paths: str | Path) -> list[HumanMessage]:
    return [HumanMessage([*map(block, paths), {"type": "text", "text": prompt}])]


*paths, prompt = sys.argv[1:] or (PICTURES / "circle.png", PICTURES / "pair.png", "Which picture has the star?")
chat = ChatDashInferVLM(temperature=0)
for response in chat.batch([messages("Describe the picture.", path) for path in paths]):  # decoded in one batch
    print(response.text)
print(chat.invoke(messages(prompt, *paths)).text)
