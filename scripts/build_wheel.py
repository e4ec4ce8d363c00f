"""Build the sdist, the pure wheel, and the wheel with compiled kernels: the program of `scripts/build-wheel`.

The kernels are compiled like those that build.py compiles on first use, with the same flags. Each variant is a separate
object file, whose functions get the variant's name as a prefix. Linked together, they need no library but the C
library, and run no code when they are loaded. The same sources and compiler result in the same bytes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KERNELS = Path("plugins", "dashinfer_vlm_cpu")
COMMON_SOURCE = "libkernels.c"
COMMON_FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-march=x86-64")
LINK_FLAGS = (
    "-nostartfiles",  # they would run code of the compiler's libraries on loading
    "-Wl,-z,defs",  # report functions that no library defines
    "-Wl,-z,noexecstack",
    "-Wl,-z,relro,-z,now",
    "-Wl,--as-needed",
    "-Wl,--build-id=none",
    "-s",
)
C_LIBRARIES = {"libc.so.6", "libm.so.6"}
STEP_TIMEOUT = 600.0


class BuildFailed(Exception):
    """A step failed; the message names it and gives its output."""


def main() -> int:
    try:
        build_all(ROOT, Path(sys.argv[1]).absolute())
    except BuildFailed as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    return 0


def build_all(root: Path, output: Path) -> None:
    """Build the distributions of a checkout: the sdist, and the wheels from its files.

    Raises:
        BuildFailed: a step failed.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise BuildFailed("the kernels are for Linux on x86-64; elsewhere, `pip wheel .` builds the pure wheel")
    with tempfile.TemporaryDirectory(prefix="dashinfer-vlm-build-") as name:
        scratch = Path(name)
        built = scratch / "built"
        sdist = build(root, "sdist", built)
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # noqa: S202 - our own
        source = scratch / sdist.name.removesuffix(".tar.gz")
        distributions = [sdist, build(source, "wheel", built), build_platform_wheel(source, scratch, built)]
        output.mkdir(parents=True, exist_ok=True)
        for distribution in distributions:
            shutil.copy(distribution, output)
            print(f"{output / distribution.name}: {distribution.stat().st_size / 1e6:.2f} MB")


def build_platform_wheel(source: Path, scratch: Path, output: Path) -> Path:
    """Build the wheel with compiled kernels. Its tag states the oldest C library that has the symbols they use.

    Raises:
        BuildFailed: a step failed, or the library needs more than the C library.
    """
    objects = scratch / "objects"
    objects.mkdir()
    library = compile_library(source / KERNELS, objects, scratch / "libkernels.so")
    print(f"{library.name}: {library.stat().st_size / 1e3:.0f} KB")
    draft = build(source, "wheel", scratch / "draft", kernels=library, tag="linux_x86_64")
    tag = oldest_platform(run([sys.executable, "-m", "auditwheel", "show", "--json", str(draft)]))
    return build(source, "wheel", output, kernels=library, tag=tag)


def build(source: Path, target: str, output: Path, kernels: Path | None = None, tag: str = "") -> Path:
    """Run hatchling, and return the distribution that it wrote to the folder.

    Args:
        source: the folder of pyproject.toml.
        target: `sdist` or `wheel`.
        output: the folder for the distribution.
        kernels: a compiled library for the wheel; without it, the wheel is pure Python.
        tag: the platform tag of a wheel with kernels.

    Raises:
        BuildFailed: hatchling failed.
    """
    before = set(output.glob("*"))
    own = {"WHEEL_KERNELS": str(kernels), "WHEEL_PLATFORM": tag} if kernels else {}
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(output)], source, own)
    (made,) = set(output.glob("*")) - before
    return made


def oldest_platform(report: str) -> str:
    """Return the platform tag of the oldest C library from auditwheel's report about a wheel.

    Raises:
        BuildFailed: the wheel is not a manylinux wheel.
    """
    tag = json.loads(report).get("overall_tag", "")
    if not re.fullmatch(r"manylinux_2_\d+_x86_64", tag):
        raise BuildFailed(f"auditwheel reports the platform {tag}, which is not manylinux: {report}")
    return str(tag)


