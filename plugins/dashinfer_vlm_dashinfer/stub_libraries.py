"""Stub libraries for the CUDA and driver libraries that DashInfer's extension links, so that it loads on a machine
without them. The dynamic loader requires the libraries and every symbol to exist, but on a CPU they are not used.

The symbols are the undefined ones of the wheel's extension (`nm -D --undefined-only`); a test compares the two. While
DashInfer loads and generates on a CPU, only `__cudaRegister*` and `__cudaUnregister*` are called. These and the other
`__cuda*` functions return 0, `*ErrorName` and `*ErrorString` return a text, and the rest return the library's error
code for a missing device.

They are compiled on the user's machine rather than shipped. The sources are generated from this table and compile in a
second, and the wheel contains no binaries that cannot be reviewed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dashinfer_vlm_core.errors import MissingDependency, SetupError

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-shared", "-fPIC", "-nostdlib", "-s", "-fno-builtin", "-x", "c")
COMPILE_SECONDS = 60

_TEXTS = ("ErrorName", "ErrorString")


@dataclass(frozen=True, kw_only=True, slots=True)
class StubLibrary:
    """A stub library.

    Attributes:
        soname: its name, for the dynamic loader and as a file.
        symbols: the functions that it defines.
        error: their return value, the library's error code for a missing device or driver.
        versioned: whether the extension references its symbols with a version, which is named like the library. The
            loader aborts the process if such a library defines no version.
        functions: C source of functions of the library that return something else.
    """

    soname: str
    symbols: tuple[str, ...] = ()
    error: int = 1
    versioned: bool = False
    functions: str = ""

    @property
    def source(self) -> str:
        """The library's C source."""
        return (
            "".join(map(self._function, self.symbols)) + self.functions
            or "/* The extension links this library, but uses none of its symbols. */\n"
        )

    @property
    def version_script(self) -> str:
        """The content for the linker's `--version-script`; empty for symbols without a version."""
        return f"{self.soname} {{ global: *; }};\n" if self.versioned else ""

    def _function(self, name: str) -> str:
        if name.endswith(_TEXTS):
            return f'const char *{name}(void) {{ return "There is no GPU: DashInfer is installed for the CPU."; }}\n'
        return f"long {name}(void) {{ return {0 if name.startswith('__cuda') else self.error}; }}\n"


CUDA = StubLibrary(soname="libcuda.so.1")
NVML = StubLibrary(
    soname="libnvidia-ml.so.1",
    error=9,  # NVML_ERROR_DRIVER_NOT_LOADED
    symbols=(
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetUtilizationRates",
        "nvmlErrorString",
        "nvmlInit_v2",
        "nvmlShutdown",
    ),
)
DRIVER = (CUDA, NVML)
"""The GPU driver's libraries. No others are required if CUDA's libraries are installed."""

