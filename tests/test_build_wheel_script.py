"""`scripts/build-wheel`: the library of prebuilt kernels, and the wheels with and without it."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels import INT8, KVSpan, KVSpans
from dashinfer_vlm_core.kernels.cpu import cpu_flags
from dashinfer_vlm_cpu.native import kernels_in, load_variant
from dashinfer_vlm_cpu.prebuilt import NoPrebuiltKernelsError, UnusablePrebuiltKernelsError, load_prebuilt
from dashinfer_vlm_cpu.variants import PORTABLE_TILES, VARIANTS, source_digest
from tests.scripts import load_script
from tests.waiting import HANG

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "plugins" / "dashinfer_vlm_cpu"
SUPPORTED = [variant for variant in VARIANTS if cpu_flags().issuperset(variant.features)]
TOOLS = ("cc", "gcc"), ("nm",), ("objcopy",), ("objdump",), ("readelf",)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not all(any(map(shutil.which, names)) for names in TOOLS),
        reason="the kernels are for x86-64, or there is no gcc",
    ),
]


@pytest.fixture(scope="module")
def script():
    return load_script("build_wheel")


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="module")
def library(script, objects, tmp_path_factory):
    """The path of the prebuilt library."""
    return script.compile_library(KERNELS, objects, tmp_path_factory.mktemp("library") / "libkernels.so")


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def products(kernels):
    """Results of the kernels that take most of the time, and of those with constants of their own."""
    weight, x, norm = numbers(96, 260) / 8, numbers(70, 260, seed=1), numbers(260, seed=2)
    yield kernels.linear(weight)(x)
    yield kernels.linear(weight)(x[:1])
    yield kernels.linear(weight, quantization=INT8)(x)
    yield kernels.norm(x, norm, None, 1e-6)
    q, (k, v) = numbers(20, 6, 80), numbers(4, 700, 80, seed=1).split(2)
    yield kernels.attend(q, k, v, KVSpans([KVSpan(0, 20, 10, 600, 580)]))


@pytest.mark.skipif(not SUPPORTED, reason="no kernels for this CPU")
def test_prebuilt_kernels_equal_compiled_kernels(library):
    for variant in SUPPORTED:
        compiled = load_variant(variant, EngineConfig()).kernels
        prebuilt = kernels_in(load_prebuilt(variant, library), variant)
        for found, expected in zip(products(prebuilt), products(compiled), strict=True):
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.skipif(not SUPPORTED, reason="no kernels for this CPU")
def test_process_with_prebuilt_kernels_has_one_openmp_runtime(library):
    """With the last set: the first one may be AMX, which a process has to request."""
    program = f"""
import re
from pathlib import Path
import torch
from dashinfer_vlm_cpu.native import kernels_in
from dashinfer_vlm_cpu.prebuilt import load_prebuilt
from dashinfer_vlm_cpu.variants import VARIANTS
(variant,) = (each for each in VARIANTS if each.name == {SUPPORTED[-1].name!r})
torch.set_num_threads(2)
weight, x = torch.randn(640, 64).bfloat16(), torch.randn(40, 64).bfloat16()
kernels_in(load_prebuilt(variant, Path({str(library)!r})), variant).linear(weight)(x)
maps = Path("/proc/self/maps").read_text()
assert {str(library)!r} in maps
print(*set(re.findall(r"/\\S*lib[a-z]*omp\\d*[-.]\\S*", maps)))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG, cwd=ROOT)
    (runtime,) = done.stdout.split()
    assert Path(runtime).is_relative_to(Path(torch.__file__).parents[1])


def test_library_exports_only_prefixed_functions(script, library):
    exported = {line.split()[0] for line in script.run(["nm", "-D", "-P", "--defined-only", library]).splitlines()}
    prefixes = ("prebuilt_", *(f"{variant.name}_" for variant in VARIANTS))
    assert [name for name in exported if not name.startswith(prefixes)] == []
    assert {f"{variant.name}_linear_biased" for variant in VARIANTS} <= exported


