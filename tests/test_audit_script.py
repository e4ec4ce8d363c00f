"""`scripts/audit`, without the network: reports of pip-audit, and licenses of packages and of files in the wheel."""

from __future__ import annotations

import json
import re
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
FOREIGN = re.compile(rb"copyright|spdx-license-identifier|\(c\) (19|20)\d\d|all rights reserved", re.IGNORECASE)


@pytest.fixture(scope="module")
def script():
    return load_script("audit")


@pytest.fixture(scope="module")
def wheel_files():
    """The files of the wheel, relative to the root of the repository."""
    folders = [path for pattern in ("dashinfer_vlm_core", "*/dashinfer_vlm_*") for path in ROOT.glob(pattern)]
    folders = [path for path in folders if path.parent in {ROOT, ROOT / "adapters", ROOT / "plugins"}]
    assert len(folders) >= 9
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts]


def package(folder, name, metadata):
    """Write the metadata of an installed package."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{metadata}\n\n")


RULES = {"allowed-licenses": ["MIT", "Apache-2.0"], "exceptions": {"accepted": "GPL; a test"}}


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ("License-Expression: MIT", None),
        ("License-Expression: MIT AND (Apache-2.0 WITH LLVM-exception)", None),
        ("License-Expression: MIT AND GPL-3.0-only", "GPL-3.0-only is not in allowed-licenses"),
        ("Classifier: License :: OSI Approved :: MIT License", None),
        ("License: Apache 2.0 License", None),
        ("License: my own\nClassifier: License :: OSI Approved :: MIT License", None),
        ("License: Unclear", "Unclear is not in allowed-licenses"),
        ("Summary: none", "its metadata states no license"),
    ],
)
def test_license_is_read_from_metadata(script, tmp_path, metadata, problem):
    package(tmp_path, "example", metadata)
    result = script.check_licenses(distributions(path=[str(tmp_path)]), ["example"], RULES)
    assert result.problems == ([f"example: {problem}"] if problem else [])
    assert not result.not_run


def test_missing_package_is_not_checked(script, tmp_path):
    result = script.check_licenses(distributions(path=[str(tmp_path)]), ["example"], RULES)
    assert result.not_run == ["example is not installed here"]


def test_unnecessary_exception_is_reported(script, tmp_path):
    package(tmp_path, "accepted", "License-Expression: MIT")
    (problem,) = script.check_licenses(distributions(path=[str(tmp_path)]), ["accepted"], RULES).problems
    assert problem.startswith("accepted: its license is allowed")


def test_installed_packages_have_allowed_licenses(script):
    """Packages that are not in constraints.txt, such as the CUDA libraries of torch, are not compared."""
    result = script.check_licenses(distributions(), script.expected_packages(), script.settings())
    assert result.problems == []
    assert int(result.summary.split()[2]) > 50


def test_vulnerabilities_are_reported_with_the_fix(script):
    vulnerability = {"id": "PYSEC-1", "fix_versions": ["2.11"]}
    packages = [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "version": "2", "vulns": [vulnerability]}]
    result = script.read_report(json.dumps({"dependencies": packages}))
    assert result.problems == ["b 2: PYSEC-1, fixed in: 2.11"]
    assert result.not_run == []


def test_skipped_packages_are_not_checked(script):
    """pip-audit itself succeeds, with "No known vulnerabilities found"."""
    result = script.read_report(json.dumps({"dependencies": [{"name": "a", "skip_reason": "not found on PyPI"}]}))
    assert result.not_run == ["not found on PyPI"]


def test_failure_of_pip_audit_is_not_a_success(script):
    assert script.read_report("ConnectionError: no route").not_run == ["pip-audit failed: ConnectionError: no route"]


def test_all_constraints_are_audited(script):
    pins = {str(item.specifier) + item.name for python in ("3.10", "3.13") for item in script.requirements(python)}
    lines = [line.partition(";")[0] for line in script.CONSTRAINTS.read_text().splitlines() if "==" in line]
    assert len(pins) == len(set(lines)) > 200


def files_without_license(files, rules):
    """Return the files, of paths relative to the root, that no pattern of `rules` covers."""
    return [name for name in files if not any(Path(name).match(pattern) for pattern in rules["files"])]


def test_files_in_the_wheel_have_a_license(script, wheel_files):
    rules = script.settings()
    others = [path.as_posix() for path in wheel_files if path.suffix != ".py"]
    assert len(others) > 20
    assert files_without_license(others, rules) == []
    unused = [pattern for pattern in rules["files"] if not any(Path(name).match(pattern) for name in others)]
    assert unused == []


def test_file_without_license_is_found(script):
    name = "adapters/dashinfer_vlm_server/endpoints/page/static/vendor/library.js"
    assert files_without_license([name], script.settings()) == [name]


@pytest.mark.slow
def test_wheel_contains_no_third_party_notices(wheel_files):
    """Add a third-party file to `[tool.dashinfer-audit.files]` and here, and its license to `license-files`."""
    assert [str(path) for path in wheel_files if FOREIGN.search((ROOT / path).read_bytes())] == []
