"""Options for several models: `--model a --model b=FOLDER`, and `models` of the configuration file."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import click
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from dashinfer_vlm_core.cli.config_file import located_errors
from dashinfer_vlm_core.cli.options import EngineOption, engine_options
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.folders import expand_user
from dashinfer_vlm_core.errors import ConfigError

from .help import OPTIONS, Option, ServerCommand

_SECONDS: Mapping[str, float] = {"s": 1, "m": 60, "h": 3600}
_BYTES: Mapping[str, float] = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def _seconds(value: object) -> object:
    return _scaled(value, _SECONDS, "must be a number of seconds, or one with a unit, such as 90s, 10m or 1h")


def _bytes(value: object) -> object:
    return _scaled(value, _BYTES, "must be a number of bytes, or one with a unit, such as 800m or 12g")


def _scaled(value: object, units: Mapping[str, float], problem: str) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)([{''.join(units)}]?)", value.strip().lower())
    if match is None:
        raise ValueError(problem)
    return float(match[1]) * units.get(match[2], 1)


@dataclass(config=OPTIONS, frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Options of a server that loads and unloads models."""

    title: ClassVar[str] = "Several models"

    memory_limit: Annotated[float | None, BeforeValidator(_bytes)] = Field(default=None, gt=0, title="SIZE")
    """Maximum memory of all loaded models together, such as 12g: the least recently used ones are unloaded for
    others."""

    idle_unload: Annotated[float | None, BeforeValidator(_seconds)] = Field(default=None, gt=0, title="TIME")
    """Time without requests after which a model is unloaded, such as 10m."""

    model_wait: Annotated[float, BeforeValidator(_seconds)] = Field(default=120.0, gt=0, title="TIME")
    """Maximum time that a request waits until its model is loaded."""

    allow_model_management: bool = False
    """Whether clients of a server without API keys may load and unload models."""


class _Models(click.ParamType[Any]):
    """JSON, as the configuration file is converted to it."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            models = json.loads(value)
        except ValueError:
            models = None
        if not isinstance(models, dict) or not models:
            self.fail(
                'it must map names to options, such as {"chat": {"model": "demo", "pinned": "true"}}.', param, ctx
            )
        return models


MODELS = Option(
    ["--models"],
    type=_Models(),
    section=ModelOptions.title,
    envvar="DASHINFER_VLM_MODELS",
    metavar="JSON",
    help="Models by name with their options, `aliases` and `pinned`; usually a mapping in the file of --config.",
)
MODELS.nested = True


class ServeCommand(ServerCommand):
    """A command whose `--model` can be repeated and name the model, as in `--model b=FOLDER`.

    The callback receives the models as `models`, pairs of a name and options: none for a single model, which `config`
    describes.
    """

    @functools.cached_property
    def engine_options(self) -> list[EngineOption]:
        """See `EngineCommand`; `--model` can be repeated."""
        options = engine_options()
        model = next(option for option in options if option.name == "model")
        model.multiple = True
        assert model.help, "it has a docstring"
        model.help = model.help.replace("ID.", "ID. Can be repeated, and named: NAME=FOLDER.", 1)
        return options

    def invoke(self, ctx: click.Context) -> Any:
        models: Sequence[tuple[str, object]] = tuple((ctx.params["models"] or {}).items())
        with located_errors():
            self._reject_server_options(models)
        listed = [_named(value) for value in ctx.params["model"]]
        if models and listed:
            raise click.UsageError("`models` and --model cannot be combined. Leave out one of the two.", ctx)
        if len(listed) > 1:
            if ctx.params["served_model_name"]:
                raise click.UsageError("--served-model-name is for one model. Write --model NAME=FOLDER.", ctx)
            models = [(name or EngineConfig(model=model).name, {"model": model}) for name, model in listed]
        name, model = listed[0] if listed and not models else (None, None)
        ctx.params |= {"model": model, "models": models}
        if name:
            ctx.params["served_model_name"] = name
        return super().invoke(ctx)

    def _reject_server_options(self, models: Sequence[tuple[str, object]]) -> None:
        flags = {flag for param in self.params if isinstance(param, click.Option) for flag in param.opts}
        for name, options in models:
            for key in options if isinstance(options, Mapping) else ():
                if f"--{key.replace('_', '-')}" in flags:
                    message = f"models: {name!r}: `{key}` is an option of the server. Move it out of `models`."
                    raise ConfigError(message, param=f"models.{name}.{key}")


def _named(value: str) -> tuple[str | None, str]:
    name, equals, model = value.partition("=")
    if not equals or expand_user(value).exists():
        return None, value
    if not (name and model):
        missing = "model" if name else "name"
        raise ConfigError(f"`--model {value}` has no {missing}. Write --model NAME=FOLDER.", param="model")
    return name, model