RUNTIME = StubLibrary(
    soname="libcudart.so.12",
    error=100,  # cudaErrorNoDevice
    versioned=True,
    symbols=(
        "__cudaInitModule",
        "__cudaPopCallConfiguration",
        "__cudaPushCallConfiguration",
        "__cudaRegisterFatBinary",
        "__cudaRegisterFatBinaryEnd",
        "__cudaRegisterFunction",
        "__cudaRegisterVar",
        "__cudaUnregisterFatBinary",
        "cudaDeviceGetAttribute",
        "cudaEventCreate",
        "cudaEventCreateWithFlags",
        "cudaEventDestroy",
        "cudaEventElapsedTime",
        "cudaEventQuery",
        "cudaEventRecord",
        "cudaEventSynchronize",
        "cudaFree",
        "cudaFreeAsync",
        "cudaFreeHost",
        "cudaFuncGetAttributes",
        "cudaFuncSetAttribute",
        "cudaGetDevice",
        "cudaGetDeviceCount",
        "cudaGetDeviceProperties_v2",
        "cudaGetErrorName",
        "cudaGetErrorString",
        "cudaGetLastError",
        "cudaHostAlloc",
        "cudaLaunchKernel",
        "cudaMalloc",
        "cudaMallocAsync",
        "cudaMallocHost",
        "cudaMemGetInfo",
        "cudaMemcpy",
        "cudaMemcpy2D",
        "cudaMemcpy2DAsync",
        "cudaMemcpyAsync",
        "cudaMemset",
        "cudaMemsetAsync",
        "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
        "cudaPeekAtLastError",
        "cudaSetDevice",
        "cudaStreamCreateWithFlags",
        "cudaStreamDestroy",
        "cudaStreamSynchronize",
        "cudaStreamWaitEvent",
    ),
)
CUBLAS_LT = StubLibrary(
    soname="libcublasLt.so.12",  # error 1: CUBLAS_STATUS_NOT_INITIALIZED
    versioned=True,
    symbols=(
        "cublasLtMatmul",
        "cublasLtMatmulAlgoGetHeuristic",
        "cublasLtMatmulDescCreate",
        "cublasLtMatmulDescSetAttribute",
        "cublasLtMatmulPreferenceCreate",
        "cublasLtMatmulPreferenceSetAttribute",
        "cublasLtMatrixLayoutCreate",
        "cublasLtMatrixLayoutInit_internal",
    ),
)
CUBLAS = StubLibrary(
    soname="libcublas.so.12",  # error 1: CUBLAS_STATUS_NOT_INITIALIZED
    versioned=True,
    symbols=(
        "cublasCreate_v2",
        "cublasDestroy_v2",
        "cublasGemmBatchedEx",
        "cublasGemmEx",
        "cublasGemmStridedBatchedEx",
        "cublasGetMathMode",
        "cublasSetMathMode",
        "cublasSetStream_v2",
        "cublasSetWorkspace_v2",
    ),
)
CUSPARSE = StubLibrary(
    soname="libcusparse.so.12",  # error 1: CUSPARSE_STATUS_NOT_INITIALIZED
    versioned=True,
    symbols=(
        "cusparseCreate",
        "cusparseCreateCsr",
        "cusparseCreateDnMat",
        "cusparseSetStream",
        "cusparseSpMM",
        "cusparseSpMM_bufferSize",
    ),
)
NCCL = StubLibrary(
    soname="libnccl.so.2",  # error 1: ncclUnhandledCudaError
    symbols=(
        "ncclAllGather",
        "ncclAllReduce",
        "ncclBcast",
        "ncclCommDestroy",
        "ncclCommInitRank",
        "ncclGetErrorString",
        "ncclGetUniqueId",
    ),
)
NVJITLINK = StubLibrary(soname="libnvJitLink.so.12")
ALL = (*DRIVER, RUNTIME, CUBLAS_LT, CUBLAS, NVJITLINK, CUSPARSE, NCCL)
"""All of NVIDIA's libraries that the extension links."""

ONE_DEVICE_NCCL = StubLibrary(
    soname=NCCL.soname,
    symbols=tuple(
        name for name in NCCL.symbols if name not in {"ncclCommDestroy", "ncclCommInitRank", "ncclGetUniqueId"}
    ),
    functions="""\
long ncclGetUniqueId(void *id) { return 0; }
long ncclCommInitRank(void **communicator, int ranks) {
    static int one;
    *communicator = &one;
    return ranks == 1 ? 0 : 1;
}
long ncclCommDestroy(void *communicator) { return 0; }
""",
)
"""DashInfer creates a communicator on one device too, but never communicates there."""
ONE_DEVICE: dict[str, StubLibrary] = {"cusparse": CUSPARSE, "nccl": ONE_DEVICE_NCCL, "nvjitlink": NVJITLINK}
"""What is not used on one device, by the folder of NVIDIA's wheel. DashInfer calls cuSPARSE for sparse weights only."""


def find_compiler() -> str:
    """Find a C compiler.

    Raises:
        MissingDependency: there is none; the message explains how to install one.
    """
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise MissingDependency(
        "`--cpu` compiles a few lines of C, but no C compiler was found. Install gcc or clang with"
        " `apt-get install gcc` or `dnf install gcc`."
    )


def compile_stub_libraries(libraries: Iterable[StubLibrary], folder: Path) -> None:
    """Compile `libraries` into `folder`. Each file is written atomically.

    Raises:
        MissingDependency: there is no C compiler.
        SetupError: the compiler failed, or the folder cannot be written to.
    """
    compiler = find_compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            for library in libraries:
                output = _compile(compiler, library, Path(temporary))
                output.chmod(0o755)  # with any umask, others must not write to code
                output.replace(folder / library.soname)
    except OSError as error:
        raise SetupError(
            f"The folder {folder} cannot be written to ({error.strerror or error}). Make it writable, or set"
            " --cache-dir to another folder."
        ) from error


def _compile(compiler: str, library: StubLibrary, folder: Path) -> Path:
    source, script, output = folder / "source.c", folder / "version_script", folder / library.soname
    source.write_text(library.source)
    script.write_text(library.version_script)
    command = [compiler, *FLAGS, str(source), f"-Wl,-soname,{library.soname}", "-o", str(output)]
    if library.versioned:
        command.append(f"-Wl,--version-script={script}")
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS)  # noqa: S603 - our own command
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"{compiler} could not compile {library.soname} ({last}). Install gcc 8 or newer.") from error
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"{compiler} took more than {COMPILE_SECONDS} seconds for {library.soname}. Try again when the machine is"
            " less busy."
        ) from error
    return output
