"""Reject requests that the model or the decoder does not support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ..decoders.supervisor import Supervisor
from ..errors import InvalidParameter, UnsupportedParameter
from ..models.coordinates import ImageCoordinates
from ..preprocessing.prompt import PromptBuilder
from ..protocol import ChatRequest, MediaPart, PoolingItem
from ..protocol.sampling import Sampling

if TYPE_CHECKING:
    from ..media.types import VisualInput
    from ..models.interface import ImageProcessor
    from ..models.pooling import PoolingSpec, Task
    from ..models.spec import ModelSpec


_ROUTES: Mapping[Task, str] = {
    "generate": (
        "generates text (task generate). Use `/v1/chat/completions`, `/v1/responses`, `/v1/messages` or `/api/chat`, or"
        " `VLM.chat`"
    ),
    "embed": "computes embeddings (task embed). Use `/v1/embeddings` or `/api/embed`, or `VLM.embed`",
    "score": "scores documents (task score). Use `/v1/rerank` or `/score`, or `VLM.score`",
    "token_embed": "embeds each token (task token_embed). Use `/pooling`, `/v1/rerank` or `/score`, or `VLM.encode`",
}


def check_task(task: Task, *tasks: Task, name: str) -> None:
    """Check that a request is for the task of the model.

    Args:
        task: that of the model.
        tasks: those that can serve the request.
        name: the model's name.

    Raises:
        UnsupportedParameter: the model has another task.
    """
    if task not in tasks:
        raise UnsupportedParameter(
            f"The model {name!r} {_ROUTES[task]}. {_step(tasks[0])}",
            param="model",
            code="wrong_task",
        )


def _step(task: Task) -> str:
    step = f"For this request, name a model of the task {task}"
    if task == "token_embed":
        return f"{step}: a ColQwen checkpoint."
    return f"{step}, or load this one with --task {task}, or `task: {task}` in `models` of the configuration file."


def pooling_of(spec: ModelSpec, *tasks: Literal["embed", "score", "token_embed"], name: str) -> PoolingSpec:
    """Return how a model pools hidden states. Raises as `check_task`."""
    check_task(spec.task, *tasks, name=name)
    assert spec.pooling
    return spec.pooling


def check_item(item: PoolingItem, decoder: Supervisor, prompts: PromptBuilder) -> None:
    """Check an item of a request for embeddings or scores.

    Raises:
        UnsupportedParameter: the decoder does not support its media.
        InvalidParameter: the chat template does not use an option.
    """
    _check_media(item, decoder)
    prompts.options.check(item)


def check_request(request: ChatRequest, spec: ModelSpec, decoder: Supervisor, prompts: PromptBuilder) -> Sampling:
    """Check a request, and return its sampling parameters.

    Raises:
        UnsupportedParameter: the model or the decoder does not support a field.
        InvalidParameter: a token id does not exist.
    """
    _check_media(request, decoder)
    prompts.options.check(request)
    if request.coordinates == "original" and spec.coordinates is None:
        raise UnsupportedParameter(
            f"`coordinates` is not supported, got 'original': it is not known how models of the type"
            f" {spec.model_type} write coordinates. Remove it.",
            param="coordinates",
        )
    sampling = request.sampling()
    for name in sorted(sampling.requested_params() - decoder.supported_params):
        raise UnsupportedParameter(
            f"The decoder {decoder.name!r} does not support `{name}`. Remove it, or start the engine with another"
            " decoder.",
            param=name,
        )
    _check_token_ids(sampling, spec)
    return sampling


def _check_media(request: ChatRequest, decoder: Supervisor) -> None:
    rendered = [part.path for part in request.documents() if part.render != "text"]
    if decoder.unsupported_vision_reason and (paths := [part.path for part in request.media()] + rendered):
        raise UnsupportedParameter(decoder.unsupported_vision_reason, param=paths[0])


def _check_token_ids(sampling: Sampling, spec: ModelSpec) -> None:
    sampling.check_token_ids(spec.vocab_size)
    if sampling.min_tokens and len({*sampling.stop_token_ids, *spec.tokens.stop}) >= spec.vocab_size:
        raise InvalidParameter(
            "`stop_token_ids` covers the whole vocabulary, so `min_tokens` leaves no token to sample.",
            param="stop_token_ids",
        )


def reject_structured_output(request: ChatRequest, decoder: str) -> None:
    """Reject what only a grammar can guarantee.

    Tools that need not be called are still accepted: calls are parsed from the text.

    Raises:
        UnsupportedParameter: the request requires a grammar.
    """
    constraint = request.output_constraint
    strict = [f"tools[{i}].function.strict" for i, tool in enumerate(request.tools) if tool.function.strict]
    forced = ["tool_choice"] if request.must_call else []
    formats = [constraint.field] if constraint else []
    for param in [*formats, *forced, *(strict if request.callable_tools else ())]:
        raise UnsupportedParameter(
            f"The decoder {decoder!r} does not support `{param}`. Remove it and describe the output in the prompt, or"
            " start the engine with another decoder.",
            param=param,
        )


def require_media_data(parts: Sequence[MediaPart]) -> None:
    """Reject media referenced by `uuid` alone: only their visual tokens are cached.

    Raises:
        InvalidParameter: a part has no data.
    """
    for part in parts:
        if not part.has_source:
            raise InvalidParameter(
                f"`{part.path}` has a `uuid` but no data, so it cannot be previewed. Send the {part.kind} with it.",
                param=part.path,
            )


def find_coordinates(
    request: ChatRequest, spec: ModelSpec, items: Sequence[VisualInput], processor: ImageProcessor
) -> ImageCoordinates | None:
    """Return the coordinates of all images of a request; None if none are to be converted.

    Raises:
        InvalidParameter: there is no image, one without an original size, or there are several sizes.
    """
    if request.coordinates == "model" or spec.coordinates is None:
        return None
    found: set[ImageCoordinates] = set()
    for item in items:
        if item.source_size is None:
            raise _coordinates_error("images, since embeddings have no original size. Remove it.")
        shape = processor.shape(item.grid)
        found.add(spec.coordinates.for_image(item.source_size, (shape.width, shape.height)))
    if not found:
        raise _coordinates_error("an image. Send one, or remove `coordinates`.")
    if len(found) > 1:
        raise _coordinates_error(
            "images of one size: a text does not state which image its coordinates belong to. Send one image, or"
            " remove `coordinates` and convert them with `ImageCoordinates`."
        )
    return found.pop()


def _coordinates_error(requirement: str) -> InvalidParameter:
    return InvalidParameter(f"`coordinates` 'original' requires {requirement}", param="coordinates")
