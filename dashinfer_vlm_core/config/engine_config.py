"""EngineConfig: every option of an engine in one frozen object; the only reader of the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import Self

from ..errors import ConfigError
from ..protocol.validation_messages import validation_message
from .plugin_options import ENV_PREFIX, PluginOptions, option_classes

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MIB = 1024 * 1024

# In the environment and on the command line, lists are separated by commas.
Names = Annotated[tuple[str, ...], NoDecode]
Color = Annotated[tuple[int, int, int], NoDecode]

Options = TypeVar("Options", bound=PluginOptions)

VLLM_VARIABLES = {
    "image_fetch_timeout": "VLLM_IMAGE_FETCH_TIMEOUT",
    "video_fetch_timeout": "VLLM_VIDEO_FETCH_TIMEOUT",
}
"""Variables of vLLM that are read where our own are not set."""


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Pictures and videos allowed in one request."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    image: NonNegativeInt = 32
    video: NonNegativeInt = 4

    def __str__(self) -> str:
        return f"image={self.image},video={self.video}"


class _VllmEnvironment(PydanticBaseSettingsSource):
    """The last source: what vLLM's users have set already."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return os.environ.get(VLLM_VARIABLES.get(field_name, "")), field_name, False

    def __call__(self) -> dict[str, Any]:
        return {name: os.environ[variable] for name, variable in VLLM_VARIABLES.items() if os.environ.get(variable)}


