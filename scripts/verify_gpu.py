"""Verify the vision tower and the PyTorch decoder on a GPU against transformers, and time the model `small`.

Prints a report in Markdown. Exit codes: 0 all checks passed, 1 a check failed, 2 it cannot run. Nothing is downloaded
or installed: it runs from a checkout, in an environment with torch, transformers, numpy, pillow, safetensors,
tokenizers and jinja2. A machine without network access also needs these wheels (5 MB), downloaded elsewhere for its
Python version and unpacked into a folder:

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels -c constraints.txt \\
        openai distro sniffio pluggy pydantic pydantic-core annotated-types typing-inspection pydantic-settings \\
        python-dotenv
    for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" site; done
    PYTHONPATH=site python3 scripts/verify_gpu.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run() -> int:
    """Run the checks, and return the exit code."""
    sys.path[:0] = [str(ROOT), str(ROOT / "plugins")]
    try:
        from benchmarks.verification.command import main
    except ModuleNotFoundError as error:
        print(f"The module {error.name!r} is missing in {sys.executable}.\n\n{__doc__}", file=sys.stderr)
        return 2
    return main(help_text=__doc__)


if __name__ == "__main__":
    sys.exit(run())
