from __future__ import annotations

from pathlib import Path

import pytest

from .oracle import Oracle
from .tiny_qwen3 import write_checkpoint


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), moe=True)


@pytest.fixture(scope="session")
def oracle(dense: Path) -> Oracle:
    return Oracle(dense)
