"""Other programs, which are installed on first use, next to the project's environment.

vLLM has an environment of its own, that of the benchmarks. PEFT and client libraries are imported by tests: their
packages are in folders at the end of the path, and use torch, openai and others of the project's environment. So does
Ray, whose processes find its folder through PYTHONPATH. npm installs the packages of JavaScript clients. Of pypdf, only
files are used.

`python -m tests.interop.interpreters` installs all of them, and prints what it does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environments import OTHER_ENGINES_FOLDER, OtherEngines, SetupMissing, run, vllm_environment
from dashinfer_vlm_core import EngineConfig

PEFT = ("peft==0.21.2", "accelerate==1.15.0", "psutil==7.2.2")
CLIENTS = (
    "openai-agents==0.20.0",
    "llama-index-llms-openai-like==0.8.1",
    "llama-index-embeddings-openai-like==0.4.0",
)
"""Of the Agents SDK, the last version that permits the version of openai that LiteLLM requires."""
ANTHROPIC = ("anthropic==2.14.0", "langchain-anthropic==1.7.7")
"""Of LangChain's package, the last version that permits the version of langchain-core in constraints.txt."""
OLLAMA = ("ollama==0.6.3", "langchain-ollama==1.1.0", "llama-index-llms-ollama==0.11.0")
OCR = ("mineru-vl-utils==2.0.7", "olmocr==0.4.27", "langchain-litellm==0.11.2")
DOCLING = ("docling-slim[convert-core,format-pdf-pypdfium2,format-web]==2.143.0",)
"""Without what runs models in the process. Its command line, which is not used, requires an old typer."""
OPENAI_3 = ("openai==3.54.0",)
"""httpx2, which it requires, is in the project's environment."""
RAY = ("ray[serve]==2.60.0",)
PDFS = "pypdf==6.10.0"
"""Its source distribution contains the PDF files of its tests."""
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
FOLDER = EngineConfig().cache_folder / "interop"
JAVASCRIPT = Path(__file__).parent / "javascript"
ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT = 280.0
"""Seconds. vLLM needs half a minute to start on two cores."""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The interpreter of an environment.

    Attributes:
        python: its path.
        environment: additional environment variables of its programs.
    """

    python: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, program: str, request: object) -> Any:
        """Run one of the programs in `programs/`, and return its result.

        A program reads a JSON object from the file that is its first argument, and writes its result as JSON to the
        file that is its second one. Its output is shown if it fails.
        """
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "request.json"), Path(folder, "result.json")
            source.write_text(json.dumps(request))
            done = subprocess.run(
                [str(self.python), str(PROGRAMS / program), str(source), str(target)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT, check=False, cwd=folder,
                env={**os.environ, "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1", **self.environment},
            )  # fmt: skip
            assert done.returncode == 0, f"{program} failed:\n{done.stdout[-8000:]}"
            return json.loads(target.read_text())


def vllm() -> Interpreter:
    """Return vLLM's CPU build.

    Raises:
        SetupMissing: it cannot be installed.
    """
    python = OtherEngines(OTHER_ENGINES_FOLDER).vllm()
    # One process: a model that fails to load then ends the program with its error.
    return Interpreter(python=python, environment={**vllm_environment(python), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def peft() -> Path:
    """Return the folder with the packages of PEFT; raises like `vllm`."""
    return _packages("peft", PEFT, "--no-deps")


def transformers() -> Interpreter:
    """Return this interpreter with accelerate, which transformers needs for some formats; raises like `vllm`."""
    return Interpreter(python=Path(sys.executable), environment={"PYTHONPATH": str(peft())})


def clients() -> Path:
    """Return the folder with client libraries and what they depend on; raises like `vllm`."""
    return _packages("clients", CLIENTS, "-c", str(CONSTRAINTS))


def anthropic() -> Path:
    """Return the folder with Anthropic's client, LangChain's package for it and what they depend on; raises like
    `vllm`."""
    return _packages("anthropic", ANTHROPIC, "-c", str(CONSTRAINTS))


def ollama() -> Path:
    """Return the folder with Ollama's client, the packages of LangChain and LlamaIndex for it and what they depend on;
    raises like `vllm`."""
    return _packages("ollama", OLLAMA, "-c", str(CONSTRAINTS))


def ocr() -> Path:
    """Return the folder with programs that read documents and what they depend on; raises like `vllm`."""
    return _packages("ocr", OCR, "-c", str(CONSTRAINTS))


def docling() -> Path:
    """Return the folder with Docling and what it depends on; raises like `vllm`."""
    return _packages("docling", DOCLING)


def openai_3() -> Interpreter:
    """Return this interpreter with openai 3 instead of 2; raises like `vllm`."""
    folder = _packages("openai", OPENAI_3, "--no-deps")
    return Interpreter(python=Path(sys.executable), environment={"PYTHONPATH": str(folder)})


def javascript() -> Path:
    """Return the folder with the JavaScript clients, their program, and Node.js; raises like `vllm`."""
    if shutil.which("npm") is None:
        raise SetupMissing("there is no npm. Install Node.js.")
    digest = hashlib.sha256((JAVASCRIPT / "package-lock.json").read_bytes()).hexdigest()[:8]
    folder = FOLDER / f"javascript-{digest}"
    ready = folder / "ready"
    shutil.copytree(JAVASCRIPT, folder, dirs_exist_ok=True)  # modules are searched next to the file that imports them
    if not ready.exists():
        print(f"installing JavaScript clients in {folder} ...", flush=True)  # noqa: T201 - for users of `--interop`
        run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=folder)
        ready.touch()
    return folder


def pdfs() -> Path:
    """Return the folder with the PDF files of pypdf's tests; raises like `vllm`."""
    folder = FOLDER / PDFS.replace("==", "-")
    if not folder.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        print(f"downloading the source distribution of {PDFS} ...", flush=True)  # noqa: T201 - for users of `--interop`
        with tempfile.TemporaryDirectory(dir=FOLDER) as draft:
            source = ("--no-deps", "--no-binary", ":all:", PDFS)
            run(sys.executable, "-m", "pip", "download", "-q", *source, "-d", draft)
            (archive,) = Path(draft).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                files.extractall(draft, filter="data")
            Path(draft, folder.name).rename(folder)
    return folder / "resources"


