"""How this package was installed, and the commands that add to it or repair it."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "dashinfer-vlm-adapters"
CONSTRAINTS = "constraints.txt"


@functools.cache
def installed_version(package: str) -> str:
    """Return the version of an installed package. To read it takes milliseconds: its description is parsed too."""
    return version(package)


def install_step(extra: str = "") -> str:
    """Return the step that installs this package again, with an extra if one is named, as in `Run: pip install ...`."""
    source, is_editable = _source()
    target = f"./{source.name}" if source and source.is_file() else "."
    requirement = shlex.quote(f"{target}[{extra}]") if extra else target
    return pip_step(f"-e {requirement}" if is_editable else requirement)


def pip_step(arguments: str) -> str:
    """Return the step that runs `pip install` with these arguments and the versions that the tests ran with.

    It begins with changing to the checkout, or to the folder of the wheel, that this package was installed from.
    """
    source, _ = _source()
    if source is None:
        return f"Run in a checkout: pip install -c {CONSTRAINTS} {arguments}"
    folder = source if source.is_dir() else source.parent
    constraints = f"-c {CONSTRAINTS} " if (folder / CONSTRAINTS).is_file() else ""
    return f"Run: cd {shlex.quote(str(folder))} && {_pip()} {constraints}{arguments}"


def _source() -> tuple[Path | None, bool]:
    """Return the folder or wheel that this package was installed from, if it still exists, and whether it is editable.

    pip records it in `direct_url.json`, by https://packaging.python.org/specifications/direct-url.
    """
    try:
        recorded = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return None, False
    url = urlsplit(recorded.get("url", ""))
    path = Path(url2pathname(url.path))
    if url.scheme != "file" or not path.exists():
        return None, False
    return path, bool(recorded.get("dir_info", {}).get("editable"))


def _pip() -> str:
    own = Path(sys.executable)
    quoted = shlex.quote(str(own))
    if find_spec("pip") is None:  # uv creates environments without it
        return f"uv pip install --python {quoted}"
    return "pip install" if shutil.which("pip") == str(own.with_name("pip")) else f"{quoted} -m pip install"
