"""Open the store that the options name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .settings import EmbeddingStoreOptions

if TYPE_CHECKING:
    from ..config import EngineConfig
    from .interface import EmbeddingStore, EmbeddingStoreFactory


def open_store(factories: Mapping[str, EmbeddingStoreFactory], config: EngineConfig) -> EmbeddingStore:
    """Open the store of the option `embedding_store`, which is set.

    Args:
        factories: the registered factories by scheme.
        config: the options.

    Raises:
        ConfigError: no plugin registers the scheme, or as for `EmbeddingStoreFactory.open`.
        MissingDependency: as for `EmbeddingStoreFactory.open`.
    """
    url = config.options_of(EmbeddingStoreOptions).embedding_store or ""
    factory = factories.get(url.partition("://")[0].lower()) if "://" in url else None
    if factory is None:
        known = ", ".join(f"{scheme}://" for scheme in sorted(factories))
        raise ConfigError(
            f"`embedding_store` must be a URL that begins with one of {known or 'none'}. `dashinfer-vlm plugins` lists"
            " the plugins that add others, and their problems.",
            param="embedding_store",
        )
    return factory.open(url, config)


def redacted(url: str) -> str:
    """Return a URL without user, password and query, for logs."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
