"""`models --fits`, `show`, `ps` and `rm`."""

from __future__ import annotations

import json
import re

import pytest

from dashinfer_vlm_cli.fit import FitEstimator
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError, ConfigError, EngineClosed
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.kernels.tuned import TunedKernels, store_tuned
from dashinfer_vlm_core.models import memory
from dashinfer_vlm_core.models.published import MODELS, hub_id
from dashinfer_vlm_core.plugins import load_plugins
from tests.kernels import needs_native
from tests.pooling.checkpoints import write_embedding
from tests.web import body, serve

GB = 10**9
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Give this machine an amount of memory and a measured bandwidth: `machine(15.6, bandwidth=50)`, in 1e9 bytes."""
    monkeypatch.setenv("DASHINFER_VLM_CACHE_DIR", str(tmp_path))

    def machine(size, *, bandwidth=None):
        from dashinfer_vlm_core.models import placement

        monkeypatch.setattr(memory, "memory_limit", lambda: int(size * GB))
        monkeypatch.setattr(placement, "memory_limit", lambda: int(size * GB))
        config = EngineConfig()
        conditions = KernelSelector(load_plugins().kernels.values(), config).conditions()
        if bandwidth is not None:
            tuned = TunedKernels(conditions=conditions, chosen="none", seconds={}, bandwidth=bandwidth * 1e9, rates={})
            store_tuned(config, tuned)

    return machine


def rows(run, *arguments):
    return {row["name"]: row for row in json.loads(run("models", "--fits", "--json", *arguments).stdout)}


@needs_native
def test_fits_has_sizes_speeds_and_verdicts(run, machine):
    machine(15.6, bandwidth=50)
    lines = run("models", "--fits").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "DOWNLOAD", "16", "BITS", "INT4", "TOKENS/S", "WITH", "INT4", "FITS"]
    assert len([line for line in lines if line.startswith("Qwen/")]) == len(MODELS)
    cells = {line.split()[0]: re.split(r"  +", line) for line in lines if line.startswith("Qwen/")}
    name, download, needs, with_int4, rate, faster, verdict = cells["Qwen/Qwen3-VL-4B-Instruct"]
    assert (name, download, needs, verdict) == ("Qwen/Qwen3-VL-4B-Instruct", "8.9 GB", "11.9 GB", "yes")
    assert float(rate) == pytest.approx(8.3, abs=0.2)
    assert float(with_int4.split()[0]) < float(needs.split()[0])
    assert float(faster) > 1.5 * float(rate)
    assert cells["Qwen/Qwen3-VL-8B-Instruct"][-1] == "with int4"
    assert cells["Qwen/Qwen3-VL-32B-Instruct"][-1] == "no"


@needs_native
def test_sentence_states_needs_and_speed(machine):
    machine(15.6, bandwidth=50)
    fit = FitEstimator(EngineConfig(device="cpu"), load_plugins()).fit("4B", MODELS["Qwen3-VL-4B"])
    assert re.fullmatch(
        r"needs 11\.9 GB of 15\.6 GB; about 8\.3 tokens per second with 16 bits, 1\d with int4", fit.describe()
    )
    assert fit.advice() == ""
    small = FitEstimator(EngineConfig(device="cpu"), load_plugins())
    assert "with `--quantization int4` only" in small.fit("8B", MODELS["Qwen3-VL-8B"]).advice()
    assert small.fit("32B", MODELS["Qwen3-VL-32B"]).advice().startswith("It does not fit")


def test_unmeasured_memory_leaves_speed_out(run, machine):
    machine(15.6)
    output = run("models", "--fits").stdout
    assert "Tokens/s are not known: `dashinfer-vlm tune demo` measures" in output
    assert {each["tokens_per_second"] for row in rows(run).values() for each in row["variants"].values()} == {None}


def test_show_describes_registered_model(run, machine, tiny_checkpoint):
    machine(8, bandwidth=40)
    output = run("show", "demo").stdout
    for pattern in (r"^source +registered$", r"^context +4096$", r"^dtype +bfloat16$", r"^weights +4\.3 million$",
                    r"^16 bits +7\.\d MB .* of 8\.0 GB +[\d,]+$"):  # fmt: skip
        assert re.search(pattern, output, re.MULTILINE), pattern
    found = json.loads(run("show", str(tiny_checkpoint), "--json").stdout)
    assert (found["source"], found["dtype"], found["memory_bytes"]) == ("folder", "float32", 8 * GB)
    assert list(found["variants"]) == ["32 bits"]
    assert found["weights"] == pytest.approx(found["size_bytes"] / 4, rel=0.2)
    assert found["capabilities"] == ["images", "videos", "tools"]
    other = json.loads(run("show", hub_id("Qwen3.5-2B"), "--json").stdout)
    assert list(other) == list(found)
    assert (found["download_bytes"], other["folder"], other["context"]) == (None, None, None)


def test_show_leaves_out_the_output_layer_of_an_embedding_model(run, machine, tiny_checkpoint, tmp_path, monkeypatch):
    machine(8)
    monkeypatch.setenv("DASHINFER_VLM_SPECULATIVE_METHOD", "invalid")  # of an engine, which `show` does not start
    folders = [tiny_checkpoint, write_embedding(tiny_checkpoint, tmp_path / "embedding")]
    found = [json.loads(run("show", str(folder), "--json").stdout) for folder in folders]
    generating, embedding = (each["variants"]["32 bits"]["weights"] for each in found)
    text = load_plugins().load_spec(tiny_checkpoint).text
    assert generating - embedding == 4 * text.vocab_size * text.hidden_size


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-30B-A3B", "Qwen3.5-2B"])
def test_memory_of_show_adds_up(run, machine, name):
    machine(25.3)
    lines = re.findall(r"^(?:16 bits|int4) +(.+) of", run("show", hub_id(name)).stdout, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        *parts, total = map(float, re.findall(r"([\d.]+) GB", line))
        assert sum(parts) == pytest.approx(total, abs=0.01), line


def test_show_knows_published_models_and_explains_others(run, machine):
    machine(8)
    assert "not downloaded" in run("show", hub_id("Qwen3.5-2B")).stdout
    with pytest.raises(CheckpointError, match=r"'maker/none' on this machine.*`dashinfer-vlm pull OWNER/NAME`"):
        run("show", "maker/none")


def test_ps_lists_models_of_server(run, server_url):
    url = server_url("A red circle.")
    output = run("ps", "--api-base", url).stdout
    assert output.splitlines() == ["MODEL  STATE  OF", "tiny   ready"]
    assert json.loads(run("ps", "--api-base", url, "--json").stdout) == [{"model": "tiny", "state": "ready", "of": ""}]


def test_ps_shows_states_aliases_and_adapters(run):
    models = [
        {"id": "chat", "root": "chat", "parent": None, "state": "unloaded"},
        {"id": "gpt-4o", "root": "chat", "parent": None, "state": "unloaded"},
        {"id": "sql\x1b[2J", "root": "sql", "parent": "chat", "state": "ready"},
    ]
    shared = {"object": "model", "created": 0, "owned_by": "maker"}
    listed = json.dumps({"object": "list", "data": [model | shared for model in models]}).encode()
    with serve({"/v1/models": body(listed, "Content-Type: application/json")}) as web:
        lines = run("ps", "--api-base", web.url("/v1")).stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["MODEL", "STATE", "OF"],
        ["chat", "unloaded"],
        ["gpt-4o", "unloaded", "chat"],
        ["sql[2J", "ready", "chat"],
    ]


def test_ps_explains_server_that_does_not_run(run):
    with pytest.raises(EngineClosed, match=r"http://127\.0\.0\.1:9/v1: The server cannot be reached"):
        run("ps", "--api-base", "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match=r"`api_base` must be an http or https URL"):
        run("ps", "--api-base", "here")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of Hugging Face with `maker/tiny`, of which one file is complete."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    blobs = tmp_path / "hub" / "models--maker--tiny" / "blobs"
    snapshot = blobs.parent / "snapshots" / COMMIT
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    (blobs / "complete").write_bytes(b"x" * 1000)
    (blobs / "half.incomplete").write_bytes(b"x" * 500)
    (snapshot / "model.safetensors").symlink_to(blobs / "complete")
    return blobs.parent


def test_rm_deletes_complete_and_partial_files(run, cache):
    assert run("rm", "maker/tiny").stdout == "Deleted maker/tiny, 0.0 MB.\n"
    assert list(cache.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("demo", "belongs to a plugin"),
        ("maker/other", "is not in .*`dashinfer-vlm list`"),
        ("../../maker", "is not in"),
        ("", "is not in"),
        (".", "is a folder.*delete it yourself"),
    ],
)
def test_rm_of_anything_else_deletes_nothing(run, cache, name, problem):
    with pytest.raises(CheckpointError, match=problem):
        run("rm", "maker/tiny", name)
    assert (cache / "blobs" / "complete").is_file()


def test_rm_does_not_follow_links(run, cache, tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    cache.parent.joinpath("models--maker--link").symlink_to(target)
    with pytest.raises(CheckpointError, match="is not in"):
        run("rm", "maker/link")
    assert target.is_dir()
