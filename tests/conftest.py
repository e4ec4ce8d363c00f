from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import write_checkpoint


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Tests neither see the options of the person who runs them, nor leave their own behind."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("DASHINFER_VLM_"):
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen2-VL in float32."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))
