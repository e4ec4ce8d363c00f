"""The coordinates that the images of a request share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from ..errors import InvalidParameter
from ..models.coordinates import ImageCoordinates
from ..protocol import ChatRequest

if TYPE_CHECKING:
    from ..models.spec import ModelSpec

ImageSizes: TypeAlias = tuple[tuple[int, int] | None, tuple[int, int]]
"""Width and height of an image before resizing, None for embeddings, and after it, in pixels."""


def find_coordinates(request: ChatRequest, spec: ModelSpec, sizes: Iterable[ImageSizes]) -> ImageCoordinates | None:
    """Return the coordinates of all images of a request; None if none are to be converted.

    Raises:
        InvalidParameter: there is no image, one without an original size, or there are several sizes.
    """
    if request.coordinates == "model" or spec.coordinates is None:
        return None
    found: set[ImageCoordinates] = set()
    for source_size, size in sizes:
        if source_size is None:
            raise _error("images, since embeddings have no original size. Remove it.")
        found.add(spec.coordinates.for_image(source_size, size))
    if not found:
        raise _error("an image. Send one, or remove `coordinates`.")
    if len(found) > 1:
        raise _error(
            "images of one size: a text does not state which image its coordinates belong to. Send one image, or"
            " remove `coordinates` and convert them with `ImageCoordinates`."
        )
    return found.pop()


def _error(requirement: str) -> InvalidParameter:
    return InvalidParameter(f"`coordinates` 'original' requires {requirement}", param="coordinates")
