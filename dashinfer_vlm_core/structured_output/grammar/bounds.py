"""Limits on schemas, and bounds on values whose schema sets none."""

from __future__ import annotations

MAX_STEPS = 100_000
"""Maximum number of steps to compile the schemas of one request: parts with their keywords, values, and comparisons. A
part counts again for each reference to it."""

STEP_CHARACTERS = 256
"""A longer text counts as several steps."""

MAX_NESTING = 64
"""Maximum nesting of a schema with references followed; the compiler is recursive."""

MAX_RULES = 20_000
MAX_RULE_DEPTH = 500
"""Maximum nesting of rules; at a few thousand, llguidance overflows its stack, which ends the process."""

MAX_PATTERN_CHARACTERS = 1024
MAX_PATTERNS = 256
"""Maximum number of different regular expressions and formats of one request; each is compiled once more, alone."""

MAX_RECURSION = 5
"""Maximum depth to which recursive references are followed."""

STRING_CHARACTERS = 4096
"""Maximum length of a string without `maxLength`; with it, `MAX_STRING_CHARACTERS`."""

MAX_STRING_CHARACTERS = 65_536
KEY_CHARACTERS = 64
ARRAY_ITEMS = 256
"""Maximum length of an array without `maxItems`; with it, `MAX_ARRAY_ITEMS`."""

MAX_ARRAY_ITEMS = 4096
EXTRA_PROPERTIES = 64
"""Maximum number of properties of an object in addition to those that its schema names."""

INTEGER_DIGITS = 15
"""Maximum digits before the decimal point of unbounded numbers: such integers are exact in double precision."""

DECIMAL_PLACES = 6
MAX_MULTIPLE_OF = 1024
"""Maximum `multipleOf` with prime factors other than 2 and 5; the time to compile it grows with its value."""

MAX_LISTED_MULTIPLES = 256
MAX_INTEGER_DIGITS = 30
"""Maximum digits of numbers whose schema sets bounds."""

ANY_DEPTH = 6
"""Maximum nesting of arrays and objects in a value without a schema."""

ANY_ITEMS = 64