def ray() -> Interpreter:
    """Return this interpreter with Ray Serve; raises like `vllm`."""
    if importlib.util.find_spec("ray"):
        return Interpreter(python=Path(sys.executable), environment=_RAY_ENVIRONMENT)
    folder = _packages("ray", RAY, "-c", str(CONSTRAINTS))
    return Interpreter(python=Path(sys.executable), environment={**_RAY_ENVIRONMENT, "PYTHONPATH": str(folder)})


_RAY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",  # a busy machine responds late
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
}


def _packages(name: str, pins: Sequence[str], *options: str) -> Path:
    """Return a folder with packages, which are installed with options of pip if it does not exist."""
    digest = hashlib.sha256(repr((pins, options)).encode()).hexdigest()[:8]
    folder = FOLDER / f"{name}-{PYTHON}-{digest}"
    ready = folder / "ready"
    if not ready.exists():
        print(f"installing {', '.join(pins)} in {folder} ...", flush=True)  # noqa: T201 - for users of `--interop`
        run(sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(folder), *options, *pins)
        ready.touch()
    return folder


def main() -> None:
    """Install all of them; the tests of those that cannot be installed are skipped."""
    installers: dict[str, Callable[[], object]] = {
        "vLLM": vllm, "PEFT": peft, "client libraries": clients, "Anthropic's client": anthropic,
        "Ollama's client": ollama, "OCR clients": ocr, "Docling": docling, "openai 3": openai_3,
        "JavaScript clients": javascript, "Ray": ray, "PDF files": pdfs,
    }  # fmt: skip
    for name, install in installers.items():
        _install(name, install)


def _install(name: str, install: Callable[[], object]) -> None:
    try:
        install()
    except SetupMissing as error:
        print(f"{name} is not available: {error}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
