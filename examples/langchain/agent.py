"""An agent with a tool that looks at pictures: python agent.py FOLDER QUESTION

The bundled model calls no tools by itself, so that its part is played here; the engine, the agent and the tool are
real. With a checkpoint that was trained on tools, the agent's model is `ChatDashInferVLM(model="...")`.
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

folder, question = Path(sys.argv[1]), sys.argv[2]
eyes = ChatDashInferVLM(temperature=0)


@tool
def look(picture: str) -> str:
    """Says what the picture of that name shows."""
    data = base64.b64encode((folder / Path(picture).name).read_bytes()).decode()
    block = {"type": "image", "base64": data, "mime_type": "image/png"}
    return eyes.invoke([HumanMessage([block, {"type": "text", "text": "Describe the picture."}])]).text


call = json.dumps({"name": "look", "arguments": {"picture": "circle.png"}})
with scripted_engine(f"<tool_call>\n{call}\n</tool_call>", "I looked: there is a circle.") as engine:
    agent = create_agent(ChatDashInferVLM(engine=engine), tools=[look])
    for message in agent.invoke({"messages": [HumanMessage(question)]})["messages"]:
        print(f"{message.type}: {message.text or [call['args'] for call in message.tool_calls]}")
