"""Long strings are read in slices, with the result of one call at every cut."""

from __future__ import annotations

import hashlib
import random

import pytest

from dashinfer_vlm_core.protocol.base import encodable
from dashinfer_vlm_core.protocol.text_slices import (
    SLICE,
    copy_text,
    count_occurrences,
    digest_text,
    end_without_spaces,
    find_character,
    split_into_slices,
)

TEXTS = ["", ",", "a,b,,c", "%2B%2b%%2B%2", "  a \t\u2003 ", "é中😀,\ud83d\ude00", "," * 20, "x" * 20 + "%2B"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("slice_chars", [1, 2, 3, 7, 100])
def test_slices_give_the_result_of_one_call(text, slice_chars):
    for start in range(len(text) + 1):
        assert "".join(split_into_slices(text, start, slice_chars=slice_chars)) == text[start:]
        assert find_character(text, ",", start, slice_chars=slice_chars) == text.find(",", start)
        assert count_occurrences(text, "%2B", start, slice_chars=slice_chars) == text.count("%2B", start)
        assert end_without_spaces(text, start, slice_chars=slice_chars) == len(text[:start].rstrip())
        for end in range(start, len(text) + 1):
            assert copy_text("p", text, start, end, block_chars=slice_chars) == "p" + text[start:end]


@pytest.mark.parametrize("text", TEXTS)
def test_digest_does_not_depend_on_slices(text):
    expected = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    assert all(digest_text(text, slice_chars=size) == expected for size in (1, 2, 5, SLICE))


def test_lone_surrogate_is_found_in_every_slice():
    text = "é" * (2 * SLICE + 10)
    assert encodable(text) is text
    for index in (0, SLICE - 1, SLICE, 2 * SLICE + 9, random.Random(1).randrange(len(text))):
        with pytest.raises(ValueError, match="lone surrogates"):
            encodable(text[:index] + "\ud83d" + text[index + 1 :])


def test_surrogates_of_a_pair_are_rejected_at_a_cut():
    with pytest.raises(ValueError, match="lone surrogates"):
        encodable("é" * (SLICE - 1) + "\ud83d\ude00" + "é" * SLICE)
