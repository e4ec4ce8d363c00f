from __future__ import annotations

from collections.abc import Callable

import pytest

from .oracle import Oracle


@pytest.fixture
def oracle(oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles("gqa-tied")
