"""Write docs/support.md from the results of the tests that are marked `supports`.

scripts/test -m supports --junitxml=results.xml
python -m tests.support results.xml
"""

from __future__ import annotations

import argparse
import datetime
import platform
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from dashinfer_vlm_core import __version__

PAGE = Path(__file__).parent.parent / "docs" / "support.md"
PROPERTY = "supports"

FAMILIES = {"qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL", "qwen3_5": "Qwen3.5"}
BACKENDS = {
    "torch-cpu": "PyTorch, CPU",
    "torch-cuda": "PyTorch, CUDA",
    "dashinfer-cpu": "DashInfer, CPU",
    "dashinfer-cuda": "DashInfer, CUDA",
}
FEATURES = {
    "text": "Text",
    "images": "Images",
    "videos": "Videos",
    "documents": "PDFs",
    "embeddings": "Image and video embeddings",
    "batching": "Continuous batching",
    "prefix-cache": "Prefix cache",
    "chunked-prefill": "Chunked prefill",
    "sampling": "Sampling: temperature, top_p, top_k, seed, penalties",
    "sampling-ocr": "Sampling: min_p, no_repeat_ngram_size",
    "logprobs": "Log probabilities",
    "streaming": "Streaming",
    "structured-output": "Structured output",
    "tools": "Tool calls",
    "int8": "8-bit weights (`--quantization int8`)",
    "int4": "4-bit weights (`--quantization int4`)",
    "quantized-checkpoints": "AWQ, GPTQ, compressed-tensors and FP8 checkpoints",
    "int8-kv-cache": "8-bit KV cache (`--kv-cache-dtype int8`)",
    "lora": "LoRA adapters (`--lora`)",
    "cancellation": "Cancellation frees the request's memory",
    "restart": "A decoder that dies is replaced",
}
SUPPORTED, REJECTED, FAILED, SKIPPED = "yes", "rejected", "failed", "not run"

INTRODUCTION = """\
# Supported features

Each cell is the outcome of tests. "{supported}": a test of this feature passed with this family, decoder and device.
"{rejected}": a test shows that the server rejects such a request, with the reason and the next step. "{skipped}": a
test exists, but this machine could not run it. "-", and rows that are left out: there is no test. `tests/support.py`
writes this page from the results of a test run. Qwen3.5 includes 3.6 and 3.8, dense and with experts.
[Fine-tunes](checkpoints.md) have the features of their base.

"""


def mark_property(feature: str, *, backend: str, family: str = "qwen2_vl", rejected: bool = False) -> tuple[str, str]:
    """Return the property that a test's mark adds to its result.

    Raises:
        KeyError: the feature, backend or family has no row or column.
    """
    for name, table in ((feature, FEATURES), (backend, BACKENDS), (family, FAMILIES)):
        if name not in table:
            raise KeyError(f"`supports` names {name!r}, which is not one of {', '.join(table)}")
    return PROPERTY, f"{family} {feature} {backend} {REJECTED if rejected else SUPPORTED}"


def read_outcomes(report: Path) -> dict[tuple[str, ...], str]:
    """Read the outcome of each (family, feature, backend) from a JUnit XML report."""
    return read_properties(report, PROPERTY)


def read_properties(report: Path, name: str) -> dict[tuple[str, ...], str]:
    """Read the outcome of each key from the properties of this name; their last word is that of a passed test."""
    outcomes: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for case in ET.parse(report).iter("testcase"):
        for found in case.iter("property"):
            if found.get("name") == name:
                *key, passed = found.get("value", "").split()
                outcomes[tuple(key)].add(_outcome(case, passed))
    return {key: _worst(found) for key, found in outcomes.items()}


def _outcome(case: ET.Element, passed: str) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return FAILED
    return SKIPPED if case.find("skipped") is not None else passed


def _worst(outcomes: Iterable[str]) -> str:
    """Return a failure if there is one, and `not run` only if no test ran."""
    return next(outcome for outcome in (FAILED, REJECTED, SUPPORTED, SKIPPED) if outcome in outcomes)


def render(outcomes: dict[tuple[str, ...], str], environment: str) -> str:
    """Render the page: a table for each decoder and device, a row for each feature with a result."""
    lines = [INTRODUCTION.format(supported=SUPPORTED, rejected=REJECTED, skipped=SKIPPED), f"{environment}\n"]
    for backend, title in BACKENDS.items():
        rows = {
            label: [outcomes.get((family, feature, backend), "-") for family in FAMILIES]
            for feature, label in FEATURES.items()
        }
        filled = [f"| {label} | {' | '.join(cells)} |\n" for label, cells in rows.items() if set(cells) != {"-"}]
        if filled:
            header = f"| Feature | {' | '.join(FAMILIES.values())} |\n|---{'|---' * len(FAMILIES)}|\n"
            lines += [f"\n## {title}\n\n", header, *filled]
    return "".join(lines)


def describe_environment() -> str:
    """Return one sentence about the machine and the versions of this run."""
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    return (
        f"Last run: {today}, version {__version__}, Python {platform.python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}, on {platform.system()} {platform.machine()}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JUnit XML report of the marked tests")
    outcomes = read_outcomes(parser.parse_args().report)
    if failed := sorted(key for key, outcome in outcomes.items() if outcome == FAILED):
        raise SystemExit(f"Fix these first: {failed}")
    PAGE.write_text(render(outcomes, describe_environment()), encoding="utf-8")


if __name__ == "__main__":
    main()