def test_common_part_has_only_baseline_instructions(script, library, objects):
    """It runs before the CPU's features matter. The same search finds the registers in the kernels."""
    wide = re.compile(r"%[yz]mm\d|%k[0-7]\b|%tmm\d")
    assert not wide.search(script.run(["objdump", "-d", str(objects / "common.o")]))
    assert wide.search(script.run(["objdump", "-d", "--disassemble=pack_bf16._omp_fn.0", str(objects / "avx512.o")]))


CONSTRUCTOR = "__attribute__((constructor)) void f(void) {}"
INDIRECT = 'static void g(void) {} static void *c(void) { return g; } __attribute__((ifunc("c"))) void f(void);'


@pytest.mark.parametrize(
    ("code", "flags", "problem"),
    [
        (CONSTRUCTOR, [], "runs code when it is loaded: INIT_ARRAY"),
        (INDIRECT, [], "runs code when it is loaded: IFUNC"),
        ("int f(void) { return 1; }", ["-Wl,--no-as-needed", "-lgomp"], "needs libgomp.so.1"),
    ],
)
def test_library_that_runs_code_or_needs_others_is_rejected(script, tmp_path, code, flags, problem):
    source, made = tmp_path / "f.c", tmp_path / "f.so"
    source.write_text(f"{code}\n")
    script.run([script.compiler(), str(source), "-shared", "-fPIC", "-nostartfiles", *flags, "-o", str(made)])
    with pytest.raises(script.BuildFailed, match=f"^f.so {problem}$"):
        script.check_library(made)


def test_library_does_not_depend_on_folders(script, tmp_path, monkeypatch):
    """With the real compiler, since that of the tests stores objects; one variant, little optimized, saves time."""
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder) != ROOT / "tests" / "compiler"]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    made = []
    for name in ("first", "second folder"):
        kernels, objects = tmp_path / name / "kernels", tmp_path / name / "objects"
        shutil.copytree(KERNELS, kernels, ignore=shutil.ignore_patterns("__pycache__"))
        settings = (kernels / "variants.py").read_text()
        changed = re.sub(
            r"^VARIANTS = .*$", "VARIANTS = (AVX2,)", settings.replace('"-O3"', '"-O1"'), flags=re.MULTILINE
        )
        assert changed.count("(AVX2,)") == changed.count("-O1") == 1
        (kernels / "variants.py").write_text(changed)
        objects.mkdir()
        made.append(script.compile_library(kernels, objects, tmp_path / f"{name}.so"))
    assert made[0].read_bytes() == made[1].read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (source_digest(KERNELS), "0" * 64, "were compiled from other sources"),
        ("GOMP_barrier ", "GOMP_carrier ", "has no OpenMP function that the prebuilt kernels use .*GOMP_carrier"),
        ("\x7fELF", "\x7fFLE", "cannot be loaded .*invalid ELF header"),
    ],
)
def test_unusable_library_is_reported(library, tmp_path, old, new, reason):
    content = library.read_bytes()
    assert content.count(old.encode()) == 1
    (tmp_path / "changed.so").write_bytes(content.replace(old.encode(), new.encode()))
    with pytest.raises(UnusablePrebuiltKernelsError, match=reason):
        load_prebuilt(VARIANTS[0], tmp_path / "changed.so")


def test_missing_library_or_variant_is_reported(library, tmp_path):
    for variant, path in ((VARIANTS[0], tmp_path / "none.so"), (PORTABLE_TILES, library)):
        with pytest.raises(NoPrebuiltKernelsError, match="this installation has no prebuilt kernels"):
            load_prebuilt(variant, path)