class EngineConfig(BaseSettings):
    """Options of an engine.

    Values come from the arguments, then from the environment (`DASHINFER_VLM_` and the field's name in upper case, else
    `VLLM_VARIABLES`), then from the defaults below. Options of plugins are given like those below, and read by
    `options_of`. Equal configurations compare and hash equal, so that adapters can share an engine.

    Raises:
        ConfigError: an unknown name, or a value out of range; the message names the option.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    # What answers
    model: str = Field("demo", description="Model to load: a registered name, a checkpoint folder, or a hub id.")
    served_model_name: str | None = Field(
        None, description="Name that requests use for the model; its own name by default."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id; its main branch by default.")
    chat_template: Path | None = Field(
        None, description="File with a Jinja chat template; the checkpoint's own by default."
    )
    decoder: str = Field(
        "auto", description="Decoder to use by registered name; `auto` takes the best that can run here."
    )
    device: str = Field(
        "auto", description="Torch device, such as `cpu` or `cuda:0`; `auto` takes CUDA where there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number type of the weights; `auto` takes the checkpoint's."
    )
    quantization: Literal["none", "int8", "uint4"] = Field(
        "none",
        description="Number type that weights are rounded to: int8 on a CPU with AVX-512, int8 or uint4 with DashInfer"
        " on CUDA.",
    )
    cpu_kernels: str = Field(
        "auto",
        description="Kernels to use on a CPU, by registered name; `torch` are PyTorch's, `auto` takes the fastest that"
        " can run here.",
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder for what is made here: compiled kernels, converted models, DashInfer's environment; by"
        " default in the user's cache.",
    )

    # How much at once
    max_model_len: int | None = Field(
        None, ge=16, description="Tokens of prompt plus answer; the checkpoint's limit by default."
    )
    max_batch_size: int = Field(32, ge=1, le=4096, description="Requests that are decoded together.")
    max_waiting: int = Field(
        256, ge=0, description="Requests that may wait for a place in the batch; more are refused."
    )
    prefill_chunk: int = Field(
        512, ge=1, description="Prompt tokens that are read per step at most; half as many beside answers."
    )
    kv_cache_mib: int = Field(
        4096, ge=1, description="Memory for keys and values, of running requests and of earlier prompts, in MiB."
    )
    prefix_cache: bool = Field(
        True, description="Whether keys and values of earlier prompts are used again (DashInfer: on CUDA alone)."
    )
    vision_cache_mib: int = Field(
        256, ge=0, description="Memory for visual embeddings kept by content, in MiB; 0 keeps none."
    )
    vision_batch_patches: int = Field(
        16384, ge=4, description="Patches of several pictures that share one pass of the vision tower."
    )

    decoder_restarts: int = Field(
        3, ge=0, description="Times in a row that a decoder which has died is started again, until it is given up on."
    )
    step_timeout: float = Field(600.0, gt=0, description="Seconds after which one step of the decoder counts as hung.")

    # Pictures and videos
    min_pixels: int | None = Field(
        None, ge=784, description="Least pixels of a resized picture; the checkpoint's by default."
    )
    max_pixels: int | None = Field(
        None, ge=784, description="Most pixels of a resized picture; 1280 tokens' worth by default."
    )
    video_max_pixels: int | None = Field(
        None, ge=784, description="Most pixels of one resized video frame; the model's by default."
    )
    video_total_pixels: int | None = Field(
        None,
        ge=784,
        description="Most pixels of a resized video's frames together; the model's by default.",
    )
    video_fps: float | None = Field(
        None,
        gt=0,
        le=120,
        description="Frames per second that are sampled from a video file; the model's by default.",
    )
    video_min_frames: int | None = Field(
        None, ge=2, description="Least frames sampled from a video file, if it has as many; the model's by default."
    )
    video_max_frames: int | None = Field(
        None, ge=2, description="Most frames of one video, sampled or given as a list; the model's by default."
    )
    limit_mm_per_prompt: Annotated[MediaLimits, NoDecode] = Field(
        MediaLimits(), description="Pictures and videos allowed in one request, as image=N,video=N or JSON."
    )
    enable_mm_embeds: bool = Field(
        False, description="Whether requests may bring visual embeddings in place of pictures (`image_embeds`)."
    )
    max_media_ids: int = Field(
        4096, ge=0, description="Names (`uuid`) of pictures and videos that are remembered with their contents."
    )
    rgba_background: Color = Field((255, 255, 255), description="Colour under transparent pictures, as R,G,B.")

    # Where media may come from
    allow_remote_media: bool = Field(True, description="Whether http and https sources are fetched.")
    allowed_media_domains: Names = Field(
        (), description="Host names that may be fetched from; all public ones by default."
    )
    allow_private_addresses: bool = Field(
        False, description="Whether loopback, private and link-local addresses may be fetched."
    )
    allowed_local_media_path: Path | None = Field(
        None, description="Folder under which local files may be read; none by default."
    )
    image_max_bytes: int = Field(20 * MIB, ge=1, description="Most bytes of one encoded picture.")
    video_max_bytes: int = Field(200 * MIB, ge=1, description="Most bytes of one encoded video.")
    max_decoded_pixels: int = Field(
        64_000_000, ge=784, le=89_478_485, description="Most pixels of a picture before resizing, read from its header."
    )
    video_max_seconds: float = Field(600.0, gt=0, description="Longest video, in seconds.")
    video_max_decoded_pixels: int = Field(
        768_000_000, ge=784, description="Most pixels of all frames of one video before resizing."
    )
    video_decode_timeout: float = Field(30.0, gt=0, description="Seconds for decoding one video.")
    image_fetch_timeout: float = Field(5.0, gt=0, description="Seconds for fetching one picture.")
    video_fetch_timeout: float = Field(30.0, gt=0, description="Seconds for fetching one video.")
    max_fetched_bytes: int = Field(
        512 * MIB, ge=1, description="Most bytes that are fetched for one request, all of its media together."
    )
    max_fetches: int = Field(16, ge=1, description="Sources fetched at the same time by one engine.")

    _plugin_options: tuple[PluginOptions, ...] = PrivateAttr(())

    def __init__(self, **options: Any) -> None:
        classes = option_classes(frozenset(type(self).model_fields))
        theirs = {name for kind in classes for name in kind.model_fields}
        validated = [_validated(kind, options) for kind in classes]
        faults = [fault for _, found in validated for fault in found]
        try:
            super().__init__(**{name: value for name, value in options.items() if name not in theirs})
        except ValidationError as error:
            faults = [*error.errors(include_url=False), *faults]
        if faults:
            raise _explain(faults, options)
        self._plugin_options = tuple(made for made, _ in validated if made)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield from super().__repr_args__()
        for options in self._plugin_options:
            yield from options.__repr_args__()

    @property
    def plugin_options(self) -> tuple[PluginOptions, ...]:
        """Those of all installed plugins."""
        return self._plugin_options

    def options_of(self, kind: type[Options]) -> Options:
        """A plugin's options, by their class; where it is not installed, as the environment sets them."""
        try:
            return next((options for options in self._plugin_options if isinstance(options, kind)), None) or kind()
        except ValidationError as error:
            raise _explain(error.errors(include_url=False), {}) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; `update` may hold options of plugins too."""
        changes = dict(update or {})
        theirs = [
            {name: changes.pop(name) for name in type(options).model_fields if name in changes}
            for options in self._plugin_options
        ]
        copy = super().model_copy(update=changes, deep=deep)
        copy._plugin_options = tuple(  # noqa: SLF001 - of the same class
            options.model_copy(update=values) for options, values in zip(self._plugin_options, theirs, strict=True)
        )
        return copy

    @model_serializer(mode="wrap")
    def _with_plugin_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        own: dict[str, Any] = handler(self)
        for options in self._plugin_options:
            own |= options.model_dump()
        return own

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _VllmEnvironment(settings_cls)

    @field_validator("limit_mm_per_prompt", mode="before")
    @classmethod
    def _limits(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            if value.lstrip().startswith("{"):
                return json.loads(value)
            return dict(pair.split("=", 1) for pair in value.replace(" ", "").split(",") if pair)
        except ValueError:
            raise ValueError('write image=4,video=1, or {"image": 4, "video": 1}') from None

    @field_validator("rgba_background", mode="before")
    @classmethod
    def _three(cls, value: object) -> object:
        if isinstance(value, tuple) and len(value) != 3:
            raise ValueError("write three numbers, as in 255,255,255")
        return value

    @field_validator("allowed_media_domains", "rgba_background", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(item.strip() for item in value.split(",") if item.strip()) if isinstance(value, str) else value

    @field_validator("allowed_media_domains")
    @classmethod
    def _lower_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower().rstrip(".") for name in value)

    @field_validator("rgba_background")
    @classmethod
    def _levels(cls, value: tuple[int, int, int]) -> tuple[int, int, int]:
        if not all(0 <= level <= 255 for level in value):
            raise ValueError("each of R,G,B must be 0 to 255")
        return value

    @property
    def cache_folder(self) -> Path:
        """Where this package keeps what it has made: `cache_dir`, else as the XDG Base Directory Specification says."""
        if self.cache_dir is not None:
            return self.cache_dir.expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dashinfer-vlm"

    @property
    def name(self) -> str:
        """The model's name in requests and answers; a folder goes by its last part, so that answers hold no path."""
        folder = Path(self.model).expanduser()
        return self.served_model_name or (folder.resolve().name if folder.is_dir() else self.model)


