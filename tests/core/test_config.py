from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.options import engine_options
from dashinfer_vlm_core.config import EngineConfig, Limits, MediaLimits
from dashinfer_vlm_core.config.folders import write_error
from dashinfer_vlm_core.errors import ConfigError
from tests.cases import cases

OPTIONS = EngineConfig.model_fields.keys() - {"isolate_clients", "limits"}


@click.command(cls=EngineCommand)
def show(config: EngineConfig) -> None:
    """Show it."""
    click.echo(repr(config))


def test_demo_model_is_default():
    assert EngineConfig().model == EngineConfig().name == "demo"


def test_equal_configurations_hash_equal():
    assert {EngineConfig(max_batch_size=4): "engine"}[EngineConfig(max_batch_size=4)] == "engine"
    assert EngineConfig(max_batch_size=4) != EngineConfig(max_batch_size=5)


def test_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().model = "other"


def test_arguments_override_environment():
    os.environ["DASHINFER_VLM_MAX_BATCH_SIZE"] = "7"
    os.environ["DASHINFER_VLM_MAX_PIXELS"] = "100352"
    config = EngineConfig(max_batch_size=3)
    assert (config.max_batch_size, config.max_pixels) == (3, 100352)


@cases(
    ("name", "text", "value"),
    [
        ("allowed_media_domains", "Example.org, cdn.example.org.,", ("example.org", "cdn.example.org")),
        ("rgba_background", "0,128,255", (0, 128, 255)),
        ("allow_remote_media", "no", False),
        ("chat_template", "a/b.jinja", Path("a/b.jinja")),
        ("video_fps", "0.5", 0.5),
        ("limit_mm_per_prompt", "image=2", MediaLimits(image=2, video=4)),
        ("limit_mm_per_prompt", '{"image": 0, "video": 1}', MediaLimits(image=0, video=1)),
    ],
)
def test_environment_and_command_line_parse_text_alike(name, text, value):
    os.environ[f"DASHINFER_VLM_{name.upper()}"] = text
    assert getattr(EngineConfig(), name) == value
    del os.environ[f"DASHINFER_VLM_{name.upper()}"]
    option = f"--{name.replace('_', '-')}"
    arguments = ["--no-allow-remote-media"] if value is False else [option, text]
    result = CliRunner().invoke(show, arguments, catch_exceptions=False)
    assert f"{name}={value!r}" in result.output


@cases(
    ("options", "named"),
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"dtype": "int8"}, "dtype"),
        ({"rgba_background": "1,2"}, "rgba_background"),
        ({"rgba_background": (0, 0, 256)}, "rgba_background"),
        ({"video_fps": float("nan")}, "video_fps"),
        ({"image_fetch_timeout": -1}, "image_fetch_timeout"),
        ({"max_pixels": "many"}, "max_pixels"),
        ({"limit_mm_per_prompt": "image"}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": "{image: 2}"}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": {"audio": 1}}, "limit_mm_per_prompt"),
        ({"limits": {"max_decoded_pixels": 89_478_486}}, "limits"),  # Pillow warns above
    ],
)
def test_invalid_option_is_named_with_next_step(options, named):
    with pytest.raises(ConfigError, match=rf"Invalid option {named}(\.\w+)?: .*--help") as caught:
        EngineConfig(**options)
    assert not re.search("pydantic|Input should|Field required", caught.value.message)


def test_invalid_environment_variable_is_named():
    os.environ["DASHINFER_VLM_PREFILL_CHUNK"] = "0"
    with pytest.raises(ConfigError, match=r"prefill_chunk \(from DASHINFER_VLM_PREFILL_CHUNK\): must be at least 1"):
        EngineConfig()


def test_environment_does_not_set_fields_that_are_no_options():
    os.environ["DASHINFER_VLM_ISOLATE_CLIENTS"] = "1"
    os.environ["DASHINFER_VLM_LIMITS"] = '{"max_loras": 1}'
    assert EngineConfig() == EngineConfig(isolate_clients=False, limits=Limits())


def test_vllm_timeout_variables_are_fallbacks():
    os.environ["VLLM_IMAGE_FETCH_TIMEOUT"], os.environ["VLLM_VIDEO_FETCH_TIMEOUT"] = "7", "70"
    os.environ["DASHINFER_VLM_VIDEO_FETCH_TIMEOUT"] = "80"
    config = EngineConfig()
    assert (config.image_fetch_timeout, config.video_fetch_timeout) == (7, 80)
    assert EngineConfig(image_fetch_timeout=9).image_fetch_timeout == 9


def test_invalid_vllm_timeout_variable_is_named():
    os.environ["VLLM_IMAGE_FETCH_TIMEOUT"] = "soon"
    with pytest.raises(ConfigError, match=r"image_fetch_timeout \(from VLLM_IMAGE_FETCH_TIMEOUT\): must be a number"):
        EngineConfig()


def test_every_field_is_option_with_description():
    text = re.sub(r"\s+", " ", CliRunner().invoke(show, ["--help"]).output)
    assert {*OPTIONS, "speculative_method"} <= {option.name for option in engine_options()}
    assert not {option.name for option in engine_options()} & {"isolate_clients", "limits"}
    for option in engine_options():
        assert option.opts[0] in text
        assert option.help.split("  [default: ")[0] in text
    assert "DASHINFER_VLM_MAX_PIXELS" in text


def test_only_config_reads_environment():
    root = Path(__file__).parents[2]
    folders = ("dashinfer_vlm_core", "adapters", "plugins")
    readers = {
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if re.search(r"\benviron\b|getenv|environb", path.read_text(encoding="utf-8")) and "demo" not in path.parts[-2]
    }
    # Processes for DashInfer (environment.py) and the fork server get a few variables; the worker sets defaults for
    # DashInfer, whose installation asks where pyenv is; discovery.py reads which plugins may be imported, before there
    # are options; build.py reads CC, openmp.py the variables of OpenMP, terminal.py NO_COLOR, and modelscope.py the
    # address of that hub, which its client reads too.
    assert readers == {
        "dashinfer_vlm_core/cli/terminal.py",
        "dashinfer_vlm_core/config/engine_config.py",
        "dashinfer_vlm_core/config/options.py",
        "dashinfer_vlm_core/kernels/openmp.py",
        "dashinfer_vlm_core/media_workers/fork_server.py",
        "dashinfer_vlm_core/models/modelscope.py",
        "dashinfer_vlm_core/plugins/discovery.py",
        "plugins/dashinfer_vlm_cpu/build.py",
        "plugins/dashinfer_vlm_dashinfer/environment.py",
        "plugins/dashinfer_vlm_dashinfer/install.py",
        "plugins/dashinfer_vlm_dashinfer/worker.py",
    }


def test_importing_public_names_does_not_import_torch():
    """A plugin that imports `hookimpl`, and `dashinfer-vlm --help`, must not wait for torch or transformers."""
    code = "import sys, dashinfer_vlm_core.cli.main, dashinfer_vlm_core as c; "
    code += "c.hookimpl; c.EngineConfig; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "openai", "fastapi"} & set(modules)


def test_unknown_home_folder_is_reported():
    with pytest.raises(ConfigError, match=r"~nobody-at-all/x is in a home folder that is unknown\. Set DASHINFER_VLM_"):
        _ = EngineConfig(cache_dir=Path("~nobody-at-all/x")).cache_folder


def test_full_disk_is_recognized(tmp_path):
    """A file size limit simulates it: files can be created, but not written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert write_error(tmp_path) == ""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert write_error(tmp_path) == "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
