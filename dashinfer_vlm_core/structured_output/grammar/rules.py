"""A builder of Lark rules."""

from __future__ import annotations

import json
import re

from .bounds import MAX_RULE_DEPTH, MAX_RULES

_NAME = re.compile(r"\b[rT][0-9]+\b")


class TooManyRules(Exception):
    """The grammar exceeds the maximum number or depth of rules."""


class Rules:
    """Named rules in llguidance's dialect of Lark; equal rules are stored once.

    Attributes:
        patterns: the rules of a request's regular expressions, by field and path in the schema. They are validated
            only when the grammar is compiled.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._depths: dict[str, int] = {}
        self.patterns: dict[tuple[str, str], str] = {}

    def add(self, body: str) -> str:
        """Add a rule with this body; return its name."""
        return self._add(body, "r")

    def terminal(self, body: str) -> str:
        """Add a rule that the lexer matches as one token; return its name. Only such rules may contain `&` and `~`."""
        return self._add(body, "T")

    def lazy(self, body: str) -> str:
        """Add a rule that the lexer matches as one token, as short as possible; return its name."""
        return self._add(body, "r", "[lazy]")

    def either(self, bodies: list[str]) -> str:
        """Return the rule of the alternatives `bodies`, of which there is at least one."""
        return bodies[0] if len(bodies) == 1 else self.add(" | ".join(dict.fromkeys(bodies)))

    def text(self, start: str) -> str:
        """Return the grammar as text, with the rule or body `start` as its start."""
        rules = (f"{name}{option}: {body}" for (body, option), name in self._names.items())
        return "\n".join([f"start: {start}", *rules])

    def _add(self, body: str, kind: str, option: str = "") -> str:
        if (body, option) in self._names:
            return self._names[body, option]
        # A name inside a literal can only overestimate the depth.
        depth = 1 + max((self._depths.get(name, 0) for name in _NAME.findall(body)), default=0)
        if len(self._names) >= MAX_RULES or depth > MAX_RULE_DEPTH:
            raise TooManyRules
        name = self._names[body, option] = f"{kind}{len(self._names)}"
        self._depths[name] = depth
        return name


def literal(text: str) -> str:
    """Return a rule body that matches exactly `text`."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """Return a rule body that matches a regular expression; `/` must be escaped in it."""
    return f"/{pattern}/"
