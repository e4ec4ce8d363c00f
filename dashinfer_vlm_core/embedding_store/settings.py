"""Options of the store of visual embeddings, and the store that they name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ..config import PluginOptions
from ..config.folders import warn_if_accessible
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config import EngineConfig
    from .interface import EmbeddingStore, EmbeddingStoreFactory

MIN_SECRET_BYTES = 16


class EmbeddingStoreOptions(PluginOptions):
    title: ClassVar[str] = "Embedding store"

    embedding_store: str | None = Field(None, repr=False, title="URL")
    """URL of a store of visual embeddings that other processes can use too, such as redis://HOST:6379/0 or
    file:///FOLDER; by default, only the embedding cache in memory is used."""

    embedding_store_mib: int = Field(4096, ge=64)
    """Maximum size of a store in a folder, in MiB; an embedding has at most 64 MiB."""

    embedding_store_ttl: int = Field(7 * 24 * 3600, ge=1, le=10**9)
    """Seconds after the last use of an embedding when it expires."""

    embedding_store_secret_file: Path | None = None
    """File with a secret that all users of the store share: values without it are rejected, and cache namespaces of API
    keys are the same in all processes."""

    def read_secret(self) -> bytes:
        """Return the secret, without white space around it; empty if there is none.

        Raises:
            ConfigError: the file cannot be read, or the secret is too short.
        """
        file = self.embedding_store_secret_file
        if file is None:
            return b""
        try:
            secret = file.expanduser().read_bytes().strip()
            warn_if_accessible(file.expanduser(), "secret")
        except OSError as error:
            message = f"`embedding_store_secret_file`: {file} cannot be read: {error.strerror}. Check the path."
            raise ConfigError(message, param="embedding_store_secret_file") from error
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"`embedding_store_secret_file`: the secret in {file} must have at least {MIN_SECRET_BYTES} bytes, got"
                f" {len(secret)}. Create one with `openssl rand -hex 32`.",
                param="embedding_store_secret_file",
            )
        return secret


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
