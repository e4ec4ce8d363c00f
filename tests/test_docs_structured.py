"""The page on structured output: its programs print what it says, and its bounds are those of the code."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from dashinfer_vlm_core import forms
from dashinfer_vlm_core.grammar import bounds
from dashinfer_vlm_core.grammar.schema_shape import NOT_GUARANTEED
from dashinfer_vlm_core.schema import output, request

PAGE = Path(__file__).parents[1] / "docs" / "structured.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_programs_print_what_the_page_says():
    programs = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for program in programs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, str(PAGE), "exec", dont_inherit=True), names)
        assert printed.getvalue().splitlines() == re.findall(r"^\s*print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert len(programs) > 5


@pytest.mark.parametrize(
    "said",
    [
        f"{bounds.STRING_CHARACTERS:,} characters (256 with",
        f"{bounds.MAX_STRING_CHARACTERS:,} by `maxLength`",
        f"{bounds.ARRAY_ITEMS} items",
        f"{bounds.MAX_ARRAY_ITEMS:,} by `maxItems`",
        f"{bounds.EXTRA_PROPERTIES}, of names up to {bounds.KEY_CHARACTERS} characters",
        f"{bounds.INTEGER_DIGITS} digits before the point, {bounds.DECIMAL_PLACES} behind it",
        f"bounds below 1e{bounds.MAX_INTEGER_DIGITS}",
        f"{bounds.MAX_RECURSION} within each other",
        f"{bounds.ANY_DEPTH} deep, {bounds.ANY_ITEMS} items each",
        f"{output.MAX_SCHEMA_BYTES // 1024} KiB and {output.MAX_SCHEMA_DEPTH} levels",
        f"a `pattern` {bounds.MAX_PATTERN_CHARACTERS:,} characters",
        f"at most {output.MAX_TOOLS} tools",
        f"there are up to {forms.MAX_CALLS}",
        f"`n` is {request.MAX_ANSWERS} at most",
    ],
)
def test_bounds_are_those_of_the_code(said):
    assert said in " ".join(TEXT.split())


def test_what_is_refused_is_named():
    for keyword in ("not", "if", "patternProperties", "uniqueItems", "contains", "dependentRequired"):
        assert keyword in NOT_GUARANTEED
        assert f"`{keyword}`" in TEXT
