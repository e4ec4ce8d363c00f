"""How long the soak lasts: two minutes in `scripts/test`, and as many as nightly runs ask for:

scripts/test tests/soak --soak-minutes=20
"""

from __future__ import annotations

import pytest


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    return 60 * float(request.config.getoption("--soak-minutes"))
