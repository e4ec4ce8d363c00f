"""Engines whose kernels record the inputs of layers, or hidden states, while they complete the requests of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError
from dashinfer_vlm_core.kernels.quantization import has_8_bits
from dashinfer_vlm_core.kernels.recording import LayerInput, Recorder, RecordingKernelFactory
from dashinfer_vlm_core.models.files import stored_tensors
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.plugins import Registry, load_plugins
from dashinfer_vlm_core.progress import Progress
from dashinfer_vlm_core.text_spec import AttentionSpec, MlpSpec

from .batch_files import Entry, read_body, read_entries

if TYPE_CHECKING:
    from dashinfer_vlm_core.config import EngineConfig
    from dashinfer_vlm_core.engine.chat_pipeline import Generation
    from dashinfer_vlm_core.models.spec import ModelSpec
    from dashinfer_vlm_core.text_spec import LayerSpec

MAX_TOKENS = 64
"""Maximum number of tokens that complete a request."""

NOT_APPLIED = {"model", "max_completion_tokens"}
"""Fields of requests: the command names the model, and `max_tokens` is `MAX_TOKENS`."""

PRODUCTS_BYTES = 4 << 30
"""Memory for the inputs of layers; the requests are completed again for the layers that do not fit."""


class Request(NamedTuple):
    """A request, with a name for messages."""

    name: str
    body: Mapping[str, Any]


class Answer(NamedTuple):
    """The answer of a model to a request.

    Attributes:
        message: the answer, with its reasoning and tool calls.
        first: the index of its first token after the prompt.
        length: number of its tokens, with the one that ends it.
    """

    message: Mapping[str, Any]
    first: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEngine:
    """An engine, and what its kernels record."""

    engine: Engine
    recorder: Recorder

    @classmethod
    @contextmanager
    def open(cls, config: EngineConfig) -> Iterator[RecordedEngine]:
        """Load a model on the CPU, without what leaves out or repeats tokens."""
        recorder = Recorder()
        registry = _with_recorder(load_plugins(), recorder)
        changes = {"device": "cpu", "decoder": "torch", "cpu_kernels": "recording", "prefix_cache": False}
        changes |= {"speculative_method": "none", "speculative_model": None}
        with Engine(config.model_copy(update=changes), registry=registry) as engine:
            yield cls(engine=engine, recorder=recorder)

    def complete(self, request: Request, **changes: Any) -> Generation:
        """Complete a request greedily.

        Raises:
            ConfigError: the request fails; the message names it.
        """
        body = {**request.body, "temperature": 0, "max_tokens": MAX_TOKENS, **changes}
        try:
            return self.engine.submit(body).result()
        except DashInferVLMError as error:
            raise ConfigError(f"{request.name} failed: {error}") from error

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request."""
        generation = self.complete(request)
        message = generation.completion.choices[0].message.model_dump(exclude_none=True)
        return Answer({"content": "", **message}, len(generation.prompt_token_ids), len(generation.token_ids[0]))

    def hidden(self, request: Request, answer: Answer) -> Tensor:
        """Return the hidden states that predict the tokens of an answer, [tokens, hidden], before the final norm."""
        messages = [*request.body["messages"], answer.message]
        self.recorder.hidden.clear()
        self.recorder.keeps_hidden = True
        self.complete(request, messages=messages, max_tokens=1)
        self.recorder.keeps_hidden = False
        return torch.cat(self.recorder.hidden)[answer.first - 1 :][: answer.length]


