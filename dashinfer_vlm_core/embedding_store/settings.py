"""Options of the store of visual embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ..config import PluginOptions
from ..config.folders import warn_if_accessible
from ..errors import ConfigError

MIN_SECRET_BYTES = 16


class EmbeddingStoreOptions(PluginOptions):
    title: ClassVar[str] = "Embedding store"

    embedding_store: str | None = Field(
        None,
        repr=False,
        description="URL of a store of visual embeddings that other processes can use too, such as"
        " redis://HOST:6379/0 or file:///FOLDER; by default, only the embedding cache in memory is used.",
    )
    embedding_store_mib: int = Field(4096, ge=1, description="Maximum size of a store in a folder, in MiB.")
    embedding_store_max_value_mib: int = Field(
        64, ge=1, le=512, description="Maximum size of a stored embedding, in MiB; larger ones are not stored."
    )
    embedding_store_ttl: int = Field(
        7 * 24 * 3600, ge=1, le=10**9, description="Seconds after the last use of an embedding when it expires."
    )
    embedding_store_timeout: float | None = Field(
        None,
        gt=0,
        le=600,
        description="Timeout of a lookup, in seconds; defaults to half of the measured time that encoding takes.",
    )
    embedding_store_dtype: Literal["exact", "fp8"] = Field(
        "exact",
        description="Format of stored embeddings: `exact`, or `fp8`, which has half the size of bfloat16 and changes"
        " responses slightly.",
    )
    embedding_store_secret_file: Path | None = Field(
        None,
        description="File with a secret that all users of the store share: values without it are rejected, and cache"
        " namespaces of API keys are the same in all processes.",
    )

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
