"""llama.cpp and ik_llama.cpp as other engines, built once from the sources that Python distributions contain."""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dashinfer_vlm_core.kernels.devices import cpu_flags

from .environments import OtherEngines, packages_folder, run

TOOLS = ("cmake==4.1.2", "ninja==1.13.0", "sentencepiece==0.2.1")
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
)  # fmt: skip
NATIVE = ("-DGGML_NATIVE=ON",)
WITHOUT_AMX = tuple(f"-DCMAKE_{language}_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" for language in ("C", "CXX"))
"""Its kernels for AMX end with a segmentation fault while the model is loaded (ggml-org/llama.cpp, issue 20824)."""
AVX2 = ("-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON")
PRECISIONS = {"bf16": "", "q8": "q8_0", "q4": "q4_0"}
"""The name of each format for `llama-quantize`; bf16 is written by the conversion."""

WRITE_BUILD_INFO = "set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp @ONLY)\n"
"""A script of ik_llama.cpp's build, which its Python distribution lacks."""

CONTEXT = 16384
"""Tokens that the slots share."""
SLOTS = 8


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources of a server, and how it is built and run.

    Attributes:
        title: the engine's name.
        package: the distribution that contains them.
        folder: where they are within the distribution.
        targets: the programs to build.
        cmake_options: options of the build.
        options: options of the server.
        added: files that the distribution lacks, by their paths within `folder`.
    """

    title: str
    package: str
    folder: str
    targets: tuple[str, ...]
    cmake_options: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    added: Mapping[str, str] = field(default_factory=dict)


SOURCES = {
    "llama": Sources(
        title="llama.cpp",
        package="llama-cpp-python==0.3.36",
        folder="vendor/llama.cpp",
        targets=("llama-server", "llama-quantize"),
    ),
    "ik-llama": Sources(
        title="ik_llama.cpp",
        package="ik-llama-cpp-python==0.1.5",
        folder="vendor/ik_llama.cpp",
        targets=("llama-server",),
        cmake_options=("-DLLAMA_BUILD_EXAMPLES=ON", "-DLLAMA_BUILD_SERVER=ON"),
        # Its kernels for flash attention abort ("GGML_ASSERT(S > 0)") where several requests have images. Without them,
        # prompts take 4 % longer.
        options=("--jinja", "--run-time-repack", "--no-flash-attn"),
        added={"common/cmake/build-info-gen-cpp.cmake": WRITE_BUILD_INFO},
    ),
}
"""By the first part of an engine's name. The package is also the folder of its builds and of converted checkpoints."""


class Gguf(NamedTuple):
    """A converted checkpoint.

    Attributes:
        text: the text model.
        vision: the vision encoder, which is always in bfloat16.
    """

    text: Path
    vision: Path


def _native_build() -> tuple[str, tuple[str, ...]]:
    """Return the folder of a build for this processor, and its options."""
    return ("build-without-amx", NATIVE + WITHOUT_AMX) if "amx_tile" in cpu_flags() else ("build", NATIVE)


class LlamaCpp:
    """The programs of llama.cpp, or of its fork ik_llama.cpp, in a folder of `OtherEngines`.

    Args:
        other_engines: the folder.
        name: one of `SOURCES`.
        avx2: whether they are built for processors without AVX-512; otherwise, for this one, but without AMX.
    """

    def __init__(self, other_engines: OtherEngines, name: str, *, avx2: bool = False) -> None:
        self._other_engines = other_engines
        self._build_name, self._instructions = ("build-avx2", AVX2) if avx2 else _native_build()
        self._sources = SOURCES[name]
        self._folder = other_engines.folder / self._sources.package.replace("==", "-")
        # The fork reads the original's files.
        self._converter = self if name == "llama" else LlamaCpp(other_engines, "llama", avx2=avx2)

    def command(self, model: Path, precision: str, threads: int, slots: int = SLOTS) -> tuple[str, ...]:
        """Return the command of a server for a checkpoint, after building the program and converting the checkpoint.

        Args:
            model: the checkpoint's folder.
            precision: one of `PRECISIONS`.
            threads: number of threads.
            slots: maximum number of concurrent requests.

        Raises:
            SetupMissing: it cannot be built, or the checkpoint cannot be converted.
        """
        program = str(self._program("llama-server"))
        files = self._converter.converted(model, precision)
        return (
            program, "-m", str(files.text), "--mmproj", str(files.vision), "-c", str(CONTEXT), "-np", str(slots),
            "-t", str(threads), "--host", "127.0.0.1", "--port", "{port}", "--alias", "model",
            *self._sources.options,
        )  # fmt: skip

    def converted(self, model: Path, precision: str) -> Gguf:
        """Return a checkpoint in llama.cpp's format; raises like `command`."""
        digest = hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:8]
        stem = f"{model.name}-{digest}"
        files = Gguf(self._folder / f"{stem}-bf16.gguf", self._folder / f"{stem}-vision.gguf")
        if not files.vision.exists():
            print(f"converting {model} for llama.cpp ...", flush=True)
            self._convert(model, files.text)
            self._convert(model, files.vision, "--mmproj")
        if not PRECISIONS[precision]:
            return files
        quantized = self._folder / f"{stem}-{precision}.gguf"
        if not quantized.exists():
            draft = quantized.with_suffix(".part")
            run(str(self._program("llama-quantize")), str(files.text), str(draft), PRECISIONS[precision])
            draft.rename(quantized)
        return files._replace(text=quantized)

    def _convert(self, model: Path, out: Path, *options: str) -> None:
        self._unpack()
        draft = out.with_suffix(".part")
        script = str(self._other_engines.script("convert_to_gguf.py"))
        tools = str(packages_folder(self._tools()))  # sentencepiece, which the script imports for every model
        search = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), tools)))
        arguments = (script, str(self._source_folder()), str(model), str(draft), "--outtype", "bf16", *options)
        run(sys.executable, *arguments, environment={"PYTHONPATH": search})
        draft.rename(out)

    def _tools(self) -> Path:
        """Return the interpreter of the environment with the build tools."""
        return self._other_engines.environment("llama-tools", TOOLS)

    def _source_folder(self) -> Path:
        return self._folder / "sources" / self._sources.folder

    def _program(self, name: str) -> Path:
        program = self._folder / self._build_name / "bin" / name
        if not program.exists():
            self._unpack()
            self._build()
        return program

    def _unpack(self) -> None:
        if self._source_folder().exists():
            return
        print(f"downloading the sources of {self._sources.package} ...", flush=True)
        python = str(self._tools())
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            options = ("--no-deps", "--no-binary", ":all:", "-d", folder)
            run(python, "-m", "pip", "download", "-q", *options, self._sources.package)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                files.extractall(folder, filter="data")
            (unpacked,) = (path for path in Path(folder).iterdir() if path.is_dir())
            unpacked.rename(self._folder / "sources")

    def _build(self) -> None:
        print(f"building {self._sources.title}, which takes minutes ...", flush=True)
        tools = self._tools().parent
        build = str(self._folder / self._build_name)
        environment = {"PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
        cmake = str(tools / "cmake")
        sources = self._source_folder()
        for path, text in self._sources.added.items():
            (sources / path).parent.mkdir(parents=True, exist_ok=True)
            (sources / path).write_text(text)
        options = (*CMAKE_OPTIONS, *self._sources.cmake_options, *self._instructions)
        run(cmake, "-G", "Ninja", "-S", str(sources), "-B", build, *options, environment=environment)
        run(cmake, "--build", build, "--target", *self._sources.targets, environment=environment)
