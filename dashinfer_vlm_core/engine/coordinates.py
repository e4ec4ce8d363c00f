"""The coordinates that the images of a request share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidParameter
from ..models.coordinates import ImageCoordinates
from ..protocol import ChatRequest

if TYPE_CHECKING:
    from ..media.types import VisualInput
    from ..models.interface import ImageProcessor
    from ..models.spec import ModelSpec


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
            raise _error("images, since embeddings have no original size. Remove it.")
        shape = processor.shape(item.grid)
        found.add(spec.coordinates.for_image(item.source_size, (shape.width, shape.height)))
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
