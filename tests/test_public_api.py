"""The public API changes only on purpose."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import pytest

from tests.public_api import describe

SNAPSHOT = Path(__file__).with_name("public_api.txt")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="inspect words signatures otherwise in other versions")
def test_public_api_matches_snapshot():
    expected, found = SNAPSHOT.read_text(encoding="utf-8").splitlines(), list(describe())
    changes = "\n".join(difflib.unified_diff(expected, found, "snapshot", "now", lineterm="", n=0))
    assert not changes, f"{changes}\nIf that is meant: python -m tests.public_api > tests/public_api.txt"
