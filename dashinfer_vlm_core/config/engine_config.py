"""EngineConfig: all options of an engine in one frozen object. Only this package reads their environment variables."""

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
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import Self

from ..errors import ConfigError
from ..protocol.validation_errors import validation_message
from .plugin_options import ENV_PREFIX, PluginOptions

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MIB = 1024 * 1024

# Lists are comma-separated in the environment and on the command line.
Names = Annotated[tuple[str, ...], NoDecode]
Color = Annotated[tuple[int, int, int], NoDecode]

Options = TypeVar("Options", bound=PluginOptions)

VLLM_VARIABLES = {
    "image_fetch_timeout": "VLLM_IMAGE_FETCH_TIMEOUT",
    "video_fetch_timeout": "VLLM_VIDEO_FETCH_TIMEOUT",
}
"""vLLM's environment variables, used as fallback for options whose own variables are not set."""


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Maximum number of images and videos per request."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    image: NonNegativeInt = 32
    video: NonNegativeInt = 4

    def __str__(self) -> str:
        return f"image={self.image},video={self.video}"


@dataclass(frozen=True)
class LoraModule:
    """A LoRA adapter that is loaded at startup.

    Attributes:
        name: its name in requests.
        path: a folder in PEFT's format, or a Hugging Face model ID.
    """

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


