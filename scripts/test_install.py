"""Install into a new environment with the commands of README.md, and test the result.

For each VERSION, such as 3.12 or the path of an interpreter, the script creates an environment in a temporary folder
and runs the `pip install` lines of README.md, `dashinfer-vlm serve`, README's program for the openai client, one test
module of each adapter, and README's command for uv, if that is installed. It prints one line per version, and exits
with 1 unless all of them passed. With `--wheel`, it installs that wheel instead of the checkout, and also checks that
it contains the kernels.

The CPU build of torch is installed if its index can be reached. Otherwise pip installs the default build, with several
GB of CUDA libraries on Linux. Environments are deleted afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
READY = re.compile(r"^Serving \S+ \(decoder \S+\) at (\S+)/v1", re.MULTILINE)
READY_TIMEOUT = 300.0
STEP_TIMEOUT = 3600.0
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = "[all]"
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "langchain-tests")
"""Packages for the tests below. langchain-tests provides the pytest plugins that pyproject.toml configures."""
MODULES = {
    "server": "tests/server/test_chat.py",
    "litellm": "tests/litellm/test_completion.py",
    "langchain": "tests/langchain/test_chat.py",
    "cli": "tests/cli/test_chat.py",
}
VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"


class StepFailed(Exception):
    """A step failed; the message names it."""


class NotRun(Exception):
    """The version cannot be tested here; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="such as 3.12, or the path of an interpreter")
    parser.add_argument("--wheel", type=Path, help="install this wheel of scripts/build-wheel")
    options = parser.parse_args()
    package = str(options.wheel.absolute()) if options.wheel else "."
    outcomes = {version: _outcome(version, package) for version in options.versions}
    print()
    for version, (_, line) in outcomes.items():
        print(f"Python {version}: {line}")
    return 0 if all(passed for passed, _ in outcomes.values()) else 1


def _outcome(version: str, package: str) -> tuple[bool, str]:
    """Return whether all steps passed, and the summary line."""
    try:
        return True, f"passed ({_try(version, package)})"
    except NotRun as reason:
        return False, f"not run: {reason}"
    except StepFailed as failure:
        return False, f"FAILED: {failure}"


def _try(version: str, package: str) -> str:
    """Run all steps in a new environment, and return a summary.

    Raises:
        NotRun: the interpreter does not exist.
        StepFailed: a step failed; its output was printed.
    """
    interpreter = _interpreter(version)
    with tempfile.TemporaryDirectory(prefix="dashinfer-vlm-install-") as scratch:
        folder = Path(scratch)
        binaries = folder / "venv" / "bin"
        environment = _environment(binaries, folder)
        _step("venv", [str(interpreter), "-m", "venv", str(folder / "venv")], os.environ)
        begin = time.monotonic()
        for line in _pip_lines(package):
            _step("README's pip line", [str(binaries / "python"), "-m", *line], environment)
        seconds = time.monotonic() - begin
        versions = _step("import torch", [str(binaries / "python"), "-c", VERSIONS], environment).split()
        kernels = _kernels(binaries, environment) if package != "." else ""
        with _server(binaries, environment) as address:
            program = _block("python", "from openai import OpenAI").replace("http://127.0.0.1:8000", address)
            response = _step("README's openai program", [str(binaries / "python"), "-c", program], environment).strip()
        counts = _tests(binaries, environment, package)
        uv = _uv_answer(interpreter, environment, package)
    summary = f"{versions[0]}, torch {versions[1]}, installed in {seconds:.0f} s, openai client: {response!r}"
    return "; ".join(filter(None, [summary, kernels, *counts, uv]))


def _kernels(binaries: Path, environment: dict[str, str]) -> str:
    """Return what `doctor` reports about the kernels.

    Raises:
        StepFailed: the wheel does not contain those of this CPU.
    """
    command = [str(binaries / "python"), str(binaries / "dashinfer-vlm"), "doctor", "--json"]
    findings = json.loads(_step("kernels", command, environment))
    (kernels,) = (finding for finding in findings if finding["name"] == "kernels")
    if kernels["status"] != "ok":
        raise StepFailed(f"the kernels are {kernels['status']}: {kernels['detail']}")
    return f"kernels: {kernels['detail']}"


def _tests(binaries: Path, environment: dict[str, str], package: str) -> list[str]:
    """Run one test module of each adapter, and return pytest's counts."""
    pip = [str(binaries / "python"), "-m", "pip", "install", "-c", "constraints.txt"]
    _step("pip install of the adapters' extras and pytest", [*pip, f"{package}{EXTRAS}", *TOOLS], environment)
    outcomes = {adapter: _test(adapter, module, binaries, environment) for adapter, module in MODULES.items()}
    failed = [line for passed, line in outcomes.values() if not passed]
    if failed:
        raise StepFailed("; ".join(failed))
    return [line for _, line in outcomes.values()]


