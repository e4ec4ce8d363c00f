"""Tests with other programs, which `scripts/test --interop` installs and runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.environments import SetupMissing
from tests.interop import interpreters

_missing: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Make packages importable; where they cannot be installed, tests skip with `pytest.importorskip`."""
    if config.getoption("interop"):
        _add_to_path("PEFT", interpreters.peft)
        _add_to_path("client libraries", interpreters.clients)
        _add_to_path("Anthropic's client", interpreters.anthropic)
        _add_to_path("Ollama's client", interpreters.ollama)
        _add_to_path("OCR clients", interpreters.ocr)
        _add_to_path("Docling", interpreters.docling)


def _add_to_path(name: str, packages: Callable[[], Path]) -> None:
    try:
        sys.path.append(str(packages()))
    except SetupMissing as error:
        _missing.append(f"{name}: not available: {error}")


def pytest_report_header() -> list[str]:
    return _missing


@pytest.fixture(scope="session")
def vllm() -> interpreters.Interpreter:
    """vLLM's CPU build, in an environment of its own."""
    try:
        return interpreters.vllm()
    except SetupMissing as error:
        pytest.skip(f"vLLM is not available: {error}")
