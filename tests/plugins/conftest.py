from __future__ import annotations

from collections.abc import Callable

import pytest

from .oracle import SHAPES, Oracle, save_random_model


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """The random model of a shape's name, made on first use."""
    made: dict[str, Oracle] = {}

    def oracle(name: str) -> Oracle:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = Oracle(folder, save_random_model(folder, SHAPES[name]))
        return made[name]

    return oracle


@pytest.fixture
def oracle(oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles("gqa-tied")
