"""Lark rules, and the work that the schemas of one request may cost, counted in steps: the same on each machine."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import bounds
from .schema_shape import SchemaError

_NAME = re.compile(r"\b[rT][0-9]+\b")


class TooComplex(SchemaError):
    """The schemas of a request need too many steps, or its grammar has too many or too deep rules."""

    def __init__(self) -> None:
        super().__init__("", "makes the request too complex: make its schemas smaller, or use fewer references")


class Steps:
    """Counts the steps of one request.

    Args:
        check: called with each count; raises an error to end the work.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._count = 0
        self._depth = 0

    @contextlib.contextmanager
    def nested(self) -> Iterator[None]:
        """Enter a part of a schema.

        Raises:
            SchemaError: parts nest too deeply; their compiler is recursive.
        """
        self._depth += 1
        try:
            if self._depth > bounds.MAX_NESTING:
                raise SchemaError("", f"nests deeper than {bounds.MAX_NESTING} levels: make it flatter")
            yield
        finally:
            self._depth -= 1

    def count(self, number: int = 1) -> None:
        """Count what takes microseconds: a part of a schema, a value that is compared, a piece of a text.

        Raises:
            TooComplex: the request has no steps left.
        """
        self._check()
        self._count += number
        if self._count > bounds.MAX_STEPS:
            raise TooComplex

    def count_text(self, text: str) -> None:
        self.count(1 + len(text) // bounds.STEP_CHARACTERS)

    def count_keywords(self, schema: Mapping[str, Any]) -> None:
        """Count the keywords of a schema with the elements of their values, but not what these contain."""
        self.count(len(schema) + sum(len(value) for value in schema.values() if isinstance(value, (list, Mapping))))

    def count_values(self, value: object) -> list[Mapping[str, Any]]:
        """Count all values in parsed JSON, before they are compared or written; return the objects among them."""
        objects: list[Mapping[str, Any]] = []
        waiting = [value]
        while waiting:
            part = waiting.pop()
            self.count_text(part if isinstance(part, str) else "")
            if isinstance(part, Mapping):
                objects.append(part)
                waiting += [*part.keys(), *part.values()]
            elif isinstance(part, list):
                waiting += part
        return objects


class Rules:
    """Named rules in llguidance's dialect of Lark; equal rules are stored once.

    Args:
        compiles: returns whether a grammar compiles. Each rule with a regular expression of the request is passed to
            it, alone, when it is added. None accepts all of them; a grammar with an invalid one does not compile.
        steps: counts the work; defaults to a new count.

    Attributes:
        steps: what schemas may still cost.
    """

    def __init__(self, compiles: Callable[[str], bool] | None = None, steps: Steps | None = None) -> None:
        self.steps = Steps() if steps is None else steps
        self._compiles = compiles
        self._patterns: dict[str, bool] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._depths: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, body: str) -> str:
        """Add a rule with this body; return its name."""
        return self._add(body, "r")

    def terminal(self, body: str) -> str:
        """Add a rule that the lexer matches as one token; return its name. Only such rules may contain `&` and `~`."""
        return self._add(body, "T")

    def lazy(self, body: str) -> str:
        """Add a rule that the lexer matches as one token, as short as possible; return its name."""
        return self._add(body, "r", "[lazy]")

    def one_of(self, texts: Iterable[str]) -> str:
        """Add the rule of the given texts; return its name."""
        return self.terminal(" | ".join(map(literal, dict.fromkeys(texts))))

    def pattern(self, body: str, path: str, *, is_terminal: bool = False) -> str:
        """Add a rule with a regular expression or a format of the request, which stands at `path`; return its name.

        Raises:
            SchemaError: it is not supported, or the request has too many of them.
        """
        name = "T" if is_terminal else "r"
        if body not in self._patterns:
            self.steps.count()
            if len(self._patterns) >= bounds.MAX_PATTERNS:
                raise SchemaError(
                    path, f"is one of more than {bounds.MAX_PATTERNS} regular expressions and formats: use fewer"
                )
            self._patterns[body] = self._compiles is None or self._compiles(f"start: {name}\n{name}: {body}")
        if not self._patterns[body]:
            raise SchemaError(
                path,
                "is not a supported regular expression, matches no text that is allowed there, or cannot be compiled"
                " within the limits: make it simpler",
            )
        return self._add(body, name)

    def discard(self, count: int) -> None:
        """Remove the rules that were added last, so that `count` are left."""
        for key in list(self._names)[count:]:
            del self._depths[self._names.pop(key)]

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
        if len(self._names) >= bounds.MAX_RULES or depth > bounds.MAX_RULE_DEPTH:
            raise TooComplex
        name = self._names[body, option] = f"{kind}{len(self._names)}"
        self._depths[name] = depth
        return name


def literal(text: str) -> str:
    """Return a rule body that matches exactly `text`."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """Return a rule body that matches a regular expression; `/` must be escaped in it."""
    return f"/{pattern}/"
