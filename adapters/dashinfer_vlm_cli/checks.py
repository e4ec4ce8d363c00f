"""The checks of `doctor`. A check does not raise: a failed check is a finding too."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import io
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from dashinfer_vlm_core.config import ENV_PREFIX, EngineConfig
from dashinfer_vlm_core.config.folders import CACHE_FIX, expand_user, write_error
from dashinfer_vlm_core.embedding_store import EmbeddingStoreOptions, open_store, redacted
from dashinfer_vlm_core.errors import DashInferVLMError
from dashinfer_vlm_core.findings import Finding
from dashinfer_vlm_core.installation import DISTRIBUTION, install_step, pip_step
from dashinfer_vlm_core.kernels.choice import (
    PYTORCH_SETS,
    SLOWER,
    KernelChoice,
    KernelSelector,
    LoadedKernels,
    this_machine,
)
from dashinfer_vlm_core.kernels.devices import cuda_devices
from dashinfer_vlm_core.kernels.tuned import all_tuned
from dashinfer_vlm_core.media_workers.fork_server import ForkServer
from dashinfer_vlm_core.media_workers.sandbox import missing_restrictions
from dashinfer_vlm_core.media_workers.worker_process import reference_to
from dashinfer_vlm_core.models.checkpoint import cached_models
from dashinfer_vlm_core.models.formats.detection import weight_memory
from dashinfer_vlm_core.plugins import load_plugins

from .cpu_checks import check_cpu, check_threads

if TYPE_CHECKING:
    from dashinfer_vlm_core.models.formats.interface import ModuleReader
    from dashinfer_vlm_core.models.spec import ModelSpec

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "llguidance", "pillow", "numpy")
EXTRAS: dict[str, tuple[str, ...]] = {
    "server": ("fastapi", "uvicorn", "redis", "prompt_toolkit"),
    "litellm": ("litellm",),
    "langchain": ("langchain_core",),
    "video": ("av",),
}
"""The modules of each extra."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # builds without CUDA, which PyPI does not have for Linux
MIN_FREE_BYTES = 10 * 10**9  # for a model of 2 billion parameters and its converted weights
STORE_TIMEOUT = 5.0  # seconds for the embedding store to respond

PROMPT = "Describe the picture."
EXPECTED = "A red circle."


def all_findings(*, deep: bool) -> Iterator[Finding]:
    yield _python()
    yield _package()
    for name in REQUIRED:
        yield _required(name)
    for extra, modules in EXTRAS.items():
        yield _extra(extra, modules)
    yield _plugins()
    yield check_cpu()
    yield from _safely("cuda", _cuda)
    try:
        config = load_plugins().resolve_options(EngineConfig())
    except DashInferVLMError as error:
        fix = f"Fix or unset its environment variable: {ENV_PREFIX} and the option's name in capitals."
        yield Finding(name="options", status="broken", detail=error.message, fix=fix)
    else:
        for name, check in {**CHECKS, **load_plugins().checks}.items():
            yield from _safely(name, partial(check, config))
    if deep:
        yield from _safely("self test", _self_test)


