"""Everything here runs on DashInfer's real engine, on the CPU; without its environment, it is left out and says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.dashinfer.decoder import DashInferDecoder
from dashinfer_vlm_core.dashinfer.environment import Environment, find_environment, private_folder
from dashinfer_vlm_core.errors import MissingDependency
from dashinfer_vlm_core.qwen2_vl.config import read_spec
from tests.plugins.oracle import Oracle
from tests.tiny import write_checkpoint


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Of the engine's and of the oracle's: models are tiny, and threads would wait for each other."""
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def environment() -> Environment:
    try:
        return find_environment(EngineConfig())
    except MissingDependency as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def cache(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of our own for converted models, with the installed environment in it."""
    folder = tmp_path_factory.mktemp("cache")
    installed = private_folder(EngineConfig())
    (folder / installed.name).symlink_to(installed)
    return folder


@pytest.fixture(scope="session")
def oracle(oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles("one-kv-head-128")


@pytest.fixture(scope="session")
def talking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer, whose heads are as wide as DashInfer wants them."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    return write_checkpoint(
        tmp_path_factory.mktemp("talking"), num_attention_heads=1, num_key_value_heads=1, rope_parameters=rope
    )


@pytest.fixture
def decoder(cache: Path, oracle: Oracle) -> Callable[..., DashInferDecoder]:
    """A decoder of the random model, not started."""

    def make(folder: Path = oracle.folder, **options: object) -> DashInferDecoder:
        config = EngineConfig(
            **{"device": "cpu", "max_model_len": 512, "max_waiting": 2000, "cache_dir": cache} | options
        )
        return DashInferDecoder(read_spec(folder), config)

    return make


@asynccontextmanager
async def decoding(decoder: DashInferDecoder):
    """Start and close a decoder."""
    await decoder.start()
    try:
        yield decoder
    finally:
        await decoder.close()
