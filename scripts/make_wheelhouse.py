"""Make a folder with the wheels of this package for Linux machines without a network.

The folder has a wheel of this checkout and wheels of what it requires, in the versions of constraints.txt, or the
newest ones of what that does not list. It does not have torch, transformers and numpy, nor what only these require:
they are large, and depend on the GPU's driver, so the other machine must have them. README.txt in the folder says how
to install it there.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dashinfer-vlm-adapters"
EXPECTED = frozenset({"torch", "transformers", "numpy"})
"""What the other machine has; without their requirements, which may be shared."""
DEFAULT_EXTRAS = "server"
MAX_MIB = 60
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)
"""Minor versions of the C library, of the tags `manylinux_2_*` that are accepted: Ubuntu 22.04 has the last one."""
README = """\
Wheels of {package} for Python {python} on {machine}, {size:.1f} MiB.

The machine needs Python {python} with torch, transformers and numpy. Without a network:

    python{python} -m venv --system-site-packages env
    env/bin/python -m pip install --no-index --find-links {folder} '{package}[{extras}]'
    env/bin/dashinfer-vlm verify > report.md
"""


class WheelhouseFailed(Exception):
    """The folder cannot be made; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of the other machine (default: 3.12)")
    parser.add_argument("--machine", default="x86_64", choices=["x86_64", "aarch64"], help="its processor")
    parser.add_argument("--extras", default=DEFAULT_EXTRAS, metavar="NAMES", help=f"(default: {DEFAULT_EXTRAS})")
    parser.add_argument("--max-mib", type=float, default=MAX_MIB, metavar="MIB", help=f"(default: {MAX_MIB})")
    options = parser.parse_args()
    try:
        size = make(options.folder, options.python, options.machine, options.extras, options.max_mib)
    except WheelhouseFailed as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    print(f"{options.folder}: {size:.1f} MiB; {options.folder / 'README.txt'} says how to install it.")
    return 0


def make(folder: Path, python: str, machine: str, extras: str, max_mib: float) -> float:
    """Fill the folder, and return its size in MiB.

    Raises:
        WheelhouseFailed: the folder is not empty; or a wheel is missing or the folder too large, and it was removed.
    """
    if not re.fullmatch(r"3\.\d+", python):
        raise WheelhouseFailed(f"{python!r} is not a version of Python such as 3.12")
    if folder.exists() and any(folder.iterdir()):
        raise WheelhouseFailed(f"{folder} is not empty")
    if not find_spec("hatchling"):
        fix = f"{sys.executable} -m pip install hatchling"
        raise WheelhouseFailed(f"hatchling, which builds this package's wheel, is not installed. Run: {fix}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return fill(folder, python, machine, extras, max_mib)
    except BaseException:
        shutil.rmtree(folder)
        raise


def fill(folder: Path, python: str, machine: str, extras: str, max_mib: float) -> float:
    """Do the work of `make` in an empty folder."""
    environment = target_environment(python, machine)
    pins = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"), environment)
    names = closure(PACKAGE, frozenset(filter(None, extras.split(","))), environment)
    wanted = [f"{name}=={pins[name]}" if name in pins else name for name in sorted(names)]
    pip("download", *pip_platforms(python, machine), "--dest", folder, *wanted)
    pure = {} if machine == platform.machine() else {"HATCH_BUILD_NO_HOOKS": "true"}  # it cannot run compiled kernels
    pip("wheel", "--wheel-dir", folder, ROOT, environment={**os.environ, **pure})
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 2**20
    if size > max_mib:
        raise WheelhouseFailed(f"{folder} has {size:.1f} MiB, more than {max_mib:g}: {largest(folder)}")
    text = README.format(package=PACKAGE, python=python, machine=machine, size=size, folder=folder.name, extras=extras)
    (folder / "README.txt").write_text(text, encoding="utf-8")
    return size


def target_environment(python: str, machine: str) -> dict[str, str]:
    """Return the variables of markers on the other machine."""
    environment = {name: str(value) for name, value in default_environment().items()}
    environment |= {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    return environment | {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}


def read_pins(constraints: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of constraints.txt that apply, by name."""
    pins = {}
    for line in constraints.splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(dict(environment)):
                pins[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return pins


def closure(package: str, extras: frozenset[str], environment: Mapping[str, str]) -> set[str]:
    """Return everything that an installed package requires, without the package and `EXPECTED`."""
    found: set[str] = set()
    pending = [(package, extras)]
    seen = set(pending)
    while pending:
        for requirement in requirements_of(*pending.pop(), environment):
            name = canonicalize_name(requirement.name)
            item = (name, frozenset(requirement.extras))
            if name not in EXPECTED and item not in seen:
                seen.add(item)
                pending.append(item)
                found.add(name)
    return found - {canonicalize_name(package)}


def requirements_of(package: str, extras: Iterable[str], environment: Mapping[str, str]) -> Iterator[Requirement]:
    """Yield what a package requires on the other machine; nothing for one that is not installed here."""
    environments = [{**environment, "extra": extra} for extra in ("", *extras)]
    for requirement in own_requirements(extras) if package == PACKAGE else installed_requirements(package):
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            yield requirement


def own_requirements(extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield what pyproject.toml states: an editable installation requires more, and may be older.

    Raises:
        WheelhouseFailed: there is no such extra, or it is not installed here, so that its requirements are unknown.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    if unknown := sorted(set(extras) - known.keys()):
        raise WheelhouseFailed(f"{', '.join(unknown)} is not an extra; there are {', '.join(sorted(known))}")
    needed = [Requirement(line) for extra in extras for line in known[extra]]
    if missing := sorted({item.name for item in needed if item.name != PACKAGE and not is_installed(item.name)}):
        raise WheelhouseFailed(f"install {', '.join(missing)} here first: what they require is unknown otherwise")
    yield from map(Requirement, project["dependencies"])
    yield from needed


def is_installed(package: str) -> bool:
    try:
        requires(package)
    except PackageNotFoundError:
        return False
    return True


def installed_requirements(package: str) -> Iterator[Requirement]:
    """Yield what an installed package states."""
    if is_installed(package):
        yield from map(Requirement, requires(package) or ())


def pip_platforms(python: str, machine: str) -> list[str]:
    """Return pip's options for wheels of the other machine."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC] + [f"manylinux2014_{machine}"]
    platforms = [option for tag in tags for option in ("--platform", tag)]
    return ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]


def pip(command: str, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a command of pip.

    Raises:
        WheelhouseFailed: it failed.
    """
    line = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *map(str, arguments)]
    if command == "wheel":
        line.append("--no-build-isolation")
    done = subprocess.run(line, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise WheelhouseFailed(f"pip {command} failed:\n{done.stderr.strip()}")


def largest(folder: Path) -> str:
    """Name the largest wheels."""
    wheels = sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    return ", ".join(f"{wheel.name} {wheel.stat().st_size / 2**20:.1f} MiB" for wheel in wheels[:3])


if __name__ == "__main__":
    sys.exit(main())
