"""scripts/lint_imports.py: contracts hold for packages that nobody listed."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.scripts import FOLDER

CONTRACT = """
[tool.importlinter]
root_packages = ["PACKAGES"]

[[tool.importlinter.contracts]]
name = "independent"
type = "independence"
modules = ["PACKAGES"]
"""


def test_import_of_another_plugin_is_found_without_listing_it(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(FOLDER / "lint_imports.py", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(CONTRACT)
    for package, code in (("adapters/first", ""), ("plugins/second", "import third\n"), ("plugins/third", "")):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(code)
    paths = {"PYTHONPATH": f"{tmp_path}/adapters:{tmp_path}/plugins", "NO_COLOR": "1"}
    program = [sys.executable, "scripts/lint_imports.py"]
    done = subprocess.run(program, cwd=tmp_path, env=paths, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "second is not allowed to import third" in " ".join(done.stdout.split())
