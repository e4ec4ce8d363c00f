"""Options of the server as fields of dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click
from click.core import ParameterSource
from pydantic import ConfigDict, TypeAdapter, ValidationError

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.config_file import FileOption
from dashinfer_vlm_core.cli.options import option_attributes
from dashinfer_vlm_core.config import variable
from dashinfer_vlm_core.protocol.validation_errors import validation_message

from .logs import errors_as_records

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

T = TypeVar("T")

OPTIONS = ConfigDict(arbitrary_types_allowed=True)
"""Configuration of pydantic dataclasses whose fields are options; their docstrings are the help."""


class Option(FileOption):
    """An option of the server that the environment can set."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            if ctx.get_parameter_source(self.name or "") is not ParameterSource.ENVIRONMENT:
                raise
            raise click.BadParameter(f"{error.message} {self._fix_hint(str(value))}", ctx, self) from error

    def _fix_hint(self, value: str) -> str:
        if value.startswith("tcp://"):
            cause = f"Kubernetes sets {self.envvar} for a Service of that name"
            return f"{cause}. Add `enableServiceLinks: false` to the pod's spec, or set {self.opts[0]}."
        return f"It comes from the environment. Set {self.envvar} to another value, or unset it."


class FieldType(click.ParamType[Any]):
    """Converts and checks a value as pydantic does for a field."""

    name = "value"

    def __init__(self, field: FieldInfo) -> None:
        parts = (field.annotation, *field.metadata)
        kind: Any = Annotated[parts] if field.metadata else field.annotation
        self._validator: TypeAdapter[Any] = TypeAdapter(kind)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._validator.validate_python(value)
        except ValidationError as error:
            self.fail(f"{value!r} {validation_message(error.errors()[0])}.", param, ctx)


def options_of(kind: type[Any]) -> list[click.Parameter]:
    """Return an option for each field of a pydantic dataclass; its `title` is the section in the help."""
    return [
        Option(
            section=kind.title,
            default=field.default,
            envvar=variable(name),
            type=None if field.annotation is bool else FieldType(field),
            **option_attributes(kind, name, field),
        )
        for name, field in kind.__pydantic_fields__.items()
    ]


def from_options(kind: type[T], options: Mapping[str, Any]) -> T:
    """Create a dataclass from the values of its options."""
    return kind(**{name: options[name] for name in signature(kind).parameters})


class ServerCommand(EngineCommand):
    """A command whose errors are logged in the format of log lines."""

    first_sections = ("Model", "Scheduling and memory", "Images and videos", "Network")

    def invoke(self, ctx: click.Context) -> Any:
        with errors_as_records():
            return super().invoke(ctx)
