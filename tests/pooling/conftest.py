from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dashinfer_vlm_core import VLM
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint

from .checkpoints import Reference, write_embedding, write_reranker
from .late_checkpoints import write_colqwen2


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def embedding(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding(base, tmp_path_factory.mktemp("embedding") / "embedding")


@pytest.fixture(scope="session")
def reranker(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reranker(base, tmp_path_factory.mktemp("reranker") / "reranker")


@pytest.fixture(scope="session")
def colqwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_colqwen2(tmp_path_factory.mktemp("colqwen2") / "colqwen2")


@pytest.fixture(scope="session")
def reference(base: Path) -> Reference:
    return Reference(base)


@pytest.fixture(scope="session")
def embedder(embedding: Path) -> Iterator[VLM]:
    with VLM(embedding, device="cpu", dtype="float32", kv_cache_mib=64) as vlm:
        yield vlm


@pytest.fixture(scope="session")
def scorer(reranker: Path) -> Iterator[VLM]:
    with VLM(reranker, device="cpu", dtype="float32", kv_cache_mib=64) as vlm:
        yield vlm


@pytest.fixture(scope="session")
def retriever(colqwen2: Path) -> Iterator[VLM]:
    with VLM(colqwen2, device="cpu", dtype="float32", kv_cache_mib=64, prefill_chunk=16) as vlm:
        yield vlm
