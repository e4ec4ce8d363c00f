"""A store of visual embeddings that several processes share, or that outlives one. Importing this package is cheap.

interface.py                  what a store implements; plugins register stores by the scheme of their URL
settings.py                   the options, and the store that they name
client.py     breaker.py      lookups within a time budget, writes in the background
codec.py                      embeddings as checked bytes; the only module that imports torch
file_store.py                 the store in a folder
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..hooks import hookimpl
from .interface import EmbeddingStore, EmbeddingStoreFactory, Read
from .settings import EmbeddingStoreOptions, open_store, redacted

if TYPE_CHECKING:
    from ..config import EngineConfig, PluginOptions

__all__ = [
    "EmbeddingStore",
    "EmbeddingStoreFactory",
    "EmbeddingStoreOptions",
    "Read",
    "open_store",
    "redacted",
]


class FileStoreFactory:
    """The factory of stores in folders."""

    schemes: frozenset[str] = frozenset({"file"})

    def open(self, url: str, config: EngineConfig) -> EmbeddingStore:
        from .file_store import open_file_store

        return open_file_store(url, config.options_of(EmbeddingStoreOptions))


@hookimpl
def register_embedding_stores(register: Callable[[EmbeddingStoreFactory], None]) -> None:
    register(FileStoreFactory())


@hookimpl
def register_options(register: Callable[[type[PluginOptions]], None]) -> None:
    register(EmbeddingStoreOptions)