class _VllmEnvironment(PydanticBaseSettingsSource):
    """The settings source with the lowest priority: vLLM's environment variables."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return os.environ.get(VLLM_VARIABLES.get(field_name, "")), field_name, False

    def __call__(self) -> dict[str, Any]:
        return {name: os.environ[variable] for name, variable in VLLM_VARIABLES.items() if os.environ.get(variable)}


class EngineConfig(BaseSettings):
    """Options of an engine.

    In order of priority, values come from the arguments, the environment (`DASHINFER_VLM_` and the field's name in
    upper case, else `VLLM_VARIABLES`), and the defaults below. Options of plugins are passed like those below, and read
    with `options_of`; which names plugins have is checked when an engine starts, by `Registry.resolve_options`. Equal
    configurations compare and hash equal, so that adapters can share an engine.

    Raises:
        ConfigError: a value is out of range; the message contains the name of the option.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="allow")

    # Model and decoder
    model: str = Field(
        "demo", description="Model to load: a registered name, a checkpoint folder, or a Hugging Face model ID."
    )
    served_model_name: str | None = Field(
        None,
        description="Name of the model in requests and responses; defaults to the registered name, the folder's name,"
        " or the model ID.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a Hugging Face model; defaults to the main branch."
    )
    lora: Annotated[tuple[LoraModule, ...], NoDecode] = Field(
        (),
        description="LoRA adapter in PEFT's format: its name in requests, and a folder or Hugging Face model ID. Can be"
        " repeated.",
    )
    max_loras: int = Field(
        8, ge=1, le=1024, description="Maximum number of LoRA adapters in memory; Python code can load more on demand."
    )
    chat_template: Path | None = Field(
        None, description="File with a Jinja chat template; defaults to the checkpoint's template."
    )
    decoder: str = Field("auto", description="Registered name of the decoder; `auto` selects the best one available.")
    device: str = Field("auto", description="Torch device, such as `cpu` or `cuda:0`; `auto` uses CUDA if available.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of the weights; `auto` uses the checkpoint's."
    )
    quantization: Literal["none", "int8", "int4", "uint4"] = Field(
        "none",
        description="Data type that weights are quantized to: int8 or int4 on a CPU with AVX2, or with DashInfer on"
        " CUDA. uint4 is the same as int4.",
    )
    vision_quantization: Literal["auto", "none", "int8"] = Field(
        "auto",
        description="Data type that weights of the vision encoder are quantized to; `auto` uses int8 if `quantization`"
        " is set and the CPU kernels support it.",
    )
    cpu_kernels: str = Field(
        "auto",
        description="Registered name of the CPU kernels, such as `amx`, `avx512`, `onednn` or `torch`; `auto` uses the"
        " best ones for the processor, or those that `dashinfer-vlm tune` measured to be the fastest.",
    )
    cuda_graphs: bool = Field(
        True,
        description="Whether decode steps of the PyTorch decoder and small passes of the vision encoder on CUDA are"
        " replayed as CUDA graphs, which take time to record and memory of the GPU; without effect on a CPU.",
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder for generated files: compiled kernels, converted models, DashInfer's environment; defaults"
        " to a folder in the user's cache.",
    )

    # Capacity
    max_model_len: int | None = Field(
        None,
        ge=16,
        description="Maximum number of tokens of prompt plus completion; defaults to the checkpoint's limit.",
    )
    max_batch_size: int = Field(
        32,
        ge=1,
        le=4096,
        description="Maximum number of completions decoded together; a request with n=2 counts twice.",
    )
    max_waiting: int = Field(
        256,
        ge=0,
        description="Maximum number of completions that wait for a slot in the batch; further requests are rejected.",
    )
    prefill_chunk: int = Field(
        512,
        ge=1,
        description="Maximum number of prompt tokens per step. While other requests are decoded, at most half as many,"
        " and about as many as take 0.1 seconds.",
    )
    kv_cache_mib: int = Field(
        4096,
        ge=1,
        description="Size of the KV cache, for running requests and earlier prompts, in MiB. On a CPU, the default is"
        " less if the weights leave less than twice as much of the machine's memory.",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "int8"] = Field(
        "auto",
        description="Data type of the KV cache, with the PyTorch decoder; `auto` uses that of the weights, int8 needs"
        " half the memory of bfloat16.",
    )
    prefix_cache: bool = Field(
        True, description="Whether to reuse keys and values of earlier prompts (DashInfer: only on CUDA)."
    )
    isolate_clients: bool = Field(
        False,
        description="Whether clients must not share cached prompts; the server sets it if it separates API keys."
        " DashInfer then disables its prefix cache, which cannot separate them.",
    )
    vision_cache_mib: int = Field(
        256,
        ge=0,
        description="Size of the embedding cache, whose keys are digests of images and videos, in MiB; 0 disables it.",
    )
    vision_batch_patches: int = Field(
        16384,
        ge=4,
        description="Maximum number of patches of images that share one forward pass of the vision encoder.",
    )

    decoder_restarts: int = Field(
        3, ge=0, description="Maximum number of consecutive restarts of a decoder that has died."
    )
    step_timeout: float = Field(
        600.0, gt=0, description="Seconds after which a step of the decoder is considered hung."
    )

    # Images and videos
    min_pixels: int | None = Field(
        None, ge=784, description="Minimum number of pixels of a resized image; defaults to the checkpoint's."
    )
    max_pixels: int | None = Field(
        None, ge=784, description="Maximum number of pixels of a resized image; defaults to the pixels of 1280 tokens."
    )
    video_max_pixels: int | None = Field(
        None, ge=784, description="Maximum number of pixels of a resized video frame; defaults to the model's."
    )
    video_total_pixels: int | None = Field(
        None,
        ge=784,
        description="Maximum number of pixels of all resized frames of a video; defaults to the model's.",
    )
    video_fps: float | None = Field(
        None,
        gt=0,
        le=120,
        description="Frames per second sampled from a video file; defaults to the model's.",
    )
    video_min_frames: int | None = Field(
        None,
        ge=2,
        description="Minimum number of frames sampled from a video file, if it has as many; defaults to the model's.",
    )
    video_max_frames: int | None = Field(
        None,
        ge=2,
        description="Maximum number of frames of a video, sampled or sent as a list; defaults to the model's.",
    )
    limit_mm_per_prompt: Annotated[MediaLimits, NoDecode] = Field(
        MediaLimits(), description="Maximum number of images and videos per request, as image=N,video=N or JSON."
    )
    enable_mm_embeds: bool = Field(
        False, description="Whether requests may contain visual embeddings in place of images (`image_embeds`)."
    )
    max_media_ids: int = Field(4096, ge=0, description="Maximum number of cached names (`uuid`) of images and videos.")
    rgba_background: Color = Field((255, 255, 255), description="Background color of transparent images, as R,G,B.")

    # Sources of media
    allow_remote_media: bool = Field(True, description="Whether to fetch http and https URLs.")
    allowed_media_domains: Names = Field(
        (), description="Host names that media may be fetched from; defaults to all public hosts."
    )
    allow_private_addresses: bool = Field(
        False, description="Whether media may be fetched from loopback, private and link-local addresses."
    )
    allowed_local_media_path: Path | None = Field(
        None,
        description="Folder whose files requests may refer to, `/` for all; by default, local files are rejected,"
        " except by `VLM`.",
    )
    image_max_bytes: int = Field(20 * MIB, ge=1, description="Maximum size of an encoded image, in bytes.")
    video_max_bytes: int = Field(200 * MIB, ge=1, description="Maximum size of an encoded video, in bytes.")
    max_decoded_pixels: int = Field(
        64_000_000,
        ge=784,
        le=89_478_485,
        description="Maximum number of pixels of an image before resizing, read from its header.",
    )
    video_max_seconds: float = Field(600.0, gt=0, description="Maximum duration of a video, in seconds.")
    video_max_decoded_pixels: int = Field(
        768_000_000, ge=784, description="Maximum number of pixels of all frames of a video before resizing."
    )
    video_reader: str = Field(
        "auto",
        description="Registered name of the video reader, such as `pyav` or `decord`; `auto` uses all installed ones"
        " except decord, best first.",
    )
    image_decode_timeout: float = Field(
        10.0, gt=0, description="Timeout for decoding and resizing an image, in seconds; needs media workers."
    )
    video_decode_timeout: float = Field(
        30.0, gt=0, description="Timeout for opening, decoding and resizing a video, in seconds."
    )
    media_workers: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="Maximum number of processes that decode media; defaults to one more than there are CPUs. 0 decodes"
        " in threads of the engine, which is only for trusted media.",
    )
    media_worker_memory_mib: int = Field(
        1024, ge=64, description="Maximum memory that a media worker may allocate, in MiB."
    )
    image_fetch_timeout: float = Field(5.0, gt=0, description="Timeout for fetching an image, in seconds.")
    video_fetch_timeout: float = Field(30.0, gt=0, description="Timeout for fetching a video, in seconds.")
    max_fetched_bytes: int = Field(
        512 * MIB, ge=1, description="Maximum number of bytes fetched for all media of a request."
    )
    max_fetches: int = Field(16, ge=1, description="Maximum number of concurrent fetches of a client.")

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise config_error(error.errors(include_url=False), options) from None

    @property
    def resolved_vision_quantization(self) -> Literal["none", "int8"]:
        """The preferred data type of the vision encoder's weights, where `auto` follows `quantization`."""
        if self.vision_quantization != "auto":
            return self.vision_quantization
        return "none" if self.quantization == "none" else "int8"

    @property
    def plugin_options(self) -> dict[str, Any]:
        """The options that are not of EngineConfig, as they were given."""
        return self.model_extra or {}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Leave out the options of plugins, which may contain passwords."""
        yield from ((name, value) for name, value in super().__repr_args__() if name not in self.plugin_options)

    def options_of(self, kind: type[Options]) -> Options:
        """Return a plugin's options by their class: those given, else from the environment, else the defaults.

        Raises:
            ConfigError: a value is out of range.
        """
        given = self.plugin_options
        try:
            return kind(**{name: given[name] for name in kind.model_fields if name in given})
        except ValidationError as error:
            raise config_error(error.errors(include_url=False), given) from None

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
    def _parse_limits(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            if value.lstrip().startswith("{"):
                return json.loads(value)
            return dict(pair.split("=", 1) for pair in value.replace(" ", "").split(",") if pair)
        except ValueError:
            raise ValueError(
                'must be a list such as image=4,video=1 or JSON such as {"image": 4, "video": 1}'
            ) from None

    @field_validator("lora", mode="before")
    @classmethod
    def _parse_lora(cls, value: object) -> object:
        if isinstance(value, str):
            value = [item for item in value.split(",") if item.strip()]
        if isinstance(value, Mapping):
            value = [LoraModule(name, str(path)) for name, path in value.items()]
        return tuple(map(_lora_module, value)) if isinstance(value, (list, tuple)) else value

    @field_validator("lora")
    @classmethod
    def _check_lora(cls, value: tuple[LoraModule, ...]) -> tuple[LoraModule, ...]:
        names = [module.name for module in value]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"the name {repeated!r} is used twice; give each adapter its own name")
        return value

    @model_validator(mode="after")
    def _check_max_loras(self) -> Self:
        if len(self.lora) > self.max_loras:
            raise ValueError(
                f"`max_loras` must be at least the number of adapters in `lora`, {len(self.lora)}, got {self.max_loras}"
            )
        if self.name in {module.name for module in self.lora}:
            raise ValueError(f"`lora` has an adapter with the model's own name, {self.name!r}; choose another one")
        return self

    @field_validator("rgba_background", mode="before")
    @classmethod
    def _three_channels(cls, value: object) -> object:
        if isinstance(value, tuple) and len(value) != 3:
            raise ValueError("must be three numbers, such as 255,255,255")
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
    def _check_channels(cls, value: tuple[int, int, int]) -> tuple[int, int, int]:
        if not all(0 <= level <= 255 for level in value):
            raise ValueError("must be three numbers from 0 to 255")
        return value

    @property
    def cache_folder(self) -> Path:
        """Folder for generated files: `cache_dir`, or the default of the XDG Base Directory Specification."""
        if self.cache_dir is not None:
            return self.cache_dir.expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dashinfer-vlm"

    @property
    def name(self) -> str:
        """The model's name in requests and responses; for a folder its last part, so that responses contain no path."""
        folder = Path(self.model).expanduser()
        return self.served_model_name or (folder.resolve().name if folder.is_dir() else self.model)

    def request_name(self, model: str) -> str:
        """Return the name that a request for `model` to this engine has: a LoRA adapter's, or the model's own."""
        return model if any(module.name == model for module in self.lora) else self.name


