"""Open the store of visual embeddings for the vision encoder of an engine."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

import numpy as np

from ..config import EngineConfig
from ..embedding_store import EmbeddingStoreOptions, open_store, redacted
from ..embedding_store.client import EmbeddingStoreClient
from ..models.vision_key import vision_key

if TYPE_CHECKING:
    from ..kernels.choice import KernelSelector
    from ..models.interface import ModelFamily, VisionEncoder
    from ..models.spec import ModelSpec
    from ..plugins import Registry

logger: logging.Logger = logging.getLogger(__name__)


def open_vision_store(
    registry: Registry,
    family: ModelFamily,
    spec: ModelSpec,
    config: EngineConfig,
    *,
    kernels: KernelSelector,
    encoder: VisionEncoder,
) -> EmbeddingStoreClient | None:
    """Open the store that the options name; None if they name none. It need not be reachable yet.

    Computes a digest of the weights of the vision encoder, at about the speed of reading them.

    Args:
        registry: the plugins.
        family: the model family.
        spec: the checkpoint.
        config: the options.
        kernels: those that were chosen for `encoder`.
        encoder: the vision encoder, which is loaded.

    Raises:
        ConfigError: an option is invalid, or the store cannot be used on this machine.
        MissingDependency: an extra is not installed.
    """
    options = config.options_of(EmbeddingStoreOptions)
    if not options.embedding_store:
        return None
    secret = options.read_secret()
    # Imported by name, because it imports torch: packages that do not need torch import this module.
    codec = importlib.import_module("dashinfer_vlm_core.embedding_store.codec").EmbeddingCodec(
        encoder.adopt(np.zeros((1, spec.visual_width), np.float32)), secret=secret
    )
    key = vision_key(spec, config, kernels=kernels.vision_identity(), family=_family_identity(registry, family, spec))
    client = EmbeddingStoreClient(
        open_store(registry.embedding_stores, config),
        codec,
        model_key=key,
        secret=secret,
        timeout=config.limits.store_timeout,
    )
    logger.info("Embeddings are shared through %s.", redacted(options.embedding_store))
    return client


def _family_identity(registry: Registry, family: ModelFamily, spec: ModelSpec) -> str:
    """Return the name of a family's class, and the name and version of the distribution that registered it."""
    owners = [row.distribution for row in registry.rows if f"model family {spec.model_type}" in row.provides]
    return " ".join([type(family).__module__, type(family).__qualname__, *owners])
