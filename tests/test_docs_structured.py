"""The structured output page: its examples print the documented output, and its bounds match the code."""

from __future__ import annotations

import pytest

from dashinfer_vlm_core.protocol import output, request
from dashinfer_vlm_core.structured_output import output_grammar, request_grammars
from dashinfer_vlm_core.structured_output.grammar import bounds
from dashinfer_vlm_core.structured_output.grammar.schema_shape import NOT_GUARANTEED
from tests.cases import cases
from tests.pages import check_programs, page_programs, page_text

TEXT = page_text("structured.md")


@pytest.mark.slow
def test_examples_print_documented_output():
    check_programs("structured.md")
    assert len(page_programs("structured.md")) > 5


@cases(
    "said",
    [
        f"{bounds.STRING_CHARACTERS:,} characters (256 with",
        f"{bounds.MAX_STRING_CHARACTERS:,} by `maxLength`",
        f"{bounds.ARRAY_ITEMS} items",
        f"{bounds.MAX_ARRAY_ITEMS:,} by `maxItems`",
        f"{bounds.EXTRA_PROPERTIES}, of names up to {bounds.KEY_CHARACTERS} characters",
        f"{bounds.INTEGER_DIGITS} digits before the point, {bounds.DECIMAL_PLACES} after it",
        f"{bounds.MAX_INTEGER_DIGITS} digits before the point by bounds",
        f"`multipleOf` can be an integer up to {bounds.MAX_MULTIPLE_OF:,}",
        f"at most {bounds.MAX_LISTED_MULTIPLES} multiples between them",
        f"{bounds.MAX_PATTERNS} different values of `pattern` and `format`",
        f"waits for {request_grammars.COMPILE_SECONDS:g} seconds",
        f"{bounds.MAX_RECURSION} levels; deeper values are not generated",
        f"{bounds.ANY_DEPTH} deep, {bounds.ANY_ITEMS} items each",
        f"{output.MAX_SCHEMA_BYTES // 1024} KiB and {output.MAX_SCHEMA_DEPTH} levels",
        f"a `pattern` {bounds.MAX_PATTERN_CHARACTERS:,} characters",
        f"at most {output.MAX_TOOLS} tools",
        f"have at most {output.MAX_GUIDED_CHARACTERS:,} characters, and match at most {bounds.STRING_CHARACTERS:,}",
        f"`choice` has at most {output.MAX_CHOICES:,} texts of up to {output.MAX_GUIDED_CHARACTERS:,} characters",
        f"otherwise at most {output_grammar.MAX_CALLS}",
        f"`n` is {request.MAX_COMPLETIONS} at most",
    ],
)
def test_documented_bounds_match_code(said):
    assert said in " ".join(TEXT.split())


def test_rejected_keywords_are_documented():
    for keyword in ("not", "if", "patternProperties", "uniqueItems", "contains", "dependentRequired"):
        assert keyword in NOT_GUARANTEED
        assert f"`{keyword}`" in TEXT