def _lora_module(value: object) -> object:
    """Convert `name=path` to a module; other values are left to pydantic."""
    if not isinstance(value, str):
        return value
    name, equals, path = value.strip().partition("=")
    if not (name and equals and path):
        raise ValueError(f"must be name=folder or name=owner/model, got {value!r}")
    return LoraModule(name, path)


def variable(option: str) -> str:
    """Return the environment variable of an option, which is named by its field or flag."""
    return ENV_PREFIX + option.replace("-", "_").upper()


def variables_set() -> list[str]:
    """Return the names of all environment variables with our prefix, known or not."""
    return [name for name in os.environ if name.startswith(ENV_PREFIX)]


def config_error(errors: Sequence[ErrorDetails], given: Mapping[str, Any]) -> ConfigError:
    """Report all errors of a configuration in one line, with the names of options and of their environment variables.

    `param` is the first option.
    """
    texts = [_error_text(error, given) for error in errors]
    message = f"Invalid option {'; '.join(texts)}. `dashinfer-vlm serve --help` lists every option."
    location = errors[0]["loc"]
    return ConfigError(message, param=str(location[0]) if location else None)


def _error_text(error: ErrorDetails, given: Mapping[str, Any]) -> str:
    location = error["loc"]
    if not location:  # the error concerns several options together
        return validation_message(error)
    name = ".".join(map(str, location))
    return f"{name}{_source(str(location[0]), given)}: {validation_message(error)} (got {error['input']!r})"


def _source(option: str, given: Mapping[str, Any]) -> str:
    if option in given:
        return ""
    ours, vllms = variable(option), VLLM_VARIABLES.get(option)
    return f" (from {vllms if vllms and ours not in os.environ else ours})"
