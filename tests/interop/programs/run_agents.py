"""Run an agent of the OpenAI Agents SDK with a tool, streamed and not, and with structured output."""

import asyncio
import json
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

calls = []


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    calls.append(city)
    return f"Sunny in {city}."


class Answer(BaseModel):
    """An answer."""

    a: int


async def main(request: dict) -> dict:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=request["base_url"], api_key="none", max_retries=0))
    agent = Agent(name="Helper", instructions="Use the tool.", model="tiny", tools=[weather])
    plain = await Runner.run(agent, request["question"])
    continued = await Runner.run(agent, "And then?", previous_response_id=plain.last_response_id)
    streamed = Runner.run_streamed(agent, request["question"])
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    image = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": request["image"]}]
    typed = Agent(name="Typed", model="tiny", output_type=Answer)
    answer = await Runner.run(typed, [{"role": "user", "content": image}])
    return {
        "plain": plain.final_output,
        "continued": continued.final_output,
        "streamed": streamed.final_output,
        "deltas": "".join(deltas),
        "calls": calls,
        "answer": answer.final_output.a,
        "input_tokens": [run.context_wrapper.usage.input_tokens for run in (plain, continued, answer)],
    }


if __name__ == "__main__":
    result = asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(json.dumps(result))
