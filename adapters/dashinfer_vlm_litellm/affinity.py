"""Sticky routing by media for LiteLLM's Router and proxy: requests with the same image go to the same server."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from litellm.integrations.custom_logger import CustomLogger

Deployment: TypeAlias = dict[str, Any]

MEDIA_PARTS = frozenset(
    {"image_url", "video_url", "input_video", "image_embeds", "file", "input_image", "input_file", "image", "document"}
)
"""Types of content parts with media: of Chat Completions, the Responses API and Anthropic's Messages API."""

_SOURCE_FIELDS = (
    "uuid",  # first, because later messages may contain it alone
    "url",
    "data",
    "file_data",
    "file_id",
    "file_url",
    "image_url",
    "video_url",
    "input_video",
    "image_embeds",
    "file",
    "source",
)
_MAX_DEPTH = 4  # a list of frames: part, `video_url`, `url`, frame


def media_key(messages: object, cache_salt: object = None) -> bytes | None:
    """Return a digest of the first image, video or file of a conversation; None if it has none.

    It is the SHA-256 of what the content part refers to: its `uuid`, otherwise the base64 of a data: URL, without the
    media type, otherwise the URL or file ID as written. Options of the part, such as `detail`, have no effect.

    Args:
        messages: the messages of a chat request or the `input` of a response. Invalid ones are skipped: the server
            reports them.
        cache_salt: the request's `cache_salt`. Requests with different salts share no cached data, so that one image
            need not go to one server.
    """
    for part in _media_parts(messages):
        if source := _source(part, _MAX_DEPTH):
            content = source.partition(",")[2] if source[:5].lower() == "data:" else source
            salt = cache_salt if isinstance(cache_salt, str) else ""
            return hashlib.sha256(f"{salt}\0{content}".encode("utf-8", "surrogatepass")).digest()
    return None


def rendezvous_score(key: bytes, name: str, weight: float = 1.0) -> float:
    """Return the score of a server for a key. The server with the highest score serves the key.

    A server that is removed leaves the order of the others unchanged, so that only its keys move, and they spread over
    all others. Source: rendezvous hashing (Thaler and Ravishankar 1998), with weights by the logarithmic method
    (Schindelhauer and Schomaker 2005): the share of a server is proportional to its weight.
    """
    digest = hashlib.sha256(key + name.encode()).digest()
    uniform = ((int.from_bytes(digest[:8], "big") >> 12) + 0.5) / 2**52  # above 0 and below 1
    return -weight / math.log(uniform)


class MediaAffinity(CustomLogger):
    """A callback of LiteLLM that sends requests with the same first image or video to the same deployment.

    It applies to all model groups with several deployments, except for those with `media_affinity: false` in the
    `model_info` of a deployment. Requests without media are not affected. If the deployment of an image is not healthy,
    in cooldown, or failed for this request before, the next one in the image's order is used. `weight` and `order` in
    `litellm_params` have the same effect as in LiteLLM. Its synchronous Router does not call the callback.
    """

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[Deployment],
        messages: list[Any] | None,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[Deployment]:
        """Return the deployments among which LiteLLM chooses: one of each `order` if the request has media."""
        request = request_kwargs or {}
        # The server that stored the previous response is the only one that has it.
        if len(healthy_deployments) < 2 or request.get("previous_response_id"):
            return healthy_deployments
        if any(_model_info(deployment).get("media_affinity") is False for deployment in healthy_deployments):
            return healthy_deployments
        key = media_key(request.get("input") if messages is None else messages, request.get("cache_salt"))
        if key is None:
            return healthy_deployments
        failed = _failed_ids(request)
        candidates = [each for each in healthy_deployments if _id(each) not in failed] or healthy_deployments
        return [_choose(key, group) for group in _by_order(candidates)]


media_affinity: MediaAffinity = MediaAffinity()
"""The callback for `litellm_settings.callbacks` of the proxy."""


def _media_parts(messages: object) -> Iterator[Mapping[str, Any]]:
    for message in messages if isinstance(messages, list) else ():
        # The Responses API has images in the output of a function, too.
        content = message.get("content", message.get("output")) if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in MEDIA_PARTS:
                yield part


def _source(value: object, depth: int) -> str | None:
    """Return the first string at a field that identifies content; the first frame of a video in frames."""
    if isinstance(value, str):
        return value
    if depth and isinstance(value, Mapping):
        found = (_source(value[name], depth - 1) for name in _SOURCE_FIELDS if name in value)
        return next(filter(None, found), None)
    return _source(value[0], depth) if isinstance(value, list) and value and not isinstance(value[0], list) else None


def _choose(key: bytes, deployments: Sequence[Deployment]) -> Deployment:
    weights = [_number(each, "weight") or 0.0 for each in deployments]
    if not any(weight > 0 for weight in weights):
        weights = [1.0] * len(deployments)
    scores = [rendezvous_score(key, _id(each), weight) for each, weight in zip(deployments, weights, strict=True)]
    return deployments[scores.index(max(scores))]


def _by_order(deployments: Sequence[Deployment]) -> list[list[Deployment]]:
    """Group deployments by `order`, among which LiteLLM chooses after the callback."""
    groups: dict[float | None, list[Deployment]] = {}
    for each in deployments:
        groups.setdefault(_number(each, "order"), []).append(each)
    return list(groups.values())


def _failed_ids(request: Mapping[str, Any]) -> set[str]:
    """Return the IDs of deployments that failed for this request, from what LiteLLM records for its retries."""
    failed = {*(request.get("_excluded_deployment_ids") or ()), *(request.get("_retry_skipped_deployment_ids") or ())}
    for name in ("metadata", "litellm_metadata"):
        metadata = request.get(name)
        attempts = metadata.get("previous_models") if isinstance(metadata, Mapping) else None
        for attempt in attempts if isinstance(attempts, (list, tuple)) else ():
            if isinstance(attempt, Mapping):
                failed.add(str(attempt.get("deployment_id")))
    return failed


def _model_info(deployment: Deployment) -> Mapping[str, Any]:
    return deployment.get("model_info") or {}


def _id(deployment: Deployment) -> str:
    return str(_model_info(deployment).get("id"))


def _number(deployment: Deployment, name: str) -> float | None:
    params = deployment.get("litellm_params") or {}
    value = params[name] if params.get(name) is not None else _model_info(deployment).get(name)
    return float(value) if isinstance(value, (int, float)) else None