def compile_library(folder: Path, objects: Path, output: Path) -> Path:
    """Compile the C files of a folder for all variants into one library.

    Args:
        folder: the folder with `variants.py` and the C files.
        objects: an empty folder for object files.
        output: the path of the library.

    Raises:
        BuildFailed: a tool failed, or the library would run code when it is loaded.
    """
    settings = runpy.run_path(str(folder / "variants.py"))
    variants = settings["VARIANTS"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda each: compile_variant(folder, objects, each, settings["COMPILE_FLAGS"]), variants))
    common = compile_common(folder, objects, parts, settings["source_digest"](folder))
    exports = objects / "exports"
    exported = " ".join(f"{prefix}_*;" for prefix in ["prebuilt", *(variant.name for variant in variants)])
    exports.write_text(f"{{ global: {exported} local: *; }};\n", encoding="utf-8")
    flags = [*settings["LINK_FLAGS"], *LINK_FLAGS, f"-Wl,--version-script={exports}", "-lm"]
    run([compiler(), *map(str, [common, *parts]), *flags, "-o", str(output)])
    check_library(output)
    return output


def compile_variant(folder: Path, objects: Path, variant: Any, flags: Sequence[str]) -> Path:
    """Compile a variant to an object file, in which the variant's name is a prefix of each function."""
    made = compile_object(folder / variant.source, [*flags, *variant.flags], objects / f"{variant.name}.o")
    names = objects / f"{variant.name}.names"
    lines = [f"{name} {variant.name}_{name}\n" for name in symbols(made, "--defined-only")]
    names.write_text("".join(lines), encoding="utf-8")
    run(["objcopy", f"--redefine-syms={names}", str(made)])
    return made


def compile_common(folder: Path, objects: Path, variants: Sequence[Path], digest: str) -> Path:
    """Compile the part that all variants share, with the functions of OpenMP that they call."""
    called = {name for path in variants for name in symbols(path, "--undefined-only")}
    openmp = sorted(name for name in called if name.startswith(("GOMP_", "omp_")))
    defines = [f"-DOPENMP_FUNCTIONS={' '.join(f'FUNCTION({name})' for name in openmp)}", f'-DSOURCE_DIGEST="{digest}"']
    return compile_object(folder / COMMON_SOURCE, [*COMMON_FLAGS, *defines], objects / "common.o")


def compile_object(source: Path, flags: Sequence[str], output: Path) -> Path:
    run([compiler(), str(source), *flags, "-c", "-o", str(output)])
    return output


def compiler() -> str:
    return os.environ.get("CC", "cc")


def symbols(path: Path, which: str) -> list[str]:
    """Return the names of an object file's global symbols."""
    return [line.split()[0] for line in run(["nm", "--extern-only", "-P", which, str(path)]).splitlines()]


def check_library(path: Path) -> None:
    """Check that a library needs only the C library, and runs no code when it is loaded.

    The kernels' instructions would end the process on a processor that does not have them.

    Raises:
        BuildFailed: it needs another library, or has constructors or indirect functions.
    """
    dynamic = run(["readelf", "--dynamic", "--wide", str(path)])
    content = run(["readelf", "--symbols", "--relocs", "--wide", str(path)])
    others = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)) - C_LIBRARIES
    if others:
        raise BuildFailed(f"{path.name} needs {', '.join(sorted(others))}")
    found = re.findall(r"\((INIT|FINI|INIT_ARRAY|FINI_ARRAY|PREINIT_ARRAY)\)", dynamic)
    found += re.findall(r"\bIFUNC\b|_IRELATIVE\b", content)
    if found:
        raise BuildFailed(f"{path.name} runs code when it is loaded: {', '.join(sorted(set(found)))}")


def run(command: Sequence[str], folder: Path = ROOT, variables: dict[str, str] | None = None) -> str:
    """Run a command, and return its standard output.

    Raises:
        BuildFailed: the command failed, or does not exist.
    """
    environment = {**os.environ, **(variables or {})}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=STEP_TIMEOUT, check=False
        )
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} took more than {STEP_TIMEOUT:.0f} s") from error
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
