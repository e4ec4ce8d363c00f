"""The C kernels are compiled when the package is installed or a wheel is built, and loaded from there."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from dashinfer_vlm_core.kernels.devices import cpu_flags
from dashinfer_vlm_cpu import build as build_module
from dashinfer_vlm_cpu.build import AVX2, AVX512, LIBRARY, PORTABLE_TILES, VARIANTS, find_compiler, is_current
from dashinfer_vlm_cpu.library import LibraryError, load_library
from tests.waiting import HANG

ROOT = Path(__file__).parents[1]
KERNELS = Path("plugins", "dashinfer_vlm_cpu")
SUPPORTED = [variant for variant in VARIANTS if cpu_flags().issuperset(variant.features)]

needs_compiler = pytest.mark.skipif(
    platform.machine() != "x86_64" or not find_compiler(), reason="the kernels are for x86-64, or there is no gcc"
)
needs_library = pytest.mark.skipif(not LIBRARY.is_file(), reason="the kernels were not compiled")
"""For tests of the real library, which `scripts/env` compiles."""

C_SOURCE = """
#include <omp.h>
#include "number.h"
int number(void) { return NUMBER + omp_get_max_threads(); }
"""


@pytest.fixture
def project(tmp_path):
    """A project with the real build hook, and kernels that are one small function."""
    folder = tmp_path / KERNELS
    folder.mkdir(parents=True)
    for name in ("__init__.py", "build.py", "common.c"):
        shutil.copy(ROOT / KERNELS / name, folder)
    for source in {variant.source for variant in VARIANTS}:
        (folder / source).write_text(C_SOURCE)
    (folder / "number.h").write_text("#define NUMBER 1\n")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "build_hook.py", tmp_path / "scripts")
    (tmp_path / ".gitignore").write_text("*.so\n")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "small"\nversion = "1"\nrequires-python = ">=3.10"\n'
        '[tool.hatch.build.targets.wheel]\nonly-include = ["plugins"]\nsources = ["plugins"]\n'
        '[tool.hatch.build.targets.wheel.hooks.custom]\npath = "scripts/build_hook.py"\n'
    )
    return tmp_path


def build_wheel(project, version="standard", **environment):
    """Build a wheel as pip does, and return the finished process and the wheel, if there is one."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", f"wheel:{version}", "-d", "dist"],
        cwd=project, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=HANG,
    )  # fmt: skip
    return done, next((project / "dist").glob("*.whl"), None)


