"""Lark rules in the making."""

from __future__ import annotations

import json
import re

from .bounds import MAX_RULE_DEPTH, MAX_RULES

_NAME = re.compile(r"\b[rT][0-9]+\b")


class TooManyRules(Exception):
    """The grammar outgrew its bounds, in number or in depth."""


class Rules:
    """Named rules, in llguidance's dialect of Lark; equal ones are one.

    Attributes:
        patterns: the rules that regular expressions of a request became, by field and place: only a library that
            compiles them finds out what is wrong with them.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._depths: dict[str, int] = {}
        self.patterns: dict[tuple[str, str], str] = {}

    def add(self, body: str) -> str:
        """The name of the rule with this body."""
        return self._named(body, "r")

    def terminal(self, body: str) -> str:
        """The name of a rule that the lexer matches as one piece: only such bodies may hold `&` and `~`."""
        return self._named(body, "T")

    def lazy(self, body: str) -> str:
        """The name of a rule that the lexer matches as one piece, ending as soon as it can."""
        return self._named(body, "r", "[lazy]")

    def either(self, bodies: list[str]) -> str:
        """The name of a rule that is one of `bodies`; at least one."""
        return bodies[0] if len(bodies) == 1 else self.add(" | ".join(dict.fromkeys(bodies)))

    def text(self, start: str) -> str:
        """The whole grammar, from the rule or body `start` on."""
        rules = (f"{name}{option}: {body}" for (body, option), name in self._names.items())
        return "\n".join([f"start: {start}", *rules])

    def _named(self, body: str, kind: str, option: str = "") -> str:
        if (body, option) in self._names:
            return self._names[body, option]
        # What looks like a name within a literal makes the rule no less deep.
        depth = 1 + max((self._depths.get(name, 0) for name in _NAME.findall(body)), default=0)
        if len(self._names) >= MAX_RULES or depth > MAX_RULE_DEPTH:
            raise TooManyRules
        name = self._names[body, option] = f"{kind}{len(self._names)}"
        self._depths[name] = depth
        return name


def literal(text: str) -> str:
    """A piece of a rule's body that matches `text` and nothing else."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A piece of a rule's body that matches a regular expression; `/` must be escaped in it."""
    return f"/{pattern}/"
