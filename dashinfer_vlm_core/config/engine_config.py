"""EngineConfig: all options of an engine in one frozen object. Only this package reads their environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_settings import SettingsConfigDict
from typing_extensions import Self

from ..errors import ConfigError
from .folders import expand_user
from .limits import Limits
from .options import Options, PluginOptions, variable

MIB = 1024 * 1024
USUAL_VIDEO_SECONDS = 600.0
"""`limits.video_decode_timeout` is for videos of up to this duration."""

PluginOptionsT = TypeVar("PluginOptionsT", bound=PluginOptions)


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Maximum number of images, videos and documents per request."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    image: NonNegativeInt = 32
    video: NonNegativeInt = 4
    document: NonNegativeInt = 8

    def __str__(self) -> str:
        return f"image={self.image},video={self.video},document={self.document}"


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


def _lora_module(value: object) -> object:
    if not isinstance(value, str):
        return value
    name, equals, path = value.strip().partition("=")
    if not (name and equals and path):
        raise ValueError("must be name=folder or name=owner/model")
    return LoraModule(name, path)


def _color(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        return validate(value)
    except ValidationError:
        raise ValueError("must be three numbers from 0 to 255, such as 255,255,255") from None


LoraModules = tuple[Annotated[LoraModule, BeforeValidator(_lora_module)], ...]
ColorLevel = Annotated[int, Field(ge=0, le=255)]
Color = Annotated[tuple[ColorLevel, ColorLevel, ColorLevel], WrapValidator(_color)]


class EngineConfig(Options):
    """Options of an engine.

    In order of priority, values come from the arguments, the environment (`DASHINFER_VLM_` and the field's name in
    upper case, else `VLLM_VARIABLES`), and the defaults below. Options of plugins are passed like those below, and read
    with `options_of`; which names plugins have is checked when an engine starts, by `Registry.resolve_options`. Equal
    configurations compare and hash equal, so that adapters can share an engine.

    Attributes:
        isolate_clients: whether clients must not share cached prompts. The server sets it if it separates API keys.
            DashInfer then disables its prefix cache, which cannot separate them.
        limits: limits that are no options.

    Raises:
        ConfigError: a value is out of range; the message contains the name of the option.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(extra="allow")

    python_only: ClassVar[frozenset[str]] = frozenset({"isolate_clients", "limits"})

    # Model and decoder
    model: str = Field("demo", title="NAME|FOLDER")
    """Model to load: a registered name, a checkpoint folder, or a Hugging Face model ID."""

    served_model_name: str | None = None
    """Name of the model in requests and responses; defaults to the registered name, the folder's name, or the model
    ID."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model; defaults to the main branch."""

    task: Literal["auto", "generate", "embed", "score", "token_embed"] = "auto"
    """What the model is used for: to generate text, to embed, to score documents, or to embed each token; `auto` finds
    it in the checkpoint's files."""

    lora: LoraModules = Field((), title="NAME=FOLDER")
    """LoRA adapter in PEFT's format: its name in requests, and a folder or Hugging Face model ID. Can be repeated."""

    chat_template: Path | None = None
    """File with a Jinja chat template; defaults to the checkpoint's template."""

    ocr_prompt: str | None = None
    """Prompt with which pages are sent to the model by `/v1/ocr` and `dashinfer-vlm ocr`; defaults to the one that the
    model was trained with, if it is known."""

    decoder: str = "auto"
    """Registered name of the decoder; `auto` selects the best one available."""

    device: str = "auto"
    """Torch device, such as `cpu` or `cuda:0`; `auto` uses CUDA if available."""

    speculative_model: str | None = Field(None, min_length=1, title="NAME|FOLDER")
    """Smaller model with the same vocabulary, or EAGLE-3 head, that drafts tokens; only with the PyTorch decoder. It is
    loaded like `model`, and quantized like it."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights; `auto` uses the checkpoint's."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Data type that weights are quantized to: int8 or int4 on a CPU with AVX2, or with DashInfer on CUDA."""

    vision_quantization: Literal["auto", "none", "int8"] = "auto"
    """Data type that weights of the vision encoder are quantized to; `auto` uses int8 if `quantization` is set and the
    CPU kernels support it."""

    cpu_kernels: str = "auto"
    """Registered name of the CPU kernels, such as `amx`, `avx512`, `onednn` or `torch`; `auto` uses the best ones for
    the processor, or those that `dashinfer-vlm tune` measured to be the fastest."""

    cpu_threads: int | None = Field(None, ge=1)
    """Number of threads that compute on a CPU; defaults to one per physical core of a socket, or fewer if the process
    may use less time, or to what `dashinfer-vlm tune` measured to be the fastest."""

    cuda_graphs: bool = True
    """Whether decode steps of the PyTorch decoder and small passes of the vision encoder on CUDA are replayed as CUDA
    graphs, which take time to record and memory of the GPU; without effect on a CPU."""

    cache_dir: Path | None = None
    """Folder for generated files: converted weights, results of `tune`, DashInfer's environment; defaults to a folder
    in the user's cache."""

    weight_cache_mib: int = Field(20_480, ge=0)
    """Maximum size of the files with converted weights in the cache folder, from which later starts on a CPU load them,
    in MiB; 0 converts the weights at each start."""

    # Capacity
    max_model_len: int | None = Field(None, ge=16)
    """Maximum number of tokens of prompt plus completion; at most the checkpoint's limit, which is the default."""

    max_batch_size: int = Field(32, ge=1, le=4096)
    """Maximum number of completions decoded together; a request with n=2 counts twice."""

    max_waiting: int = Field(256, ge=0)
    """Maximum number of completions that wait for a slot in the batch; further requests are rejected."""

    prefill_chunk: int = Field(512, ge=1)
    """Maximum number of prompt tokens per step, which are about as many as take 2 seconds. While other requests are
    decoded, at most half as many, and about as many as take 0.1 seconds."""

    kv_cache_mib: int = Field(4096, ge=1)
    """Size of the KV cache and of recurrent states, for running requests and earlier prompts, in MiB. On a CPU, the
    default is less if the weights leave less than twice as much of the machine's memory."""

    kv_cache_dtype: Literal["auto", "bfloat16", "int8"] = "auto"
    """Data type of the KV cache, with the PyTorch decoder; `auto` uses that of the weights, int8 needs half the memory
    of bfloat16."""

    prefix_cache: bool = True
    """Whether to reuse keys and values of earlier prompts (DashInfer: only on CUDA)."""

    vision_cache_mib: int = Field(256, ge=0)
    """Size of the embedding cache, whose keys are digests of images and videos, in MiB; 0 disables it."""

    # Images and videos
    min_pixels: int | None = Field(None, ge=784)
    """Minimum number of pixels of a resized image; defaults to the checkpoint's."""

    max_pixels: int | None = Field(None, ge=784)
    """Maximum number of pixels of a resized image; defaults to the pixels of 1280 tokens."""

    video_max_pixels: int | None = Field(None, ge=784)
    """Maximum number of pixels of a resized video frame; defaults to the model's."""

    video_total_pixels: int | None = Field(None, ge=784)
    """Maximum number of pixels of all resized frames of a video; defaults to the model's."""

    video_fps: float | None = Field(None, gt=0, le=120)
    """Frames per second sampled from a video file; defaults to the model's."""

    video_max_frames: int | None = Field(None, ge=2)
    """Maximum number of frames of a video, sampled or sent as a list; defaults to the model's."""

    video_pruning_rate: float = Field(0.0, ge=0, lt=1)
    """Share of a video's visual tokens that is dropped after the vision encoder, where frames change least."""

    limit_mm_per_prompt: MediaLimits = Field(MediaLimits(), title="image=N,video=N")
    """Maximum number of images, videos and documents per request, as image=N,video=N or JSON."""

    enable_mm_embeds: bool = False
    """Whether requests may contain visual embeddings in place of images (`image_embeds`)."""

    rgba_background: Color = Field((255, 255, 255), title="R,G,B")
    """Background color of transparent images, as R,G,B."""

    # Sources of media
    allow_remote_media: bool = True
    """Whether to fetch http and https URLs."""

    allowed_media_domains: tuple[str, ...] = Field((), title="NAME,...")
    """Host names that media may be fetched from; defaults to all public hosts."""

    allow_private_addresses: bool = False
    """Whether media may be fetched from loopback, private and link-local addresses."""

    allowed_local_media_path: Path | None = None
    """Folder whose files requests may refer to, `/` for all; by default, local files are rejected, except by `VLM`."""

    image_max_bytes: int = Field(20 * MIB, ge=1)
    """Maximum size of an encoded image or document, in bytes."""

    video_max_bytes: int = Field(200 * MIB, ge=1)
    """Maximum size of an encoded video, in bytes."""

    video_max_seconds: float = Field(USUAL_VIDEO_SECONDS, gt=0)
    """Maximum duration of a video, in seconds."""

    video_reader: str = "auto"
    """Registered name of the video reader, such as `pyav` or `decord`; `auto` uses all installed ones except decord,
    best first."""

    media_workers: int | None = Field(None, ge=0, le=1024)
    """Maximum number of processes that decode media; defaults to one more than there are CPUs. 0 decodes in threads of
    the engine, which is only for trusted media."""

    image_fetch_timeout: float = Field(5.0, gt=0)
    """Timeout for fetching an image or a document, in seconds."""

    video_fetch_timeout: float = Field(30.0, gt=0)
    """Timeout for fetching a video, in seconds."""

    isolate_clients: bool = False
    limits: Limits = Limits()

    @property
    def resolved_vision_quantization(self) -> Literal["none", "int8"]:
        """The preferred data type of the vision encoder's weights, where `auto` follows `quantization`."""
        if self.vision_quantization != "auto":
            return self.vision_quantization
        return "none" if self.quantization == "none" else "int8"

    @property
    def max_parallel(self) -> int:
        """How many completions of one call run at a time, so that an idle decoder rejects none of them."""
        return max(1, min(self.max_batch_size, self.max_waiting))

    @property
    def plugin_options(self) -> dict[str, Any]:
        """The options that are not of EngineConfig, as they were given."""
        return self.model_extra or {}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Leave out the options of plugins, which may contain passwords."""
        yield from ((name, value) for name, value in super().__repr_args__() if name not in self.plugin_options)

    def options_of(self, kind: type[PluginOptionsT]) -> PluginOptionsT:
        """Return a plugin's options by their class: those given, else from the environment, else the defaults.

        Raises:
            ConfigError: a value is out of range.
        """
        given = self.plugin_options
        return kind(**{name: given[name] for name in kind.model_fields if name in given})

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
    def _lora_from_mapping(cls, value: object) -> object:
        return [LoraModule(name, str(path)) for name, path in value.items()] if isinstance(value, Mapping) else value

    @field_validator("lora")
    @classmethod
    def _check_lora(cls, value: tuple[LoraModule, ...]) -> tuple[LoraModule, ...]:
        names = [module.name for module in value]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"the name {repeated!r} is used twice; give each adapter its own name")
        return value

    @model_validator(mode="after")
    def _check_lora_names(self) -> Self:
        if self.name in {module.name for module in self.lora}:
            raise ValueError(f"`lora` has an adapter with the model's own name, {self.name!r}; choose another one")
        return self

    @field_validator("allowed_media_domains")
    @classmethod
    def _lower_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower().rstrip(".") for name in value)

    @property
    def cache_folder(self) -> Path:
        """Folder for generated files: `cache_dir`, or the default of the XDG Base Directory Specification.

        Raises:
            ConfigError: it is in a home folder that is unknown.
        """
        folder = self.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dashinfer-vlm"
        try:
            return folder.expanduser()
        except RuntimeError as error:
            message = f"The cache folder {folder} is in a home folder that is unknown. Set {variable('cache_dir')}."
            raise ConfigError(message, param="cache_dir") from error

    @property
    def video_decode_seconds(self) -> float:
        """`limits.video_decode_timeout`, in proportion more if videos may be longer than by default."""
        return self.limits.video_decode_timeout * max(1.0, self.video_max_seconds / USUAL_VIDEO_SECONDS)

    @property
    def name(self) -> str:
        """The model's name in requests and responses; for a folder its last part, so that responses contain no path."""
        folder = expand_user(self.model)
        return self.served_model_name or (folder.resolve().name if folder.is_dir() else self.model)

    def request_name(self, model: str) -> str:
        """Return the name that a request for `model` to this engine has: a LoRA adapter's, or the model's own."""
        return model if any(module.name == model for module in self.lora) else self.name
