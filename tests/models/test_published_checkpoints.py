"""Checkpoints with the names, shapes and shards of the published ones are loaded."""

from __future__ import annotations

import json

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from tests.conversations import CONVERSATIONS, as_openai
from tests.waiting import HANG

from .published import LAYOUTS, publish, write_small

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Write the small models on first use."""
    folders = {}

    def small(layout):
        key = (layout.family, layout.tied)
        if key not in folders:
            folders[key] = write_small(layout.family, tmp_path_factory.mktemp(layout.family), tied=layout.tied)
        return folders[key]

    return small


@pytest.fixture(scope="module")
def expected(small):
    """Generate with the small models on first use; other tests compare them with transformers."""
    completions = {}

    def expected(layout):
        folder = small(layout)
        if folder not in completions:
            completions[folder] = token_ids(folder)
        return completions[folder]

    return expected


def token_ids(folder):
    messages = as_openai(CONVERSATIONS["one picture"])
    options = {"device": "cpu", "dtype": "float32", "kv_cache_mib": 16, "media_workers": 0}
    with Engine(EngineConfig(model=str(folder), decoder="torch", **options)) as engine:
        request = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        return list(engine.submit(request).result(timeout=HANG).token_ids[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_names_and_shards_are_loaded(tmp_path, small, expected, name):
    layout = LAYOUTS[name]
    folder = publish(small(layout), layout, tmp_path / "published")
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) == layout.shards
    if layout.shards > 1:
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert sorted(set(weight_map.values())) == files
        assert ("lm_head.weight" in weight_map) is not layout.tied
    assert token_ids(folder) == expected(layout)