def _safely(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except DashInferVLMError as error:
        return [Finding(name=name, status="broken", detail="the check failed", fix=error.message)]
    except Exception as error:  # noqa: BLE001 - a plugin can raise anything
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "torch":
            fix = "Fix torch first, as described above."
            return [Finding(name=name, status="unusable", detail="torch cannot be imported", fix=fix)]
        return [Finding(name=name, status="unusable", detail=f"the check failed: {_one_line(error)}")]


def _python() -> Finding:
    return Finding(name="python", status="ok", detail=f"{platform.python_version()} on {platform.platform()}")


def _package() -> Finding:
    try:
        return Finding(name=DISTRIBUTION, status="ok", detail=version(DISTRIBUTION))
    except PackageNotFoundError:
        detail = "on a path, but not installed"
        return Finding(name=DISTRIBUTION, status="broken", detail=detail, fix=install_step())


def _required(name: str) -> Finding:
    module = {"huggingface-hub": "huggingface_hub", "pillow": "PIL"}.get(name, name)
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - importing a broken library can raise anything
        fix = pip_step(f"--force-reinstall {_index(name)}'{_requirement(name)}'")
        return Finding(name=name, status="broken", detail=f"import failed: {_one_line(error)}", fix=fix)
    return Finding(name=name, status="ok", detail=version(name))


def _requirement(name: str) -> str:
    # This package's requirement for another one, such as `torch>=2.6`.
    requirements = (line.split(";")[0].strip() for line in requires(DISTRIBUTION) or [])
    return next((line for line in requirements if re.split(r"[^\w.-]", line)[0] == name), name)


def _index(name: str) -> str:
    # PyPI's build of torch for Linux would replace that for CPUs, and bring several GB of CUDA libraries.
    with contextlib.suppress(PackageNotFoundError):
        if name == "torch" and version(name).endswith("+cpu"):
            return f"--no-deps --index-url {CPU_INDEX} "
    return ""


def _extra(extra: str, modules: tuple[str, ...]) -> Finding:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        detail = f"not installed: {', '.join(missing)}"
        return Finding(name=f"extra {extra}", status="missing", detail=detail, fix=install_step(extra))
    versions = ", ".join(f"{module} {version(module)}" for module in modules)
    return Finding(name=f"extra {extra}", status="ok", detail=versions)


def _plugins() -> Finding:
    rows = load_plugins().rows
    problems = [row for row in rows if row.status not in ("ok", "disabled")]
    if problems:
        builtin = any(row.distribution.split()[0] == DISTRIBUTION for row in problems)
        fix = " ".join(row.problem for row in problems)
        names = ", ".join(row.name for row in problems)
        return Finding(name="plugins", status="broken" if builtin else "unusable", detail=names, fix=fix)
    return Finding(name="plugins", status="ok", detail=", ".join(row.name for row in rows))


def _cuda() -> Iterator[Finding]:
    import torch

    devices = cuda_devices()
    if not devices:
        yield _without_gpu(torch.__version__, torch.version.cuda)
    elif not torch.cuda.is_available():
        fix = "Install the torch build for your driver: https://pytorch.org/get-started/locally"
        yield Finding(name="cuda", status="slow", detail=f"torch cannot use the {devices} devices", fix=fix)
    else:
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        yield Finding(name="cuda", status="ok", detail=f"{devices} x {', '.join(sorted(names))}")


def _without_gpu(torch_version: str, cuda_version: str | None) -> Finding:
    if cuda_version is None:
        return Finding(name="cuda", status="ok", detail="no device: models run on the CPU")
    names = {distribution.name.lower() for distribution in distributions()}
    libraries = sorted(name for name in names if re.fullmatch(r"(nvidia|cuda)-.*|triton", name))
    release = torch_version.partition("+")[0]
    vision = ["torchvision"] if "torchvision" in names else []  # a build for CUDA cannot be used with torch for CPUs
    fix = (
        f"Run: pip uninstall -y {' '.join(['torch', *vision, *libraries])} && pip install"
        f" {' '.join([f'torch=={release}', *vision])} --index-url {CPU_INDEX}. If this machine has a GPU, check its"
        " driver with `nvidia-smi`."
    )
    detail = (
        f"no device, but torch {torch_version} is a build for CUDA {cuda_version} with several GB of unused libraries"
    )
    return Finding(name="cuda", status="unusable", detail=detail, fix=fix)


def _cache(config: EngineConfig) -> Iterator[Finding]:
    # The folder is optional: without it, nothing is stored. Plugins that need it check it.
    folder = config.cache_folder
    if error := write_error(folder):
        yield Finding(name="cache", status="unusable", detail=f"{folder}: {error}", fix=CACHE_FIX)
    else:
        yield Finding(name="cache", status="ok", detail=str(folder))


def _kernels(config: EngineConfig) -> Iterator[Finding]:
    if config.cpu_kernels == "torch":
        yield Finding(name="kernels", status="ok", detail="PyTorch's, as set by `cpu_kernels`")
        return
    import torch

    selector = KernelSelector(load_plugins().kernels.values(), config)
    yield _kernel_choice(selector.find("cpu", torch.bfloat16), selector.candidates("cpu", torch.bfloat16))
    tuned = [item for item in all_tuned(config) if item.conditions.machine == this_machine()]
    if tuned:
        parts = [
            f"{item.conditions.model}: {item.chosen} with {item.conditions.threads} threads ({item.describe()})"
            for item in tuned
        ]
        yield Finding(name="tuned kernels", status="ok", detail="; ".join(parts))


def _kernel_choice(choice: KernelChoice, candidates: Mapping[str, LoadedKernels]) -> Finding:
    others = [name for name, loaded in candidates.items() if loaded.kernels and name != choice.kernels.name]
    detail = f"{choice.kernels.name}, {choice.reason}"
    if others:
        detail += f"; also available: {', '.join(others)}"
    if candidates.keys() <= set(PYTORCH_SETS):
        fix = "Run `dashinfer-vlm plugins` to list the plugins with kernels and their problems."
        return Finding(name="kernels", status="slow", detail="PyTorch's: no others are registered", fix=fix)
    if choice.unavailable.fix:
        detail = f"PyTorch's, {SLOWER}: {choice.unavailable.reason}"
        return Finding(name="kernels", status="slow", detail=detail, fix=_sentence(choice.unavailable.fix))
    if choice.unavailable.reason:
        detail = f"PyTorch's: {choice.unavailable.reason}; {detail}"
    return Finding(name="kernels", status="ok", detail=detail)


def _weights(config: EngineConfig) -> Iterator[Finding]:
    registry = load_plugins()
    folder = registry.models.get(config.model) or _local_folder(config.model)
    spec = registry.load_spec(folder) if folder else None
    if spec is not None and spec.quantization is not None:
        yield _stored_weights(config, KernelSelector(registry.kernels.values(), config), spec, spec.quantization)


def _local_folder(model: str) -> Path | None:
    folder = expand_user(model)
    return folder if (folder / "config.json").is_file() else cached_models().get(model)


def _stored_weights(config: EngineConfig, selector: KernelSelector, spec: ModelSpec, reader: ModuleReader) -> Finding:
    from dashinfer_vlm_core.kernels.linears import supported_bits
    from dashinfer_vlm_core.models.files import stored_headers, stored_tensors
    from dashinfer_vlm_core.models.placement import resolve_placement

    device, dtype = resolve_placement(config, spec)
    kernels = selector.find(device, dtype, spec.text).kernels
    headers = stored_headers(stored_tensors(spec.folder, spec.tensor_renames))
    memory = weight_memory(headers, reader, supported=supported_bits(kernels), itemsize=dtype.itemsize)
    detail = f"{config.model}, {memory.format}: {memory.describe(str(dtype).removeprefix('torch.'), kernels.name)}"
    if not memory.widened:
        return Finding(name="weights", status="ok", detail=detail)
    fix = "See docs/quantization.md for what each kind of kernels keeps."
    if kernels.supports_int8:
        fix = "To round the widened weights to 8 bits, use `--quantization int8`."
    return Finding(name="weights", status="slow", detail=detail, fix=fix)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _media_workers(config: EngineConfig) -> Iterator[Finding]:
    finding = partial(Finding, name="media workers")
    if config.media_workers == 0:
        detail = "off: images and videos are decoded in the engine's process, as set by `media_workers`"
        yield finding(status="ok", detail=detail)
        return
    if missing := missing_restrictions():
        lacks = " and ".join(f"without {item.name}, a hostile file could make one {item.risk}" for item in missing)
        fix = _sentence(" and ".join(item.fix for item in missing))
        yield finding(status="unusable", detail=f"less restricted: {lacks}", fix=fix)
        return
    try:
        warning = _test_sandbox()
    except OSError as error:
        yield finding(status="broken", detail=f"they cannot be started: {error}", fix="See the engine's log.")
        return
    if warning:
        yield finding(status="slow", detail="restricted, but not by the list of system calls", fix=warning)
        return
    root = "; they belong to root, so run the server as another user" if os.geteuid() == 0 else ""
    yield finding(status="ok", detail=f"restricted by Landlock and a seccomp filter{root}")


def _test_sandbox() -> str:
    with contextlib.closing(ForkServer()) as server:
        references = map(reference_to, load_plugins().video_readers.values())
        return server.test_sandbox([reference for reference in references if reference is not None])


def _embedding_store(config: EngineConfig) -> Iterator[Finding]:
    # Requests are served without the store.
    url = config.options_of(EmbeddingStoreOptions).embedding_store
    if not url:
        return
    name = "embedding store"
    try:
        config.options_of(EmbeddingStoreOptions).read_secret()
        detail = asyncio.run(_describe_store(config))
    except DashInferVLMError as error:
        yield Finding(name=name, status="broken", detail=redacted(url), fix=error.message)
    except Exception as error:  # noqa: BLE001 - a store can raise anything
        fix = "Start it, or correct `embedding_store`. Until then, every process encodes all images."
        yield Finding(name=name, status="unusable", detail=f"{redacted(url)}: {_one_line(error)}", fix=fix)
    else:
        yield Finding(name=name, status="ok", detail=detail)


async def _describe_store(config: EngineConfig) -> str:
    store = open_store(load_plugins().embedding_stores, config)
    try:
        with anyio.fail_after(STORE_TIMEOUT):
            return await store.describe()
    finally:
        await store.close()


def _disk(config: EngineConfig) -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = (config.cache_folder, Path(HF_HUB_CACHE))
    free, folder = min((shutil.disk_usage(_existing(folder)).free, folder) for folder in folders)
    detail = f"{free / 1e9:.1f} GB free at {folder}"
    if free >= MIN_FREE_BYTES:
        yield Finding(name="disk", status="ok", detail=detail)
        return
    fix = (
        "Free some space before you download a model, or move the caches: `export HF_HOME=FOLDER` for downloads,"
        f" `export {ENV_PREFIX}CACHE_DIR=FOLDER` for converted models."
    )
    yield Finding(name="disk", status="slow", detail=detail, fix=fix)


def _existing(folder: Path) -> Path:
    return next(path for path in [folder, *folder.parents] if path.exists())


CHECKS: dict[str, Callable[[EngineConfig], Iterable[Finding]]] = {
    "cache": _cache,
    "threads": check_threads,
    "kernels": _kernels,
    "weights": _weights,
    "disk": _disk,
    "media workers": _media_workers,
    "embedding store": _embedding_store,
}
"""The checks that depend on the configuration from the environment; plugins add others."""


def _self_test() -> Iterator[Finding]:
    from dashinfer_vlm_core.engine import Engine

    content = [{"type": "image_url", "image_url": {"url": _red_circle()}}, {"type": "text", "text": PROMPT}]
    request = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 32}
    with Engine(EngineConfig(model="demo")) as engine:
        text = engine.chat(request).choices[0].message.content
        decoder = engine.status().decoder
    if text == EXPECTED:
        yield Finding(name="self test", status="ok", detail=f"response of the decoder {decoder}: {text}")
    else:
        fix = f"Report a bug if this step does not help. {install_step()}"
        yield Finding(name="self test", status="broken", detail=f"wrong response: {text!r}", fix=fix)


def _red_circle() -> str:
    from PIL import Image as PILImage
    from PIL import ImageDraw

    image = PILImage.new("RGB", (224, 224), "white")
    ImageDraw.Draw(image).ellipse((48, 48, 176, 176), fill="red")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
