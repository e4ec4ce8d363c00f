"""All tests here run DashInfer's real engine on the CPU; without its environment, they are skipped with the reason."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from dashinfer_vlm_core.concurrency.loop import LoopThread
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import DecodeRequest, Token
from dashinfer_vlm_core.errors import MissingDependency
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_dashinfer.decoder import DashInferDecoder
from dashinfer_vlm_dashinfer.environment import Environment, find_environment, private_folder
from tests.plugins.oracle import Oracle, collect
from tests.tiny import write_checkpoint


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Limit the engine to one thread: the models are tiny, and threads would wait for each other."""
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Limit transformers in this process, which has read its environment already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def environment() -> Environment:
    try:
        return find_environment(EngineConfig())
    except MissingDependency as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def cache(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache for converted models, with links to the installed environment and the compiled kernels."""
    folder = tmp_path_factory.mktemp("cache")
    installed = private_folder(EngineConfig())
    (folder / installed.name).symlink_to(installed)
    kernels = installed.parent / "kernels"
    kernels.mkdir(mode=0o700, exist_ok=True)
    (folder / kernels.name).symlink_to(kernels)
    return folder


@pytest.fixture(scope="session")
def oracle(oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles("one-kv-head-128")


@pytest.fixture(scope="session")
def chat_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model with a tokenizer and the head width required by DashInfer."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    return write_checkpoint(
        tmp_path_factory.mktemp("talking"), num_attention_heads=1, num_key_value_heads=1, rope_parameters=rope
    )


@pytest.fixture
def decoder(cache: Path, oracle: Oracle) -> Callable[..., DashInferDecoder]:
    """Return a factory of decoders of the random model, not started."""

    def make(folder: Path = oracle.folder, **options: object) -> DashInferDecoder:
        config = EngineConfig(
            **{"device": "cpu", "max_model_len": 512, "max_waiting": 2000, "cache_dir": cache} | options
        )
        return DashInferDecoder(read_spec(folder), config)

    return make


class SharedDecoder:
    """A decoder with default options, started once for all tests that do not modify it.

    Its event loop runs in a thread, so that it lives longer than a test.
    """

    def __init__(self, decoder: DashInferDecoder) -> None:
        self._decoder = decoder
        self._loop = LoopThread("shared-decoder")
        self._loop.call(decoder.start())

    def generate(self, requests: list[DecodeRequest], *, concurrent: bool = True) -> list[list[Token]]:
        """Return the tokens of each request, decoded concurrently or sequentially."""
        return self._loop.call(self._generate(requests, concurrent))

    async def _generate(self, requests: list[DecodeRequest], concurrent: bool) -> list[list[Token]]:
        if concurrent:
            return await asyncio.gather(*(collect(self._decoder, request) for request in requests))
        return [await collect(self._decoder, request) for request in requests]

    def close(self) -> None:
        self._loop.stop(self._decoder.close())


@pytest.fixture(scope="session")
def shared(cache: Path, oracle: Oracle) -> Iterator[SharedDecoder]:
    """Return a started decoder of the random model with default options."""
    config = EngineConfig(device="cpu", max_model_len=512, max_waiting=2000, cache_dir=cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        running = SharedDecoder(DashInferDecoder(read_spec(oracle.folder), config))
    yield running
    running.close()


@pytest.fixture
def full_environment(environment: Environment) -> Environment:
    """Return an environment with torch, for features that a CPU-only environment lacks."""
    if environment.cpu_only:
        pytest.skip("DashInfer is installed for the CPU only: run `dashinfer-vlm dashinfer install` for the full one.")
    return environment


@asynccontextmanager
async def decoding(decoder: DashInferDecoder):
    """Start and close a decoder."""
    await decoder.start()
    try:
        yield decoder
    finally:
        await decoder.close()
