"""scripts/lint_imports.py: contracts hold for packages that nobody listed, and no import is circular."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.scripts import FOLDER

CONTRACT = """
[tool.importlinter]
root_packages = ["PACKAGES"]

[[tool.importlinter.contracts]]
name = "independent"
type = "independence"
modules = ["PACKAGES"]
"""


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"plugins/second/__init__.py": "import third\n"}, "second is not allowed to import third"),
        ({"plugins/second/__init__.py": f"{FOR_TYPES}import third\n"}, "second is not allowed to import third"),
        (
            {"plugins/second/a.py": "from . import b\n", "plugins/second/b.py": f"{FOR_TYPES}from . import a\n"},
            "Circular imports: second.",
        ),
        (
            {"plugins/second/a.py": "from . import VERSION\n", "plugins/second/__init__.py": "from . import a\n"},
            "second.",
        ),
        (
            {
                "plugins/second/a/__init__.py": "",
                "plugins/second/a/x.py": "import second.b\n",
                "plugins/second/a/y.py": "",
                "plugins/second/b.py": "import second.a.y\n",
            },
            "in second: second.b -> second.a.y closes a circle",
        ),
    ],
    ids=["contract", "contract, for types", "modules", "package and module", "packages"],
)
def test_forbidden_import_is_found_without_listing_packages(tmp_path, files, message):
    (tmp_path / "scripts").mkdir()
    shutil.copy(FOLDER / "lint_imports.py", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(CONTRACT)
    packages = {f"{package}/__init__.py": "" for package in ("adapters/first", "plugins/second", "plugins/third")}
    for path, code in {**packages, **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(code)
    paths = {"PYTHONPATH": f"{tmp_path}/adapters:{tmp_path}/plugins", "NO_COLOR": "1"}
    program = [sys.executable, "scripts/lint_imports.py"]
    done = subprocess.run(program, cwd=tmp_path, env=paths, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in " ".join(done.stdout.split())