def test_every_file_of_the_kernels_is_part_of_the_digest(tmp_path):
    shutil.copytree(KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    digests = {source_digest(tmp_path / "kernels")}
    files = [path for path in (tmp_path / "kernels").iterdir() if path.suffix in {".c", ".h"}]
    for path in files:
        path.write_text(path.read_text() + "\n")
        digests.add(source_digest(tmp_path / "kernels"))
    assert len(digests) == 1 + len(files) > 5


@pytest.mark.parametrize(
    ("tag", "expected"), [("manylinux_2_17_x86_64", "manylinux_2_17_x86_64"), ("linux_x86_64", None)]
)
def test_tag_is_that_of_auditwheel(script, tag, expected):
    report = json.dumps({"overall_tag": tag})
    if expected:
        assert script.oldest_platform(report) == expected
    else:
        with pytest.raises(script.BuildFailed, match="which is not manylinux"):
            script.oldest_platform(report)


def test_wheel_without_compiler_is_pure(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    wheel = script.build(ROOT, "wheel", tmp_path / "dist")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


@pytest.fixture(scope="module")
def installed(script, library, tmp_path_factory):
    """The site-packages folder of an environment with the platform wheel, and that environment's interpreter.

    Dependencies come from this environment by its path, and without the hook of the editable installation.
    """
    wheel = script.build(ROOT, "wheel", tmp_path_factory.mktemp("dist"), library, "manylinux_2_17_x86_64")
    assert wheel.name.endswith("-py3-none-manylinux_2_17_x86_64.whl")
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site, folder / "bin" / "python"


def kernels_finding(python, cache, path):
    """Return what `doctor` reports about the kernels in a process with this PATH, and its standard error."""
    program = "import sys; from dashinfer_vlm_core.cli.main import main; sys.argv[1:] = ['doctor', '--json']; main()"
    environment = {**os.environ, "PATH": str(path), "DASHINFER_VLM_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd=cache, timeout=HANG
    )
    (finding,) = (found for found in json.loads(done.stdout) if found["name"] == "kernels")
    return finding, done.stderr


def test_platform_wheel_is_not_pure(installed):
    site, _ = installed
    (metadata,) = site.glob("dashinfer_vlm_adapters-*.dist-info/WHEEL")
    assert "Root-Is-Purelib: false\nTag: py3-none-manylinux_2_17_x86_64\n" in metadata.read_text()
    assert (site / "dashinfer_vlm_cpu" / "libkernels.so").is_file()


@pytest.mark.skipif(not SUPPORTED, reason="no kernels for this CPU")
def test_installed_wheel_needs_no_compiler_and_no_cache(installed, tmp_path):
    _, python = installed
    finding, log = kernels_finding(python, tmp_path, tmp_path / "empty")
    assert finding["status"] == "ok"
    assert finding["detail"].startswith(f"{SUPPORTED[0].name}, in C, prebuilt;")
    assert list(tmp_path.iterdir()) == []
    assert log == ""


@pytest.mark.skipif(not SUPPORTED, reason="no kernels for this CPU")
def test_edited_sources_are_compiled_instead(installed, tmp_path):
    site, python = installed
    source = site / "dashinfer_vlm_cpu" / "libkernels.c"
    source.write_text(source.read_text() + "\n")
    finding, log = kernels_finding(python, tmp_path, os.environ["PATH"])
    assert finding["detail"].startswith(f"{SUPPORTED[0].name}, in C, compiled into {tmp_path / 'kernels'};")
    message = "The C kernels are compiled on this machine: the prebuilt kernels were compiled from other sources."
    assert log.count(message) == 1


def test_ctypes_finds_functions_by_their_names_in_c(library):
    loaded = load_prebuilt(VARIANTS[-1], library)
    assert isinstance(loaded, ctypes.CDLL)
    assert (
        ctypes.cast(loaded.linear_biased, ctypes.c_void_p).value
        == ctypes.cast(ctypes.CDLL(str(library))[f"{VARIANTS[-1].name}_linear_biased"], ctypes.c_void_p).value
    )
    with pytest.raises(AttributeError, match=f"{VARIANTS[-1].name}_nothing"):
        _ = loaded.nothing