def _test(adapter: str, module: str, binaries: Path, environment: dict[str, str]) -> tuple[bool, str]:
    """Run a test module, and return whether it passed and its summary."""
    command = [str(binaries / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", module]
    try:
        return True, f"{adapter}: {_step(f'tests of {adapter}', command, environment).strip().splitlines()[-1]}"
    except StepFailed as failure:
        return False, str(failure)


def _interpreter(version: str) -> Path:
    """Find the interpreter of a version: a path, a program on PATH, or one of pyenv.

    Raises:
        NotRun: the interpreter does not exist.
    """
    if os.sep in version:
        if not os.access(version, os.X_OK):
            raise NotRun(f"{version} is not an executable file")
        return Path(version).absolute()
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(pyenv.glob(f"{version}*/bin/python"), reverse=True)]
    if on_path := shutil.which(f"python{version}"):
        candidates.append(Path(on_path))
    for candidate in candidates:  # pyenv has shims on PATH for inactive versions too
        probe = [str(candidate), "-c", "import platform; print(platform.python_version())"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.returncode == 0 and f"{done.stdout.strip()}.".startswith(f"{version}."):
            return candidate
    raise NotRun(f"Python {version} was not found. Pass the path of an interpreter")


def _environment(binaries: Path, folder: Path) -> dict[str, str]:
    """Return the variables for the new environment, without the caller's Python and with a separate cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    own = {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip")),
        "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv")),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise, importing it downloads prices
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return inherited | own


def _pip_lines(package: str) -> list[list[str]]:
    """Return README's `pip install` commands whose index can be reached, for another package than the checkout."""
    lines = [shlex.split(line) for line in _block("bash", "pip install").splitlines()]
    return [
        [re.sub(r"^\.(?=\[)", package, word) for word in line]
        for line in lines
        if "--index-url" not in line or _is_reachable(line[line.index("--index-url") + 1])
    ]


def _uv_answer(interpreter: Path, environment: dict[str, str], package: str) -> str:
    """Run README's command for uv, and return what it printed."""
    if not shutil.which("uvx"):
        return "uvx is not installed"
    answer = _step("README's uvx command", _uv_line(interpreter, package), environment)
    return f"uvx: {answer.strip()!r}"


def _uv_line(interpreter: Path, package: str) -> list[str]:
    """Return README's command for uv, for an interpreter and for another package than the checkout."""
    program, *words = shlex.split(_block("bash", "uvx").replace("\\\n", ""))
    backend = words.index("--torch-backend")
    if not _is_reachable(CPU_INDEX):
        del words[backend : backend + 2]
    return [program, "--python", str(interpreter), *(re.sub(r"^\.(?=\[)", lambda _: package, word) for word in words)]


def _is_reachable(url: str) -> bool:
    """Check the index, for which pip would retry up to 100 s."""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=10):  # noqa: S310 - README's own URL
            return True
    except (urllib.error.URLError, OSError):
        print(f"== {url} cannot be reached; pip installs the default build of torch", flush=True)
        return False


def _block(language: str, text: str) -> str:
    """Return README's first code block in a language that contains a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return str(next(block for block in blocks if text in block))


def _step(name: str, command: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> str:
    """Run a command, and return its standard output.

    Raises:
        StepFailed: the command failed; the end of its output was printed.
    """
    print(f"== {name}: {shlex.join(command)[:200].splitlines()[0]}", flush=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=STEP_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise StepFailed(f"{name} took more than {STEP_TIMEOUT:.0f} s") from None
    if done.returncode:
        for output in (done.stdout, done.stderr):
            print("\n".join(output.splitlines()[-30:]), flush=True)
        raise StepFailed(f"{name} (exit code {done.returncode}; see its output above)")
    return done.stdout


@contextlib.contextmanager
def _server(binaries: Path, environment: dict[str, str]) -> Iterator[str]:
    """Start README's server on a free port, and yield its URL.

    Raises:
        StepFailed: the server does not become ready.
    """
    line = re.sub(r"--port \d+", "--port 0", _block("bash", "dashinfer-vlm serve"))
    print(f"== {line.strip()}", flush=True)
    with tempfile.TemporaryFile("w+") as log:
        command = [str(binaries / shlex.split(line)[0]), *shlex.split(line)[1:]]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as server:
            try:
                yield _ready(server, log.fileno())
            finally:
                server.terminate()


def _ready(server: subprocess.Popen[bytes], log: int) -> str:
    end = time.monotonic() + READY_TIMEOUT
    while time.monotonic() < end and server.poll() is None:
        text = os.pread(log, 1 << 20, 0).decode(errors="replace")
        if found := READY.search(text):
            return found[1]
        time.sleep(0.2)
    print("\n".join(os.pread(log, 1 << 20, 0).decode(errors="replace").splitlines()[-30:]), flush=True)
    raise StepFailed("dashinfer-vlm serve did not become ready; see its output above")


if __name__ == "__main__":
    sys.exit(main())