def option_fields() -> dict[str, tuple[FieldInfo, str]]:
    """Every option by its name: its field, and the title of the plugin that brings it, empty for the engine's own."""
    own = EngineConfig.model_fields
    theirs = {
        name: (field, kind.title)
        for kind in option_classes(frozenset(own))
        for name, field in kind.model_fields.items()
    }
    return {**{name: (field, "") for name, field in own.items()}, **theirs}


def variable(option: str) -> str:
    """The variable that sets an option, by the name of its field or its flag."""
    return ENV_PREFIX + option.replace("-", "_").upper()


def variables_set() -> list[str]:
    """Names of the variables that begin as ours do, known or not."""
    return [name for name in os.environ if name.startswith(ENV_PREFIX)]


def _validated(
    kind: type[PluginOptions], options: Mapping[str, Any]
) -> tuple[PluginOptions | None, Sequence[ErrorDetails]]:
    """Those of one plugin among `options`, or what is wrong with them."""
    try:
        return kind(**{name: options[name] for name in kind.model_fields if name in options}), ()
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _explain(faults: Sequence[ErrorDetails], given: Mapping[str, Any]) -> ConfigError:
    """All faults of a configuration in one line, by the names of the options, and of the variables that they come from;
    `param` is the first option."""
    texts = [_text(fault, given) for fault in faults]
    message = f"Invalid option {'; '.join(texts)}. `dashinfer-vlm serve --help` lists every option."
    place = faults[0]["loc"]
    return ConfigError(message, param=str(place[0]) if place else None)


def _text(fault: ErrorDetails, given: Mapping[str, Any]) -> str:
    place = fault["loc"]
    if not place:  # of several options together
        return validation_message(fault)
    name = ".".join(map(str, place))
    return f"{name}{_source(str(place[0]), given)}: {validation_message(fault)} (got {fault['input']!r})"


def _source(option: str, given: Mapping[str, Any]) -> str:
    if option in given:
        return ""
    ours, vllms = variable(option), VLLM_VARIABLES.get(option)
    return f" (from {vllms if vllms and ours not in os.environ else ours})"
