"""Stub libraries for CUDA's libraries, the removal of GPU code, and a CPU-only environment."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import shutil
import subprocess

import pytest

from dashinfer_vlm_core.errors import MissingDependency, SetupError
from dashinfer_vlm_dashinfer.process import WorkerDied, WorkerProcess
from dashinfer_vlm_dashinfer.stub_libraries import compile_stub_libraries, remove_gpu_code
from dashinfer_vlm_dashinfer.worker import CUDA_LIBRARIES, DRIVER_LIBRARIES

needs_compiler = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")
needs_nm = pytest.mark.skipif(not shutil.which("nm"), reason="there is no nm (binutils)")

SECTION_BYTES = 1 << 20
ALL = (*DRIVER_LIBRARIES, *CUDA_LIBRARIES)


def symbols(library, which):
    """Return the dynamic symbols of a library as (name, version or ""), except weak ones."""
    listed = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    rows = [line.split()[-2:] for line in listed.splitlines()]
    return {
        (name, version.lstrip("@"))
        for kind, (name, _, version) in ((kind, name.partition("@")) for kind, name in rows)
        if kind not in {"w", "A"}
    }


@pytest.fixture(scope="module")
def stub_libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix") / "stub-libraries"
    compile_stub_libraries(ALL, folder)
    return folder


@needs_compiler
@needs_nm
def test_libraries_have_names_that_loader_needs(stub_libraries):
    assert {path.name for path in stub_libraries.iterdir()} == set(ALL)
    for path in stub_libraries.iterdir():
        assert {version for _, version in symbols(path, "--defined-only")} <= {path.name}
        assert ctypes.CDLL(str(path))._name == str(path)


@needs_compiler
def test_functions_accept_registration_and_one_device(stub_libraries):
    runtime = ctypes.CDLL(str(stub_libraries / "libcudart.so.12"))
    assert runtime.__getattr__("__cudaRegisterFatBinary")() == 0
    nccl, communicator = ctypes.CDLL(str(stub_libraries / "libnccl.so.2")), ctypes.c_void_p()
    assert nccl.ncclGetUniqueId(ctypes.create_string_buffer(128)) == 0
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), 2) == 1
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), 1) == 0
    assert communicator.value
    assert nccl.ncclCommDestroy(communicator) == 0


def test_missing_compiler_is_reported_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match=r"no C compiler was found.*`apt-get install gcc`"):
        compile_stub_libraries(ALL, tmp_path / "stub-libraries")


def test_failing_compiler_is_named(tmp_path, monkeypatch, capfd):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'error: no such option' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"cc -shared .*failed.*Fix the error above, and run the command again"):
        compile_stub_libraries(["libx.so"], tmp_path / "stub-libraries")
    assert capfd.readouterr().err == "error: no such option\n"
    assert list((tmp_path / "stub-libraries").iterdir()) == []


@pytest.fixture
def library(tmp_path):
    """Build a shared library with a function and a megabyte in the section of GPU code."""
    path = tmp_path / "library.so"
    section = f'__asm__(".section .nv_fatbin,\\"a\\"\\n.fill {SECTION_BYTES}, 1, 7\\n.text");\n'
    source = section + "int answer(void) { return 42; }\n"
    command = [shutil.which("cc") or "gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@needs_compiler
def test_gpu_code_becomes_a_hole_without_other_changes(library):
    before, blocks, lines = library.read_bytes(), library.stat().st_blocks, []
    remove_gpu_code(library, lines.append)
    if lines:
        pytest.skip("The file system of the temporary folder cannot deallocate a part of a file.")
    start = before.index(b"\7" * SECTION_BYTES)
    assert library.read_bytes() == before[:start] + bytes(SECTION_BYTES) + before[start + SECTION_BYTES :]
    assert ctypes.CDLL(str(library)).answer() == 42
    os.sync()  # some file systems update the block count only then
    assert SECTION_BYTES - 8192 <= 512 * (blocks - library.stat().st_blocks) <= SECTION_BYTES


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"text" * 100, b"\x7fELF\x02\x01" + bytes(100)])
def test_other_files_are_unchanged(tmp_path, content):
    path, lines = tmp_path / "file", []
    path.write_bytes(content)
    remove_gpu_code(path, lines.append)
    remove_gpu_code(tmp_path / "missing", lines.append)
    assert path.read_bytes() == content
    assert f"The GPU code in {tmp_path / 'missing'} is kept" in lines[-1]


@pytest.fixture
def cpu_only(environment):
    if not environment.cpu_only:
        pytest.skip("DashInfer is installed with CUDA's libraries here.")
    return environment


@pytest.mark.dashinfer
@pytest.mark.skipif(not shutil.which("readelf"), reason="there is no readelf (binutils)")
def test_extension_resolves_functions_of_nvidia_when_they_are_called(environment):
    """Otherwise the stub libraries would have to define all of them."""
    (extension,) = environment.python.parent.parent.glob(
        "lib/python*/site-packages/dashinfer/allspark/_allspark.cpython-*.so"
    )
    command = ["readelf", "--dynamic", "--relocs", "--wide", str(extension)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "BIND_NOW" not in listed
    lines = re.findall(r"(R_X86_64_\w+) +0+ +(?:__cuda|cuda|cublas|cusparse|nccl|nvml|nvJitLink|cu[A-Z])\w+", listed)
    assert (set(lines), len(lines)) == ({"R_X86_64_JUMP_SLOT"}, 83)


@pytest.mark.dashinfer
def test_cpu_only_worker_rejects_cuda(cpu_only, caplog):
    with pytest.raises(WorkerDied, match="exit status 1"):
        asyncio.run(WorkerProcess.launch(cpu_only, {"compute_unit": "CUDA:0"}))
    assert "is installed for the CPU only: run `dashinfer-vlm dashinfer" in caplog.text


@pytest.mark.dashinfer
def test_cpu_only_environment_has_only_dashinfer_and_numpy(cpu_only):
    listed = subprocess.run(
        cpu_only.command("-m", "pip", "list", "--format=freeze"), capture_output=True, text=True, check=True
    )
    names = {line.partition("==")[0] for line in listed.stdout.splitlines()}
    assert names - {"pip", "setuptools"} == {"dashinfer", "numpy"}
