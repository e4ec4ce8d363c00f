from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.clients.table import mark_property as client_property
from tests.support import mark_property
from tests.tiny import write_checkpoint

if TYPE_CHECKING:
    from tests.plugins.oracle import Oracle

# Profiles of tests/fuzz, whose conftest describes how to choose one. Hypothesis's health checks do not apply there.
for name, share in (("default", 60), ("nightly", 2000)):
    settings.register_profile(
        name,
        max_examples=share,
        deadline=None,
        database=None,
        derandomize=name == "default",
        suppress_health_check=list(HealthCheck),
    )
settings.load_profile("default")


INTEROP = Path(__file__).parent / "interop"


def pytest_configure(config: pytest.Config) -> None:
    """Limit each worker to its share of the cores, in child processes too."""
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the modules imported by tests, millions of objects, from garbage collection, now and during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import tests with other programs, which need not be installed, unless `--interop` is given."""
    return True if collection_path == INTEROP and not config.getoption("interop") else None


COSTS = {"slow": 150, "dashinfer": 50, "readme": 20}
"""The time of a test with a mark in ordinary tests of 0.02 s. Those of the README are not among the first: one of them
runs mypy, which is fast after scripts/test has run it."""


@pytest.hookimpl(trylast=True)  # after tests were deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests with other programs unless `--interop` is given; record what a marked test shows, for
    docs/support.md and docs/clients.md. Among processes, the file with the most work comes first: at the end, each of
    them has something left to do."""
    if not config.getoption("interop"):
        deselected = [item for item in items if item.get_closest_marker("interop")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
    costs: Counter[Path] = Counter()
    for item in items:
        costs[item.path] += max([COSTS[mark.name] for mark in item.iter_markers() if mark.name in COSTS], default=1)
        for mark in item.iter_markers("supports"):
            item.user_properties.append(mark_property(*mark.args, **mark.kwargs))
        for mark in item.iter_markers("client"):
            item.user_properties.append(client_property(*mark.args))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: -costs[item.path])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--artifacts", metavar="DIR", help="directory for test artifacts such as screenshots")
    parser.addoption("--interop", action="store_true", help="run tests with other programs, which are installed first")
    parser.addoption("--soak-minutes", default=0, help="how long tests/soak runs; without it, for 12 faults")


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Hide the developer's environment variables from tests and restore them afterwards."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("DASHINFER_VLM_", "VLLM_")):
            del os.environ[name]
    yield
    if os.environ != before:  # most tests change nothing
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen2-VL in float32."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """Create the random model for a shape name, with transformers as its reference, on first use."""
    from tests.plugins.oracle import SHAPES, Oracle, save_random_model  # takes seconds to import

    made: dict[str, Oracle] = {}

    def oracle(name: str) -> Oracle:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = Oracle(folder, save_random_model(folder, SHAPES[name]))
        return made[name]

    return oracle
