"""Texts other than JSON to rules: matches of a regular expression, and given texts."""

from __future__ import annotations

from collections.abc import Iterable

from . import bounds
from .rules import Rules, literal, regex
from .schema_shape import SchemaError

_ESCAPED = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def matching_text(rules: Rules, pattern: str) -> str:
    """Add the rule of the texts that match a regular expression as a whole, of bounded length.

    `^` at its beginning and `$` at its end have no effect.

    Args:
        rules: the rules to add to.
        pattern: the expression, in the syntax of Rust's `regex` without anchors and look-around.

    Returns:
        The name of the rule.

    Raises:
        SchemaError: the expression is not supported.
    """
    bounded = rf"/(.|\n){{0,{bounds.STRING_CHARACTERS}}}/"
    return rules.pattern(f"{regex(_escape(pattern))} & {bounded}", "", is_terminal=True)


def one_of(rules: Rules, texts: Iterable[str]) -> str:
    """Add the rule of the given texts."""
    return rules.terminal(" | ".join(map(literal, dict.fromkeys(texts))))


def _escape(pattern: str) -> str:
    """Return the pattern without anchors at its ends, as it is written between slashes."""
    pattern = pattern.removeprefix("^")
    parts, index = list[str](), 0
    while index < len(pattern):
        length = 2 if pattern[index] == "\\" else 1
        parts.append(pattern[index : index + length])
        index += length
    if parts and parts[-1] == "\\":
        raise SchemaError("", "ends with an incomplete escape: write two backslashes for one")
    if parts and parts[-1] == "$":
        parts.pop()
    return "".join(_ESCAPED.get(part, part) for part in parts)
