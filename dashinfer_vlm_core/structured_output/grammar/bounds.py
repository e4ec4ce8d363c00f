"""How large a schema may be, and what bounds a value whose schema does not."""

from __future__ import annotations

MAX_STEPS = 20_000
"""Parts of schemas looked at for one grammar; a reference that is followed counts anew, so that none multiply."""

MAX_NESTING = 64
"""How deep parts of a schema stand within each other, references followed: to compile them is to recurse."""

MAX_RULES = 20_000
MAX_RULE_DEPTH = 500
"""How deep rules stand within each other; llguidance overflows its stack, and ends the process, at a few thousands."""

MAX_PATTERN_CHARACTERS = 1024
MAX_RECURSION = 5
"""How often references that lead back to themselves are followed, one within the other."""

STRING_CHARACTERS = 4096
"""Longest string without `maxLength`; `MAX_STRING_CHARACTERS` with it."""

MAX_STRING_CHARACTERS = 65_536
KEY_CHARACTERS = 64
ARRAY_ITEMS = 256
"""Longest array without `maxItems`; `MAX_ARRAY_ITEMS` with it."""

MAX_ARRAY_ITEMS = 4096
EXTRA_PROPERTIES = 64
"""Most properties of an object besides those that its schema names."""

INTEGER_DIGITS = 15
"""Of numbers without bounds, before the point: every such integer is exact in double precision."""

DECIMAL_PLACES = 6
MAX_INTEGER_DIGITS = 30
"""Of numbers with bounds of their own."""

ANY_DEPTH = 6
"""How deep arrays and objects nest where the schema leaves a value free."""

ANY_ITEMS = 64
