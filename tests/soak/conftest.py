"""How long the soak lasts: a number of faults in `scripts/test`, and in nightly runs a number of minutes:

scripts/test tests/soak --soak-minutes=20
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

FAULTS = 12


@pytest.fixture
def soak_lasts(request: pytest.FixtureRequest) -> Callable[[int, float], bool]:
    """Return a function that reports whether a share of the soak continues: `soak_lasts(faults, share)`."""
    minutes = float(request.config.getoption("--soak-minutes"))
    began = time.monotonic()

    def lasts(faults: int, share: float) -> bool:
        return time.monotonic() - began < share * 60 * minutes if minutes else faults < share * FAULTS

    return lasts
