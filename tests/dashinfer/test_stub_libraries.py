"""Stub libraries for CUDA's libraries, the removal of GPU code, and a CPU-only environment."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from dashinfer_vlm_core.errors import MissingDependency, SetupError
from dashinfer_vlm_dashinfer import worker
from dashinfer_vlm_dashinfer.gpu_code import remove_gpu_code
from dashinfer_vlm_dashinfer.process import WorkerDied, WorkerProcess
from dashinfer_vlm_dashinfer.stub_libraries import ALL, DRIVER, StubLibrary, compile_stub_libraries

needs_compiler = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")
needs_nm = pytest.mark.skipif(not shutil.which("nm"), reason="there is no nm (binutils)")

SECTION_BYTES = 1 << 20


def symbols(library, which):
    """Return the dynamic symbols of a library as (name, version or ""), except weak ones."""
    listed = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    rows = [line.split()[-2:] for line in listed.splitlines()]
    return {
        (name, version.lstrip("@"))
        for kind, (name, _, version) in ((kind, name.partition("@")) for kind, name in rows)
        if kind not in {"w", "A"}
    }


def defined():
    """Return the symbols defined by the table, in the format of `symbols`."""
    return {(name, library.soname if library.versioned else "") for library in ALL for name in library.symbols}


@pytest.fixture(scope="module")
def stub_libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix") / "stub-libraries"
    compile_stub_libraries(ALL, folder)
    return folder


@needs_compiler
@needs_nm
def test_libraries_define_listed_symbols(stub_libraries):
    assert {path.name for path in stub_libraries.iterdir()} == {library.soname for library in ALL}
    assert [path.name for path in stub_libraries.parent.iterdir()] == [stub_libraries.name]
    assert set().union(*(symbols(path, "--defined-only") for path in stub_libraries.iterdir())) == defined()


@needs_compiler
def test_functions_report_that_there_is_no_gpu(stub_libraries):
    runtime = ctypes.CDLL(str(stub_libraries / "libcudart.so.12"))
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    assert runtime.__getattr__("__cudaRegisterFatBinary")() == 0
    assert runtime.cudaGetDeviceCount() == 100
    assert runtime.cudaGetErrorString(100).startswith(b"There is no GPU")
    assert ctypes.CDLL(str(stub_libraries / "libnvidia-ml.so.1")).nvmlInit_v2() == 9


def test_worker_loads_each_of_them():
    listed = {*worker.DRIVER_LIBRARIES, *(Path(path).name for path in worker.CUDA_LIBRARIES)}
    assert listed == {library.soname for library in ALL}
    assert set(worker.DRIVER_LIBRARIES) == {library.soname for library in DRIVER}


def test_missing_compiler_is_reported_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match=r"no C compiler was found.*`apt-get install gcc`"):
        compile_stub_libraries(ALL, tmp_path / "stub-libraries")


def test_failing_compiler_is_quoted(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'error: no such option' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"could not compile libx\.so \(error: no such option\)"):
        compile_stub_libraries([StubLibrary(soname="libx.so")], tmp_path / "stub-libraries")
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
    before = library.read_bytes()
    freed = remove_gpu_code(library)
    if not freed:
        pytest.skip("The file system of the temporary folder cannot deallocate a part of a file.")
    assert SECTION_BYTES - 8192 <= freed <= SECTION_BYTES
    start = before.index(b"\7" * SECTION_BYTES)
    assert library.read_bytes() == before[:start] + bytes(SECTION_BYTES) + before[start + SECTION_BYTES :]
    assert ctypes.CDLL(str(library)).answer() == 42


@needs_compiler
def test_gpu_code_of_other_file_names_is_kept(library, caplog):
    before = library.read_bytes()
    (library.parent / "other-name.so").hardlink_to(library)
    with caplog.at_level(logging.INFO):
        assert remove_gpu_code(library) == 0
    assert library.read_bytes() == before
    assert "the file has other hard links" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"text" * 100, b"\x7fELF\x02\x01" + bytes(100)])
def test_other_files_are_unchanged(tmp_path, content, caplog):
    path = tmp_path / "file"
    path.write_bytes(content)
    with caplog.at_level(logging.INFO):
        assert remove_gpu_code(path) == 0
        assert remove_gpu_code(tmp_path / "missing") == 0
    assert path.read_bytes() == content
    assert caplog.text.count("is kept") == 2


@pytest.fixture
def cpu_only(environment):
    if not environment.cpu_only:
        pytest.skip("DashInfer is installed with CUDA's libraries here.")
    return environment


@pytest.mark.dashinfer
@needs_nm
def test_every_symbol_needed_by_extension_is_defined(environment):
    """The table has exactly the symbols that it imports from NVIDIA's libraries."""
    (extension,) = environment.python.parent.parent.glob(
        "lib/python*/site-packages/dashinfer/allspark/_allspark.cpython-*.so"
    )
    sonames = {library.soname for library in ALL}
    undefined = symbols(extension, "--undefined-only")
    needed = {(name, version) for name, version in undefined if version in sonames}
    needed |= {(name, "") for name, version in undefined if not version and not name.startswith(("Py", "_Py"))}
    assert needed == defined()


@pytest.mark.dashinfer
def test_cpu_only_worker_rejects_cuda(cpu_only):
    with pytest.raises(WorkerDied, match=r"exit status 1.*is installed for the CPU only: run `dashinfer-vlm dashinfer"):
        asyncio.run(WorkerProcess.launch(cpu_only, {"compute_unit": "CUDA:0"}))


@pytest.mark.dashinfer
def test_cpu_only_environment_has_only_dashinfer_and_numpy(cpu_only):
    listed = subprocess.run(
        cpu_only.command("-m", "pip", "list", "--format=freeze"), capture_output=True, text=True, check=True
    )
    names = {line.partition("==")[0] for line in listed.stdout.splitlines()}
    assert names - {"pip", "setuptools"} == {"dashinfer", "numpy"}
