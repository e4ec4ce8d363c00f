"""An agent with a tool that describes images: python agent.py [FOLDER [PROMPT]]

The bundled model was not trained to call tools, so this example scripts the agent's responses. Engine, agent and tool
are real. With a checkpoint that was trained on tools, use `ChatDashInferVLM(model="...")` for the agent.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_langchain import ChatDashInferVLM

PICTURES = Path(__file__).parents[1] / "pictures"

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
prompt = sys.argv[2] if len(sys.argv) > 2 else "What is in circle.png?"
vision_model = ChatDashInferVLM(temperature=0)


@tool
def describe_image(name: str) -> str:
    """Describe the image file with the given name."""
    data = base64.b64encode((folder / Path(name).name).read_bytes()).decode()
    block = {"type": "image", "base64": data, "mime_type": "image/png"}
    return vision_model.invoke([HumanMessage([block, {"type": "text", "text": "Describe the picture."}])]).text


call = json.dumps({"name": "describe_image", "arguments": {"name": "circle.png"}})
with scripted_engine(f"<tool_call>\n{call}\n</tool_call>", "I looked: there is a circle.") as engine:
    agent = create_agent(ChatDashInferVLM(engine=engine), tools=[describe_image])
    for message in agent.invoke({"messages": [HumanMessage(prompt)]})["messages"]:
        print(f"{message.type}: {message.text or [call['args'] for call in message.tool_calls]}")
