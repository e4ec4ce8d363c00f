"""What `doctor` looks at. No check raises: what it cannot find out is a finding too."""

from __future__ import annotations

import base64
import importlib
import io
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from importlib.util import find_spec
from pathlib import Path

from dashinfer_vlm_core.config import ENV_PREFIX, EngineConfig
from dashinfer_vlm_core.errors import ConfigError, DashInferVLMError
from dashinfer_vlm_core.hookspecs import Finding
from dashinfer_vlm_core.kernels.choice import TORCH, KernelSelector
from dashinfer_vlm_core.kernels.cpu import cpu_flags
from dashinfer_vlm_core.kernels.devices import cuda_devices
from dashinfer_vlm_core.plugins import DISTRIBUTION, load_plugins

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "llguidance", "pillow", "numpy")
EXTRAS: dict[str, tuple[str, ...]] = {
    "server": ("fastapi", "uvicorn"),
    "litellm": ("litellm",),
    "langchain": ("langchain_core",),
    "video": ("av",),
    "cli": ("rich", "prompt_toolkit"),
}
"""The modules that each extra brings."""

FAST_CPU = {"avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX", "bf16": "Arm BF16"}
"""Flags of CPUs that multiply bfloat16 in hardware, as Linux names them."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of builds without CUDA; PyPI has none for Linux."""

LITTLE_BYTES = 10 * 10**9
"""Free disk below which a model of 2 billion parameters does not fit beside what it is made into."""

QUESTION = "Describe the picture."
TRUTH = "A red circle."


def all_findings(*, deep: bool) -> Iterator[Finding]:
    yield _python()
    yield _package()
    for name in NEEDED:
        yield _needed(name)
    for extra, modules in EXTRAS.items():
        yield _extra(extra, modules)
    yield _plugins()
    yield _cpu()
    yield _cuda()
    yield from _configured()
    if deep:
        yield _answer()


def _python() -> Finding:
    return Finding(name="python", status="ok", detail=f"{platform.python_version()} on {platform.platform()}")


def _package() -> Finding:
    try:
        return Finding(name=DISTRIBUTION, status="ok", detail=version(DISTRIBUTION))
    except PackageNotFoundError:
        fix = f"Run: pip install {DISTRIBUTION}"
        return Finding(name=DISTRIBUTION, status="broken", detail="on a path, but not installed", fix=fix)


def _needed(name: str) -> Finding:
    module = {"huggingface-hub": "huggingface_hub", "pillow": "PIL"}.get(name, name)
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a library raises when it cannot be loaded
        fix = f"Run: pip install --force-reinstall '{_wanted(name)}'"
        return Finding(name=name, status="broken", detail=f"it does not load: {_one_line(error)}", fix=fix)
    return Finding(name=name, status="ok", detail=version(name))


def _wanted(name: str) -> str:
    """The requirement of this package for another, such as `torch>=2.6`."""
    found = (line.split(";")[0].strip() for line in requires(DISTRIBUTION) or [])
    return next((line for line in found if re.split(r"[^\w.-]", line)[0] == name), name)


def _extra(extra: str, modules: tuple[str, ...]) -> Finding:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        fix = f"Run: pip install '{DISTRIBUTION}[{extra}]'"
        return Finding(name=f"extra {extra}", status="missing", detail=f"no {', '.join(missing)}", fix=fix)
    versions = ", ".join(f"{module} {version(module)}" for module in modules)
    return Finding(name=f"extra {extra}", status="ok", detail=versions)


def _plugins() -> Finding:
    rows = load_plugins().rows
    problems = [row for row in rows if row.status != "ok"]
    if problems:
        ours = any(row.distribution.split()[0] == DISTRIBUTION for row in problems)
        fix = " ".join(row.problem for row in problems)
        names = ", ".join(row.name for row in problems)
        return Finding(name="plugins", status="broken" if ours else "unusable", detail=names, fix=fix)
    return Finding(name="plugins", status="ok", detail=", ".join(row.name for row in rows))


def _cpu() -> Finding:
    flags = cpu_flags()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fast = [name for flag, name in FAST_CPU.items() if flag in flags]
    if fast or not flags:
        return Finding(name="cpu", status="ok", detail=f"{cores} cores, bfloat16 by {', '.join(fast) or 'unknown'}")
    fix = "On this CPU, `--dtype float32` is usually faster than bfloat16, in twice the memory. A GPU needs no change."
    return Finding(name="cpu", status="slow", detail=f"{cores} cores, no bfloat16 in hardware", fix=fix)


def _cuda() -> Finding:
    """What the driver has, and whether torch can use it."""
    devices = cuda_devices()
    try:
        import torch
    except ImportError:
        return _without_torch("cuda")
    if not devices:
        return _without_gpu(torch.__version__, torch.version.cuda)
    if not torch.cuda.is_available():
        fix = "Install the torch that goes with your driver: https://pytorch.org/get-started/locally"
        return Finding(name="cuda", status="slow", detail=f"{devices} devices that torch cannot use", fix=fix)
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding(name="cuda", status="ok", detail=f"{devices} x {', '.join(sorted(names))}")


