"""Layers from the file of an earlier start, or created and then stored."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType

from torch import Tensor

from ...concurrency.storing import StoreThread
from ...config import MIB, EngineConfig
from ...kernels.quantization import Quantization
from ...kernels.types import Activation, Kernels, Linear, LMHead, StorableLayers
from ...version import __version__
from ..weights import Weights
from .checkpoint_key import checkpoint_key, source_digest
from .file_budget import WeightFolder
from .weight_file import TABLE, Layers, WeightFile, file_size

logger: logging.Logger = logging.getLogger(__name__)

MODELS = Path(__file__).parents[1]
KERNELS = MODELS.with_name("kernels")

MIN_BYTES = 64 * MIB
"""Smaller models are converted in a tenth of a second."""


class ConvertedWeights(AbstractContextManager["ConvertedWeights"]):
    """The layers of one part of a model, such as its vision encoder, while it is loaded.

    At the end, those that were created are stored by a thread, unless a file had all of them.

    Args:
        model: `EngineConfig.name` of the model.
        kernels: those that keep the layers; None creates all layers and stores none.
        folder: where files are stored.
        key: computes the key of the part's file.
    """

    def __init__(
        self,
        model: str = "",
        kernels: StorableLayers | None = None,
        folder: WeightFolder | None = None,
        key: Callable[[], str] = str,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._folder = folder
        self._compute_key = key
        self._key = key()
        self._created: dict[str, dict[str, Tensor]] = {}
        self._file: WeightFile | None = folder.open(self._key) if folder else None
        if self._file and kernels:
            logger.debug("The weights were converted by an earlier start.")
            kernels.adopt(self._file.memory, self._file.matrices)

    @classmethod
    def open(
        cls,
        weights: Weights,
        config: EngineConfig,
        kernels: Kernels,
        part: str,
        *,
        code: Path = MODELS,
    ) -> ConvertedWeights:
        """Open the file of a part of a checkpoint, if there is one. Without effect if kernels have no such form.

        Args:
            weights: the checkpoint.
            config: `weight_cache_mib` and the cache folder.
            kernels: those that keep the layers.
            part: the name of the part. Files of other options hold other layers: a file is copied as a whole.
            code: the folder of the package that reads the weights. Files are not used after a change of its code, or of
                the module with the checkpoint's format.
        """
        if not config.weight_cache_mib or not isinstance(kernels, StorableLayers):
            return cls()
        options = [config.dtype, config.quantization, config.vision_quantization]
        try:
            sources = [MODELS, KERNELS, code]
            if weights.reader:
                sources.append(Path(inspect.getfile(type(weights.reader))))
            parts = [__version__, *map(source_digest, sources), kernels.layout, part, *options, repr(weights.renames)]
            return cls(config.name, kernels, WeightFolder(config), partial(checkpoint_key, weights.folder, parts))
        except (OSError, TypeError) as error:  # `TypeError`: the format was defined without a file
            logger.warning("Converted weights are not stored: %s.", error)
            return cls()

    def linear(
        self,
        name: str,
        create: Callable[[], Linear],
        bias: Tensor | None = None,
        *,
        activation: Activation = Activation.NONE,
        fp32_output: bool = False,
    ) -> Linear:
        """Return a linear layer.

        Args:
            name: see `layer_name`.
            create: reads and converts its weights, if they are not stored.
            bias: its bias, which is not stored.
            activation: that of the layer.
            fp32_output: that of the layer.
        """
        if self._kernels and self._file and (stored := self._file.layers.get(name)):
            return self._kernels.load_linear(stored, bias, activation=activation, fp32_output=fp32_output)
        layer = create()
        self._keep(name, layer)
        return layer

    def head(self, name: str, create: Callable[[], LMHead]) -> LMHead:
        """Return an LM head; see `linear`."""
        if self._kernels and self._file and (stored := self._file.layers.get(name)):
            return self._kernels.load_head(stored)
        head = create()
        self._keep(name, head)
        return head

    def table(self, name: str, create: Callable[[], Tensor]) -> Tensor:
        """Return an embedding table, which must not be changed; see `linear`."""
        if self._file and (stored := self._file.layers.get(name)):
            return stored[TABLE]
        tensor = create()
        if self._kernels:
            self._created[name] = {TABLE: tensor}
        return tensor

    def _keep(self, name: str, layer: Linear | LMHead) -> None:
        tensors = self._kernels.stored_tensors(layer) if self._kernels else None
        if tensors:
            self._created[name] = tensors

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        created = self._created
        self._created = {}
        if kind is not None or self._folder is None:
            return
        layers: Layers = {**self._file.layers, **created} if self._file else created
        if created and file_size(layers) >= MIN_BYTES and self._is_unchanged():
            StoreThread(self._model, partial(self._folder.write, self._key, layers)).start()
        else:
            self._folder.shrink()

    def _is_unchanged(self) -> bool:
        try:
            return self._compute_key() == self._key
        except OSError:
            return False


def layer_name(
    modules: Sequence[str], shape: tuple[int, int], activation: Activation, quantization: Quantization | None, more: str
) -> str:
    """Return the name of a layer in a file: its modules, and what else its conversion depends on.

    Args:
        modules: the names of the checkpoint's modules whose outputs are concatenated.
        shape: outputs and inputs.
        activation: that of the layer.
        quantization: how weights are quantized that are not yet.
        more: anything else, such as the order of the outputs or the dtype.
    """
    bits = str(quantization.bits) if quantization else ""
    return " ".join([*modules, f"{shape[0]}x{shape[1]}", activation.name, bits, more])