class PromptCalibration:
    """See `Calibration`: the inputs of the layers while an engine completes requests.

    Args:
        opened: the engine.
        spec: its model.
        requests: the requests.
    """

    def __init__(self, opened: RecordedEngine, spec: ModelSpec, requests: Sequence[Request]) -> None:
        self._opened = opened
        self._spec = spec
        self._requests = requests
        self._order = _layers_in_files(spec)

    def products(self, layer: LayerInput) -> Tensor:
        recorder = self._opened.recorder
        if layer.layer not in recorder.layers:
            recorder.layers = self._next_layers(layer.layer)
            recorder.products.clear()
            with Progress(self._requests, desc="Calibrating", unit=" requests") as progress:
                for request in progress:
                    self._opened.complete(request)
        return recorder.products[layer]

    def _next_layers(self, first: int) -> frozenset[int]:
        """Return the layer, and those that follow in the files and also fit into the memory."""
        following = self._order[self._order.index(first) :]
        sizes = torch.tensor([_products_bytes(self._spec, number) for number in following]).cumsum(0)
        count = max(1, int((sizes <= PRODUCTS_BYTES).sum()))
        return frozenset(following[:count])


class RecordedLogits(NamedTuple):
    """What logits are computed from.

    Attributes:
        hidden: [tokens, hidden] for each request.
        norm: the weights of the final norm.
        eps: its epsilon.
        recorder: has the output layer, whose memory stays in use.
    """

    hidden: Sequence[Tensor]
    norm: Tensor
    eps: float
    recorder: Recorder

    def logits(self, number: int) -> Tensor:
        """Compute the logits of one request, float32 [tokens, vocab_size]."""
        assert self.recorder.head
        x = self.hidden[number]
        return self.recorder.head(F.rms_norm(x, self.norm.shape, self.norm.to(x.dtype), self.eps))


def record_logits(
    opened: RecordedEngine, spec: ModelSpec, requests: Sequence[Request], answers: Sequence[Answer]
) -> RecordedLogits:
    """Record what a model predicts at each token of given answers."""
    with Progress(requests, desc="Comparing", unit=" requests") as progress:
        hidden = [opened.hidden(request, answer) for request, answer in zip(progress, answers, strict=True)]
    name = f"{spec.text.weights.norm}.weight"
    with Weights(spec.folder, spec.tensor_renames) as weights:
        norm = weights.tensor(name, (spec.hidden_size,), device="cpu", dtype=torch.float32)
    return RecordedLogits(hidden, norm + spec.text.norm_offset, spec.text.norm_eps, opened.recorder)


def read_requests(path: Path) -> list[Request]:
    """Read a file of requests in OpenAI's batch format, without the fields of `NOT_APPLIED`.

    Raises:
        ConfigError: it is invalid, or has no requests.
    """
    requests = [_read_request(path, entry) for entry in read_entries(path)]
    if not requests:
        raise ConfigError(f"{path} has no requests.")
    return requests


def _read_request(path: Path, entry: Entry) -> Request:
    body = read_body(path, entry)
    applied = {name: value for name, value in body.items() if name not in NOT_APPLIED}
    return Request(f"{path}: request {entry.custom_id!r}", applied)


def _with_recorder(registry: Registry, recorder: Recorder) -> Registry:
    factory = RecordingKernelFactory(recorder)
    return replace(registry, kernels={**registry.kernels, factory.name: factory})


def _layers_in_files(spec: ModelSpec) -> list[int]:
    """Return the numbers of the layers with 4 bits in the order in which their weights are stored."""
    count = len(spec.text.layers)
    prefixes = {spec.text.weights.layer.format(number) + ".": number for number in range(count)}
    stored = stored_tensors(spec.folder, spec.tensor_renames)
    found = (number for name in stored for prefix, number in prefixes.items() if name.startswith(prefix))
    return [number for number in dict.fromkeys(found) if not has_8_bits(number, count)]


def _products_bytes(spec: ModelSpec, number: int) -> int:
    layer: LayerSpec = spec.text.layers[number]
    mixer = layer.mixer
    width = mixer.width if isinstance(mixer, AttentionSpec) else mixer.value_width
    inner = layer.mlp.intermediate_size if isinstance(layer.mlp, MlpSpec) else 0
    return 4 * (2 * spec.hidden_size**2 + width**2 + inner**2)
