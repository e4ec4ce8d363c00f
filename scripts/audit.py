"""Check vulnerabilities and licenses of the dependencies, and write an SBOM: the program of `scripts/audit`.

`[tool.dashinfer-audit]` in pyproject.toml lists the allowed licenses, and the packages that are exceptions. A test
compares its licenses of the files in the wheel that are not Python code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
SBOM = ROOT / "artifacts" / "sbom.cdx.json"
SECONDS = 600

SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",  # the classifier does not state the number of clauses
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""Names in classifiers and in the field `License` that are not SPDX identifiers."""

NOT_A_LICENSE = {"OSI Approved", "DFSG approved"}


class Result(NamedTuple):
    """The result of a check.

    Attributes:
        summary: what was checked.
        problems: what was found.
        not_run: why the check is incomplete.
    """

    summary: str
    problems: list[str]
    not_run: list[str]


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["dashinfer-audit"]


def requirements(python: str) -> list[Requirement]:
    """Return the constraints that apply to a Python version, such as `3.10`."""
    lines = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    parsed = map(Requirement, lines)
    return [item for item in parsed if item.marker is None or item.marker.evaluate({"python_version": python})]


def check_vulnerabilities(tools: Path) -> Result:
    """Run pip-audit over all versions in constraints.txt, those of the oldest Python in a second run."""
    newest = {f"{item.name}{item.specifier}" for item in requirements("3.13")}
    oldest = {f"{item.name}{item.specifier}" for item in requirements("3.10")} - newest
    results = [read_report(run_pip_audit(tools, sorted(pins))) for pins in (newest, oldest)]
    count = len(newest) + len(oldest)
    skipped = [reason for result in results for reason in result.not_run]
    if len(skipped) == count:
        skipped = [f"the service has no data about any of the {count} versions ({skipped[0]})"]
    return Result(f"vulnerabilities of {count} versions", [line for each in results for line in each.problems], skipped)


def run_pip_audit(tools: Path, pins: Iterable[str]) -> str:
    """Return the JSON report of pip-audit, or its last line of output if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "requirements.txt")
        file.write_text("\n".join(pins) + "\n", encoding="utf-8")
        options = ["--disable-pip", "--no-deps", "--progress-spinner", "off", "--format", "json"]
        command = [str(tools / "pip-audit"), *options, "--requirement", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.stdout or (done.stderr.strip().splitlines() or ["no output"])[-1]


def read_report(report: str) -> Result:
    """Read a report of pip-audit.

    pip-audit reports "No known vulnerabilities found" and exits with 0 even if it skipped every package.
    """
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return Result("", [], [f"pip-audit failed: {report[:300]}"])
    found = [
        f"{package['name']} {package['version']}: {item['id']}, fixed in: {', '.join(item['fix_versions']) or 'none'}"
        for package in packages
        for item in package.get("vulns", ())
    ]
    return Result("", found, [package["skip_reason"] for package in packages if "skip_reason" in package])


def write_sbom(tools: Path, python: str) -> Result:
    """Write the SBOM of an environment."""
    SBOM.parent.mkdir(exist_ok=True)
    command = [str(tools / "cyclonedx-py"), "environment", "--pyproject", str(ROOT / "pyproject.toml")]
    command += ["--output-reproducible", "--output-format", "JSON", "--output-file", str(SBOM), python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Result("SBOM", [], [f"cyclonedx-py failed: {last}"])
    content = json.loads(SBOM.read_text(encoding="utf-8"))
    content["metadata"]["component"]["version"] = version("dashinfer-vlm-adapters")  # dynamic, not in pyproject.toml
    SBOM.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    count = len(content["components"])
    return Result(f"SBOM of {count} packages in {SBOM.relative_to(ROOT)}", [], [])


def check_licenses(installed: Iterable[Distribution], expected: Iterable[str], rules: dict[str, Any]) -> Result:
    """Compare the licenses of installed packages with `rules`.

    Args:
        installed: the packages.
        expected: names of the packages to check, which have to be among them.
        rules: `[tool.dashinfer-audit]`.
    """
    names_to_check = set(expected)
    all_by_name = {str(canonicalize_name(package.name)): package for package in installed}
    by_name = {name: package for name, package in all_by_name.items() if name in names_to_check}
    allowed, exceptions = set(rules["allowed-licenses"]), rules["exceptions"]
    problems = []
    for name, package in sorted(by_name.items()):
        names = set(licenses(package))
        if name in exceptions:
            if names and names <= allowed:
                problems.append(f"{name}: its license is allowed, so that it is no exception any more")
        elif not names:
            problems.append(f"{name}: its metadata states no license")
        elif names - allowed:
            problems.append(f"{name}: {', '.join(sorted(names - allowed))} is not in allowed-licenses")
    missing = [f"{name} is not installed here" for name in sorted(names_to_check - set(by_name))]
    return Result(f"licenses of {len(by_name)} packages", problems, missing)


def licenses(package: Distribution) -> Iterator[str]:
    """Yield the SPDX identifiers of a package. All of them have to be allowed, also alternatives ("A OR B")."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        yield from _identifiers(expression)
        return
    classifiers = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    names = {line.rpartition(" :: ")[2] for line in classifiers} - NOT_A_LICENSE
    if names:
        yield from (SPDX.get(name, name) for name in names)
    elif text := (metadata.get("License") or "").strip():
        first = text.splitlines()[0]
        yield from [SPDX[first]] if first in SPDX else _identifiers(first)


def _identifiers(expression: str) -> list[str]:
    without_exceptions = re.sub(r"\bWITH \S+", "", expression)  # an exception only grants more
    return [word for word in re.split(r"[\s()]+", without_exceptions) if word not in {"", "AND", "OR"}]


def expected_packages() -> list[str]:
    """Return the names of the constraints that apply to this Python."""
    names = (item.name for item in requirements(f"{sys.version_info[0]}.{sys.version_info[1]}"))
    return [str(canonicalize_name(name)) for name in names]


def main() -> int:
    tools, python = Path(sys.argv[1]), sys.argv[2]
    expected = expected_packages()
    results = [
        check_vulnerabilities(tools),
        check_licenses(distributions(), expected, settings()),
        write_sbom(tools, python),
    ]
    for result in results:
        state = "PROBLEMS" if result.problems else "NOT RUN" if result.not_run else "ok"
        print(f"{state}: {result.summary}")
        for line in result.problems:
            print(f"  {line}")
        for line in result.not_run:
            print(f"  not run: {line}")
    return int(any(result.problems or result.not_run for result in results))


if __name__ == "__main__":
    sys.exit(main())
