"""Offer tools in the prompt. This model does not call them: its response is the same as without tools.

As in `out_of_scope`, some words do not occur in training.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from dashinfer_vlm_core.tokenization.hermes import render_tools_as_text

Tool = dict[str, Any]

MOST = 4
"""Maximum number of tools in a prompt."""

_VERBS = ("get", "search", "create", "send", "list", "delete", "book", "update", "convert", "play", "look up", "set")
_NOUNS = (
    "weather", "order", "user", "calendar event", "email", "file", "stock price", "ticket", "song", "map", "room",
    "task", "picture", "currency", "news", "color", "time", "customer", "web page", "invoice",
)  # fmt: skip
_PARAMETERS = (
    "city", "query", "date", "name", "limit", "id", "unit", "path", "language", "message", "location", "start",
    "amount", "url", "customer_id", "category",
)  # fmt: skip
_TYPES = ("string", "string", "string", "integer", "number", "boolean")
_UNSEEN_VERBS = ("find", "calculate", "schedule", "fetch")
_UNSEEN_NOUNS = ("flight", "restaurant", "distance", "document", "reminder", "device")
_UNSEEN_PARAMETERS = ("destination", "number_of_people", "temperature", "title", "recipient")


def offer(rng: random.Random, *, unseen: bool = False) -> list[Tool]:
    """Create one to `MOST` tools in OpenAI's format; `unseen` for evaluation."""
    tools = [_tool(rng, unseen) for _ in range(rng.randint(1, MOST))]
    return list({tool["function"]["name"]: tool for tool in tools}.values())


def system_message(system: str, tools: Sequence[Tool]) -> str:
    """Return a system message with a description of the tools, as this project's engine renders it."""
    content = render_tools_as_text([{"role": "system", "content": system}], tools)[0]["content"]
    assert isinstance(content, str)
    return content


def _tool(rng: random.Random, unseen: bool) -> Tool:
    verb = rng.choice(_UNSEEN_VERBS if unseen else _VERBS)
    noun = rng.choice(_UNSEEN_NOUNS if unseen else _NOUNS)
    words = [*verb.split(), *noun.split()]
    name = rng.choice(("_".join(words), words[0] + "".join(map(str.title, words[1:])), "_".join(noun.split())))
    properties = dict(_property(rng, unseen) for _ in range(rng.randint(0, 3)))
    parameters: Tool = {"type": "object", "properties": properties}
    if properties and rng.random() < 0.7:
        parameters["required"] = list(properties)[: rng.randint(1, len(properties))]
    function: Tool = {"name": name}
    if rng.random() < 0.8:
        function["description"] = rng.choice(("{} the {}.", "{} a {}", "{} the current {} of a user.")).format(
            verb.capitalize(), noun
        )
    return {"type": "function", "function": function | {"parameters": parameters}}


def _property(rng: random.Random, unseen: bool) -> tuple[str, Tool]:
    name = rng.choice(_UNSEEN_PARAMETERS if unseen else _PARAMETERS)
    schema: Tool = {"type": rng.choice(_TYPES)}
    if rng.random() < 0.3:
        schema["description"] = f"The {name.replace('_', ' ')}"
    return name, schema
