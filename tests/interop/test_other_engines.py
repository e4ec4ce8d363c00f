"""The programs have the pinned versions."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.environments import VLLM
from tests.interop.interpreters import PEFT, RAY, peft, ray

pytestmark = pytest.mark.interop


def pinned(pins):
    return dict(pin.split("==") for pin in pins)


def test_vllm_has_pinned_versions(vllm):
    expected = pinned(VLLM)
    installed = vllm.run("versions.py", {"imports": ["vllm"], "packages": list(expected)})
    assert {name: number.partition("+")[0] for name, number in installed.items()} == expected


def test_peft_has_pinned_versions():
    module = pytest.importorskip("peft")
    assert Path(module.__file__).is_relative_to(peft())
    assert {name: version(name) for name in pinned(PEFT)} == pinned(PEFT)


def test_ray_has_pinned_version():
    installed = ray().run("versions.py", {"imports": ["ray.serve"], "packages": ["ray"]})
    assert f"ray[serve]=={installed['ray']}" in RAY
