"""How long the soak lasts: some faults in `scripts/test`, and as many minutes as nightly runs ask for:

scripts/test tests/soak --soak-minutes=20
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

FAULTS = 30


@pytest.fixture
def soak_lasts(request: pytest.FixtureRequest) -> Callable[[int, float], bool]:
    """Whether a share of the soak goes on, after so many faults: `soak_lasts(faults, share)`."""
    minutes = float(request.config.getoption("--soak-minutes"))
    began = time.monotonic()

    def lasts(faults: int, share: float) -> bool:
        return time.monotonic() - began < share * 60 * minutes if minutes else faults < share * FAULTS

    return lasts