def libraries(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


@needs_compiler
@pytest.mark.slow
def test_wheel_contains_compiled_kernels(project):
    done, wheel = build_wheel(project)
    assert wheel, done.stderr
    assert wheel.name == "small-1-py3-none-linux_x86_64.whl"
    assert libraries(wheel) == ["dashinfer_vlm_cpu/libkernels.so"]
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/WHEEL"))
        assert b"Root-Is-Purelib: false" in archive.read(metadata)


@needs_compiler
@pytest.mark.slow
def test_editable_installation_compiles_next_to_sources(project):
    done, wheel = build_wheel(project, version="editable")
    assert wheel, done.stderr
    assert libraries(wheel) == []
    assert (project / KERNELS / "libkernels.so").is_file()


@pytest.mark.slow
def test_wheel_without_compiler_is_pure(project):
    """A library of other sources, which an earlier build left, is not part of it."""
    (project / KERNELS / "libkernels.so").write_bytes(b"of other sources")
    (project / "empty").mkdir()
    done, wheel = build_wheel(project, PATH=str(project / "empty"), CC="")
    assert wheel, done.stderr
    assert wheel.name == "small-1-py3-none-any.whl"
    assert libraries(wheel) == []


@needs_compiler
@pytest.mark.slow
def test_failed_compilation_fails_the_build(project):
    (project / KERNELS / "number.h").write_text("#error an old compiler\n")
    for environment, reason in (({}, "an old compiler"), ({"CC": "nowhere-gcc"}, "nowhere-gcc cannot be run")):
        done, wheel = build_wheel(project, **environment)
        assert (done.returncode, wheel) == (1, None)
        assert reason in done.stderr
        assert "Set CC to such a gcc, or HATCH_BUILD_NO_HOOKS=true" in done.stderr
    assert [path.name for path in (project / KERNELS).iterdir() if path.name.startswith((".build", "lib"))] == []
    done, wheel = build_wheel(project, HATCH_BUILD_NO_HOOKS="true")
    assert wheel.name == "small-1-py3-none-any.whl"


@needs_compiler
def test_changed_c_is_rebuilt(project):
    folder = project / KERNELS
    compile_kernels = runpy.run_path(str(folder / "build.py"))
    build, library = compile_kernels["build"], folder / "libkernels.so"
    variant = compile_kernels["AVX2"]
    contents = []
    for number in (1, 1, 2):
        (folder / "number.h").write_text(f"#define NUMBER {number}\n")
        assert build(library, [variant])
        contents.append((library.stat().st_ino, library.read_bytes()))
    first, unchanged, changed = contents
    assert first == unchanged
    assert first[1] != changed[1]


@needs_compiler
def test_library_does_not_depend_on_folders(project):
    other = project / "other folder"
    shutil.copytree(project / KERNELS, other)
    made = []
    for folder in (project / KERNELS, other):
        module = runpy.run_path(str(folder / "build.py"))
        assert module["build"](folder / "libkernels.so", [module["AVX2"]])
        made.append((folder / "libkernels.so").read_bytes())
    assert made[0] == made[1]


def test_missing_compiler_and_other_platforms_are_not_errors(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not build_module.build(tmp_path / "libkernels.so")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not build_module.build()


CHECK = ("-fsyntax-only", "-std=gnu11", "-fopenmp", "-Werror=implicit-function-declaration")


@needs_compiler
@pytest.mark.slow
def test_each_header_includes_what_it_needs(tmp_path):
    for header in sorted((ROOT / KERNELS).glob("*.h")):
        kind = header.name.partition("_")[0].removesuffix(".h")
        variant = {"avx2": AVX2, "tiles": PORTABLE_TILES}.get(kind, AVX512)
        command = [*find_compiler(), *CHECK, *variant.flags, "-x", "c"]
        done = subprocess.run([*command, str(header)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG).stdout


@needs_compiler
@needs_library
def test_library_runs_no_code_when_loaded_and_needs_only_libc():
    """The kernels' instructions would end the process on a processor that does not have them."""
    dynamic = output_of("readelf", "--dynamic", "--wide", str(LIBRARY))
    content = output_of("readelf", "--symbols", "--relocs", "--wide", str(LIBRARY))
    assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)) <= {"libc.so.6", "libm.so.6"}
    assert not re.search(r"\((INIT|FINI|INIT_ARRAY|FINI_ARRAY|PREINIT_ARRAY)\)", dynamic)
    assert not re.search(r"\bIFUNC\b|_IRELATIVE\b", content)
    exported = {line.split()[0] for line in output_of("nm", "-D", "-P", "--defined-only", str(LIBRARY)).splitlines()}
    prefixes = ("common_", *(f"{variant.name}_" for variant in VARIANTS))
    assert [name for name in exported if not name.startswith(prefixes)] == []
    assert {f"{variant.name}_linear_biased" for variant in VARIANTS} <= exported


@needs_library
@pytest.mark.slow
@pytest.mark.skipif(not SUPPORTED, reason="no kernels for this CPU")
def test_process_has_one_openmp_runtime():
    """With the last set: the first one may be AMX, which a process has to request."""
    program = f"""
import re
from pathlib import Path
import torch
from dashinfer_vlm_cpu.build import LIBRARY, VARIANTS
from dashinfer_vlm_cpu.native import load_variant
(variant,) = (each for each in VARIANTS if each.name == {SUPPORTED[-1].name!r})
torch.set_num_threads(2)
weight, x = torch.randn(640, 64).bfloat16(), torch.randn(40, 64).bfloat16()
load_variant(variant).kernels.linear(weight)(x)
maps = Path("/proc/self/maps").read_text()
assert str(LIBRARY) in maps
print(*set(re.findall(r"/\\S*lib[a-z]*omp\\d*[-.]\\S*", maps)))
"""
    (runtime,) = output_of(sys.executable, "-c", program).split()
    assert Path(runtime).is_relative_to(Path(torch.__file__).parents[1])


@needs_library
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            build_module.source_digest(),
            "0" * 64,
            "compiled from other sources; run `python -m dashinfer_vlm_cpu`",
        ),
        ("GOMP_barrier ", "GOMP_carrier ", "has no OpenMP function that the C kernels use .*GOMP_carrier"),
        ("\x7fELF", "\x7fFLE", "cannot be loaded .*invalid ELF header"),
    ],
)
def test_unusable_library_is_reported(tmp_path, old, new, reason):
    content = LIBRARY.read_bytes()
    assert content.count(old.encode()) == 1
    (tmp_path / "changed.so").write_bytes(content.replace(old.encode(), new.encode()))
    with pytest.raises(LibraryError, match=reason):
        load_library(VARIANTS[0], tmp_path / "changed.so")


def test_missing_library_is_reported_with_the_command(tmp_path):
    with pytest.raises(
        LibraryError, match=r"installed without a C compiler; install gcc .* and run `python -m dashinf"
    ):
        load_library(VARIANTS[0], tmp_path / "none.so")


@needs_library
def test_library_of_this_checkout_is_current():
    """Otherwise, tests of the kernels would test other ones."""
    assert is_current(LIBRARY), "run `python -m dashinfer_vlm_cpu`"
