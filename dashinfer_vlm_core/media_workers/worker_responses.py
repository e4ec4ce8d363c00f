"""Responses of media workers, validated: a hostile file may have taken over the worker that sends them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, StringConstraints

from ..errors import InvalidParameter, MediaTooLarge, MediaUndecodable

MAX_SIDE = 1 << 30

_Line = Annotated[str, StringConstraints(max_length=2000, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]


def escape_controls(text: str) -> str:
    """Escape all control characters but line feeds, such as those that change what a terminal shows."""
    return "".join(
        character if character == "\n" or character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


_Traceback = Annotated[str, Field(max_length=10_000), AfterValidator(escape_controls)]
_Side = Annotated[PositiveInt, Field(le=MAX_SIDE)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_FramesPerSecond = Annotated[float, Field(ge=1e-9, allow_inf_nan=False)]

_ERRORS = {kind.__name__: kind for kind in (InvalidParameter, MediaTooLarge, MediaUndecodable)}


class _Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", frozen=True)


class ErrorResponse(_Model):
    """The request is invalid."""

    type: Literal["InvalidParameter", "MediaTooLarge", "MediaUndecodable"]
    message: _Line
    param: _Line
    code: _Line | None

    def restore(self, path: str) -> InvalidParameter | MediaTooLarge | MediaUndecodable:
        """Return the exception.

        Args:
            path: the part's path in the request, which its `param` must begin with.

        Raises:
            ValueError: it names another part.
        """
        if not self.param.startswith(path):
            raise ValueError("the error names another part")
        return _ERRORS[self.type](self.message, param=self.param, code=self.code)


class PatchesResponse(_Model):
    """The item was processed; its pixels are in the shared memory."""

    shape: tuple[_Side, _Side]
    grid: tuple[_Side, _Side, _Side]
    times: tuple[_Seconds, ...]
    sampled_fps: _FramesPerSecond | None
    source_size: tuple[_Side, _Side]


class WorkerResponse(_Model):
    """The response to a job: one of the fields, and the worker's warnings.

    Attributes:
        error: the request is invalid.
        patches: the item was processed.
        tokens: the item has more visual tokens than the job allows.
        exception: the traceback of an unexpected exception.
        logs: warnings of the decoder.
    """

    error: ErrorResponse | None = None
    patches: PatchesResponse | None = None
    tokens: PositiveInt | None = None
    exception: _Traceback | None = None
    logs: Annotated[tuple[_Line, ...], Field(max_length=10)]


class Started(_Model):
    """The first message of a worker: its process id, or why it cannot be set up.

    Attributes:
        ready: its process id.
        warning: how its sandbox is less strict than it should be, if it is.
        failed: why it cannot be set up.
    """

    ready: PositiveInt | None = None
    warning: _Line = ""
    failed: _Traceback = ""
