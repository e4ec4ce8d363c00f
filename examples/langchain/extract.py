"""Extract an object from an image: python extract.py [IMAGE]

The response matches the schema with every model. Whether it is correct depends on the model: the bundled one was not
trained to write JSON.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Literal

from langchain_core.messages import HumanMessage
from pydantic import BaseModel, Field

from dashinfer_vlm_langchain import ChatDashInferVLM

PICTURES = Path(__file__).parents[1] / "pictures"


class Scene(BaseModel):
    """The contents of an image."""

    shape: Literal["circle", "square", "triangle", "star", "cross"]
    color: Literal["red", "green", "blue", "yellow", "orange", "purple", "pink", "cyan"]
    count: int = Field(ge=1, le=3)


image = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES / "circle.png"
block = {"type": "image", "base64": base64.b64encode(image.read_bytes()).decode(), "mime_type": "image/png"}
chat = ChatDashInferVLM(temperature=0).with_structured_output(Scene)
print(chat.invoke([HumanMessage([block, {"type": "text", "text": "Describe the picture."}])]).model_dump_json())