def _without_gpu(torch_version: str, cuda_version: str | None) -> Finding:
    """There is no device: a build of torch for CUDA is several GB too large."""
    if cuda_version is None:
        return Finding(name="cuda", status="ok", detail="no device: models run on the CPU")
    names = {distribution.name.lower() for distribution in distributions()}
    libraries = sorted(name for name in names if re.fullmatch(r"(nvidia|cuda)-.*|triton", name))
    release = torch_version.partition("+")[0]
    fix = (
        f"Run: pip uninstall -y {' '.join(['torch', *libraries])} && pip install torch=={release} --index-url"
        f" {CPU_INDEX}. If this machine has a GPU, check its driver with `nvidia-smi`."
    )
    detail = f"no device, but torch {torch_version} is a build for CUDA {cuda_version}, with GB of unused libraries"
    return Finding(name="cuda", status="unusable", detail=detail, fix=fix)


def _configured() -> Iterator[Finding]:
    """What depends on the options that the environment sets."""
    try:
        config = EngineConfig()
    except DashInferVLMError as error:
        fix = f"Mend the value of its variable, {ENV_PREFIX} and its name in capitals, or `unset` that."
        yield Finding(name="options", status="broken", detail=error.message, fix=fix)
        return
    yield _cache(config)
    yield _kernels(config)
    yield _disk(config)
    yield from _registered(config)


def _cache(config: EngineConfig) -> Finding:
    """Optional here: without a cache, PyTorch's kernels are used. A plugin that requires one has a check."""
    folder = config.cache_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding(name="cache", status="ok", detail=str(folder))
    except OSError as error:
        fix = f"Make it writable, or choose another: `export {ENV_PREFIX}CACHE_DIR=FOLDER`, or --cache-dir FOLDER."
        return Finding(name="cache", status="unusable", detail=f"{folder}: {error.strerror}", fix=fix)


def _kernels(config: EngineConfig) -> Finding:
    """Whose arithmetic bfloat16 gets on this CPU; the kernels in C are compiled here if they were not yet."""
    if config.cpu_kernels == "torch":
        return Finding(name="kernels", status="ok", detail="PyTorch's, as `cpu_kernels` asks")
    try:
        import torch
    except ImportError:
        return _without_torch("kernels")
    try:
        found = KernelSelector(load_plugins().kernels.values(), config).find("cpu", torch.bfloat16)
    except ConfigError as error:
        return Finding(name="kernels", status="broken", detail="unknown", fix=error.message)
    if found.kernels and found.kernels.name != TORCH:
        return Finding(name="kernels", status="ok", detail=f"{found.kernels.name}, in C")
    if not found.reason:
        fix = "`dashinfer-vlm plugins` says which plugins with kernels are installed, and what is wrong with them."
        return Finding(name="kernels", status="slow", detail="PyTorch's: no others are registered", fix=fix)
    if not found.fix:
        return Finding(name="kernels", status="ok", detail=f"PyTorch's: {found.reason}")
    detail = f"PyTorch's, slower than those in C: {found.reason}"
    return Finding(name="kernels", status="slow", detail=detail, fix=_sentence(found.fix))


def _without_torch(name: str) -> Finding:
    return Finding(name=name, status="unusable", detail="torch does not load", fix="Mend torch first: see above.")


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def _disk(config: EngineConfig) -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE

    free = {folder: shutil.disk_usage(_existing(folder)).free for folder in (config.cache_folder, Path(HF_HUB_CACHE))}
    folder, least = min(free.items(), key=lambda item: item[1])
    detail = f"{least / 1e9:.1f} GB free at {folder}"
    if least < LITTLE_BYTES:
        return Finding(name="disk", status="slow", detail=detail, fix=_DISK_FULL)
    return Finding(name="disk", status="ok", detail=detail)


_DISK_FULL = (
    "Free some before you download a model, or keep models elsewhere: `export HF_HOME=FOLDER` for downloads, `export"
    f" {ENV_PREFIX}CACHE_DIR=FOLDER` for what is converted."
)


def _existing(folder: Path) -> Path:
    return next(path for path in [folder, *folder.parents] if path.exists())


def _registered(config: EngineConfig) -> Iterator[Finding]:
    """The checks of plugins."""
    for name, check in load_plugins().checks.items():
        yield from _safely(name, check, config)


def _safely(name: str, check: Callable[[EngineConfig], Iterable[Finding]], config: EngineConfig) -> list[Finding]:
    """What a check finds, or that it failed."""
    try:
        return list(check(config))
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises
        return [Finding(name=name, status="unusable", detail=f"its check failed: {_one_line(error)}")]


def _answer() -> Finding:
    """Everything together: the bundled model describes a picture."""
    from dashinfer_vlm_core.engine import Engine

    content = [{"type": "image_url", "image_url": {"url": _red_circle()}}, {"type": "text", "text": QUESTION}]
    request = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 32}
    try:
        with Engine(EngineConfig(model="demo")) as engine:
            text = engine.chat(request).choices[0].message.content
            decoder = engine.status().decoder
    except DashInferVLMError as error:
        return Finding(name="self test", status="broken", detail="it cannot answer", fix=error.message)
    if text != TRUTH:
        fix = f"Run: pip install --force-reinstall --no-deps {DISTRIBUTION}. If that does not help, report it."
        return Finding(name="self test", status="broken", detail=f"a wrong answer: {text!r}", fix=fix)
    return Finding(name="self test", status="ok", detail=f"the decoder {decoder} sees: {text}")


def _red_circle() -> str:
    from PIL import Image as PILImage
    from PIL import ImageDraw

    image = PILImage.new("RGB", (112, 112), "white")
    ImageDraw.Draw(image).ellipse((28, 28, 84, 84), fill="red")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
