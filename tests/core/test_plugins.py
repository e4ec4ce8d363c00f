from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from dashinfer_vlm_core import Engine, hookimpl
from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.main import cli
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError, MissingDependency, PluginError
from dashinfer_vlm_core.plugins import Registry, discovery, load_adapter, load_plugins
from dashinfer_vlm_core.protocol import MediaPart
from tests.decoding_loader import DecodingLoader
from tests.pages import page_text
from tests.samples import data_url, encode

EXAMPLE = Path(__file__).parents[2] / "examples" / "write_a_plugin"

GOOD = """
from pathlib import Path
from dashinfer_vlm_core import hookimpl

@hookimpl
def register_models(register):
    register("stranger", Path("/models/stranger"))
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution of one module during a test: files on the path, laid out as by pip."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, code, *, group="dashinfer_vlm", entry=None, extra=""):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry or name} = {name}{extra}\n")
        (tmp_path / f"{name}.py").write_text(code)

    yield install
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def row(name):
    return next(row for row in load_plugins().rows if row.name == name)


def test_built_in_components_use_the_plugin_interface():
    registry = load_plugins(strict=True)
    assert registry.models["demo"].name == "checkpoint"
    assert {"qwen2_vl", "qwen2_5_vl"} <= set(registry.families)
    assert "torch" in registry.decoders
    assert set(registry.video_readers) == {"pyav", "decord"}
    assert {row.status for row in registry.rows} == {"ok"}


def test_third_party_plugin_is_found(install):
    install("stranger_plugin", GOOD)
    assert load_plugins().models["stranger"] == Path("/models/stranger")
    assert row("stranger_plugin").provides == ("model stranger",)
    assert row("stranger_plugin").distribution == "stranger_plugin 1.0"


@pytest.mark.parametrize(
    ("allowed", "loaded"), [(None, True), ("", False), ("other", False), ("other, stranger_plugin", True)]
)
def test_variable_selects_plugins_of_other_distributions(install, monkeypatch, caplog, allowed, loaded):
    install("stranger_plugin", GOOD)
    if allowed is not None:
        monkeypatch.setenv("DASHINFER_VLM_PLUGINS", allowed)
    registry = load_plugins()
    assert ("stranger" in registry.models) is ("stranger_plugin" in sys.modules) is loaded
    assert row("stranger_plugin").status == ("ok" if loaded else "disabled")
    assert "torch" in registry.decoders
    assert ("'other', but no plugin with this name is installed" in caplog.text) is ("other" in (allowed or ""))


def test_entry_points_are_read_again_only_after_a_change(install, tmp_path):
    load_plugins()
    before = discovery._read_entries.cache_info().misses
    load_plugins()
    assert discovery._read_entries.cache_info().misses == before
    install("stranger_plugin", GOOD)
    os.utime(tmp_path, ns=(0, 1))  # the clock of a file system may not have advanced since the folder was created
    assert "stranger" in load_plugins().models


def test_incompatible_plugin_is_rejected_by_name_once(install, caplog):
    install("stranger_plugin", GOOD + "dashinfer_vlm_api = 0\n")
    assert "stranger" not in load_plugins().models
    assert row("stranger_plugin").status == "broken"
    assert (
        "'stranger_plugin' was written for version 0 of the plugin API, but this is" in row("stranger_plugin").problem
    )
    assert caplog.text.count("was written for version 0") == 1


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import no_such_module_here", "no_such_module_here.*pip install 'broken_plugin'"),
        (
            "\n1 / 0",
            r"failed during import: division by zero \(ZeroDivisionError in .*/broken_plugin.py, line 2\)\. Correct",
        ),
        (
            "def broken(:",
            r"failed during import: .*\(broken_plugin.py, line 1\)\. .* set DASHINFER_VLM_PLUGINS to the names",
        ),
        (GOOD.replace("register_models", "register_modles"), "register_modles"),
        (GOOD.replace("(register)", "(register, more)"), "more"),
        (
            GOOD.replace('register("stranger"', 'register(1 / 0, "stranger"'),
            r"registration: .*_plugin.py, line 7\). Correct",
        ),
        (GOOD.replace('"stranger"', '"demo"'), "'broken_plugin' failed.*model 'demo' is already registered"),
    ],
    ids=["missing module", "raises", "syntax", "misspelt hook", "wrong argument", "fails in hook", "name taken"],
)
def test_broken_plugin_is_reported_and_isolated(install, code, problem):
    install("broken_plugin", code)
    install("stranger_plugin", GOOD)
    registry = load_plugins()
    broken = next(row for row in registry.rows if row.name == "broken_plugin")
    assert broken.status == "broken"
    assert re.search(problem, broken.problem, re.DOTALL), broken.problem
    assert {"torch"} <= set(registry.decoders)
    assert "stranger" in registry.models
    with pytest.raises((PluginError, MissingDependency)):
        load_plugins(strict=True)


def test_missing_extra_names_install_command(install):
    install("needs_extra", "import no_such_module_here", extra=" [cloud]")
    assert "pip install 'needs_extra[cloud]'" in row("needs_extra").problem


def test_second_plugin_of_same_name_is_duplicate(install):
    install("stranger_plugin", GOOD, entry="same")
    install("stranger_two", GOOD.replace('"stranger"', '"second"'), entry="same")
    statuses = sorted(row.status for row in load_plugins().rows if row.name == "same")
    assert statuses == ["duplicate", "ok"]


def test_failed_plugin_is_unregistered_completely():
    class Half:
        @hookimpl
        def register_models(self, register):
            register("half", Path())

        @hookimpl
        def register_decoders(self, register):
            raise RuntimeError("no")

    registry = Registry()
    with pytest.raises(PluginError, match="'half-plugin' failed during registration: no"):
        registry.add_plugin(Half(), name="half-plugin")
    assert registry.names() == ()


def test_unknown_name_lists_known_names():
    registry = load_plugins()
    with pytest.raises(PluginError, match=r"No decoder is named 'dash'; available: .*torch"):
        registry.decoder("dash")
    with pytest.raises(PluginError, match=r"No adapter is named 'grpc'; available: .*server"):
        load_adapter("grpc")


def test_adapters_are_loaded_by_name():
    assert load_adapter("server").__name__ == "create_app"


def test_adapter_without_extra_names_install_command(install):
    install("grpc_server", "import no_such_module_here", group="dashinfer_vlm.adapters", extra=":server [grpc]")
    with pytest.raises(MissingDependency, match=r"pip install 'grpc_server\[grpc\]'"):
        load_adapter("grpc_server")


def test_plugin_list_names_broken_plugins(install):
    install("broken_plugin", "import no_such_module_here")
    result = CliRunner().invoke(cli, ["plugins"])
    assert result.exit_code == 0
    blocks = {block.split(" ")[0]: block for block in result.output.split("\n\n")}
    assert "\n  decoder torch, " in blocks["torch"]
    assert ", broken:\n  'broken_plugin' (broken_plugin) cannot be imported" in blocks.pop("broken_plugin")
    assert max(len(line) for block in blocks.values() for line in block.splitlines()) <= 80
    assert CliRunner().invoke(cli, ["plugins", "--strict"]).exit_code == 1


def test_plugin_list_as_json(install):
    install("stranger_plugin", GOOD)
    rows = json.loads(CliRunner().invoke(cli, ["plugins", "--json"]).output)
    assert next(row for row in rows if row["name"] == "stranger_plugin") == {
        "name": "stranger_plugin",
        "value": "stranger_plugin",
        "distribution": "stranger_plugin 1.0",
        "status": "ok",
        "provides": ["model stranger"],
        "problem": "",
    }


OPTIONS = """
from pydantic import Field
from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.config import PluginOptions
from dashinfer_vlm_core.errors import ConfigError

class Slides(PluginOptions):
    title = "Slide shows"
    slide_seconds: float = Field(2.0, gt=0, description="Seconds that a slide is shown.")

    def check(self, decoder):
        if self.slide_seconds > 60:
            raise ConfigError(f"`slide_seconds` is too long for {decoder}.", param="slide_seconds")

@hookimpl
def register_options(register):
    register(Slides)
"""


def run_show_command(*arguments):
    """Return the output of a command created now."""

    @click.command(cls=EngineCommand)
    def show(config: EngineConfig) -> None:
        """Show it."""
        click.echo(json.dumps(load_plugins().resolve_options(config).plugin_options))

    return CliRunner().invoke(show, arguments, catch_exceptions=False)


def test_plugin_options_are_set_like_engine_options(install, monkeypatch, tmp_path):
    install("slides_plugin", OPTIONS)
    slides = importlib.import_module("slides_plugin").Slides
    assert EngineConfig().options_of(slides).slide_seconds == 2
    assert EngineConfig(slide_seconds=3).options_of(slides).slide_seconds == 3
    assert EngineConfig(slide_seconds=3) != EngineConfig() == EngineConfig()
    assert len({EngineConfig(slide_seconds=3), EngineConfig(slide_seconds=3)}) == 1
    resolve = load_plugins().resolve_options
    assert resolve(EngineConfig(slide_seconds="3")) == EngineConfig(slide_seconds=3) != resolve(EngineConfig())
    with pytest.raises(ConfigError, match="slide_seconds: must be above 0") as caught:
        EngineConfig(slide_seconds=0).options_of(slides)
    assert caught.value.param == "slide_seconds"

    monkeypatch.setenv("DASHINFER_VLM_SLIDE_SECONDS", "4")
    assert EngineConfig().options_of(slides).slide_seconds == 4
    resolved = resolve(EngineConfig())
    monkeypatch.setenv("DASHINFER_VLM_SLIDE_SECONDS", "5")
    assert resolved.options_of(slides).slide_seconds == 4
    monkeypatch.setenv("DASHINFER_VLM_SLIDE_SECONDS", "4")
    file = tmp_path / "options.yaml"
    file.write_text("slide_seconds: 5")
    assert '"slide_seconds": 4.0' in run_show_command().output
    assert '"slide_seconds": 5.0' in run_show_command("--config", str(file)).output
    assert '"slide_seconds": 6.0' in run_show_command("--config", str(file), "--slide-seconds", "6").output
    help_text = run_show_command("--help").output
    assert re.search(r"Slide shows:\n  --slide-seconds SECONDS +Seconds that a slide is shown", help_text)
    assert row("slides_plugin").provides == ("option slide_seconds",)


def test_copy_and_dump_include_plugin_options(install):
    install("slides_plugin", OPTIONS)
    slides = importlib.import_module("slides_plugin").Slides
    config = EngineConfig(slide_seconds=3)
    assert EngineConfig(**config.model_dump()) == config
    assert config.model_copy(update={"slide_seconds": 4}).options_of(slides).slide_seconds == 4
    assert config.model_copy() == config


def test_plugin_list_options_are_comma_separated(install, monkeypatch):
    field = 'slide_names: tuple[str, ...] = Field((), description="Names.")'
    install("slides_plugin", OPTIONS.replace("    def check", f"    {field}\n\n    def check"))
    monkeypatch.setenv("DASHINFER_VLM_SLIDE_NAMES", "a, b")
    assert '"slide_names": ["a", "b"]' in run_show_command().output
    assert '"slide_names": ["c"]' in run_show_command("--slide-names", "c").output


def test_engine_rejects_all_invalid_options_before_it_loads(install):
    install("slides_plugin", OPTIONS)
    config = EngineConfig(model="/no/such/folder", slide_seconds=0, max_batch_sise=4)
    with pytest.raises(ConfigError) as caught:
        Engine(config).start()
    assert caught.value.message == (
        "Invalid option slide_seconds: must be above 0 (got 0); max_batch_sise: is not a known option (got 4)."
        " Did you mean 'max_batch_size'? `dashinfer-vlm serve --help` lists every option."
    )


def test_error_names_variable_of_plugin_option(install, monkeypatch):
    install("slides_plugin", OPTIONS)
    monkeypatch.setenv("DASHINFER_VLM_SLIDE_SECONDS", "-1")
    with pytest.raises(ConfigError, match=r"slide_seconds \(from DASHINFER_VLM_SLIDE_SECONDS\): must be above 0"):
        load_plugins().resolve_options(EngineConfig())


@pytest.mark.parametrize(
    ("registered", "problem"),
    [
        ("'slides'", "Options must be a subclass of PluginOptions"),
        ("type('TorchKernels', (), {})", "Options must be a subclass of PluginOptions"),
        ("Slides()", "Options must be a subclass of PluginOptions"),
        ("Needed", "The option 'slide_title' of Needed must have a default"),
        ("Failing", "A default of the options Failing raises an error: "),
    ],
)
def test_invalid_option_definition_disables_only_its_plugin(install, registered, problem):
    code = (
        OPTIONS.replace("register(Slides)", f"register({registered})")
        + "class Needed(PluginOptions):\n    slide_title: str\n"
        + "class Failing(PluginOptions):\n    slide_count: int = Field(default_factory=lambda: 1 // 0)\n"
    )
    install("slides_plugin", code)
    assert EngineConfig().max_batch_size
    assert problem in row("slides_plugin").problem


def test_configuration_and_command_import_no_plugin(install):
    """So a plugin can create them while it is imported."""
    command = "import click\nfrom dashinfer_vlm_core.cli.command import EngineCommand\n"
    command += "@click.command(cls=EngineCommand)\ndef show(config): click.echo(config.slide_seconds)\n"
    config = "from dashinfer_vlm_core import EngineConfig\nDEFAULT = EngineConfig(slide_seconds=3)\n"
    install("slides_plugin", OPTIONS + config + command)
    EngineConfig(slide_seconds=3)
    assert "slides_plugin" not in sys.modules
    assert CliRunner().invoke(importlib.import_module("slides_plugin").show, ["--slide-seconds", "4"]).output == "4\n"


def test_plugin_options_are_checked_against_decoder(install):
    install("slides_plugin", OPTIONS)
    with pytest.raises(ConfigError, match="`slide_seconds` is too long for torch"):
        Engine(EngineConfig(slide_seconds=61)).start()


def test_option_name_conflict_disables_plugin(install):
    install("slides_plugin", OPTIONS.replace("slide_seconds", "max_pixels"))
    assert "The option 'max_pixels' already exists in EngineConfig" in row("slides_plugin").problem
    assert EngineConfig(max_pixels=1000).max_pixels == 1000


@pytest.mark.slow
def test_plugin_adds_commands_and_broken_one_is_ignored(tmp_path, install):
    install(
        "greeter",
        "import click\nfrom dashinfer_vlm_core import hookimpl\n"
        "@hookimpl\ndef register_commands(group):\n    group.command('greet')(lambda: click.echo('hello'))\n",
    )
    install("broken_plugin", "1 / 0")
    code = "import sys; from dashinfer_vlm_core.cli.main import main; sys.argv = ['dashinfer-vlm', 'greet']; main()"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "hello\n"


def test_example_plugin_reads_animated_gif_as_video(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    registry = load_plugins()
    plugin = importlib.import_module("slideshow_plugin")
    assert registry.add_plugin(plugin, name="slideshow") == ("video reader slideshow",)

    frames = [np.full((20, 30, 3), 60 * i, np.uint8) for i in range(4)]
    first, *rest = (Image.fromarray(frame) for frame in frames)
    gif = encode(first, "GIF", save_all=True, append_images=rest, duration=500)
    part = MediaPart(kind="video", path="messages[0].content[0]", url=data_url(gif, "image/gif"))

    async def run():
        loader = DecodingLoader(EngineConfig(), tuple(registry.video_readers.values()))
        try:
            return await loader.load([part], then=lambda clip: clip.frames)
        finally:
            await loader.close()

    np.testing.assert_array_equal(asyncio.run(run())[0], frames)


@pytest.mark.slow
def test_documented_plugins_can_be_installed(tmp_path, monkeypatch):
    """That of the page is copied into an empty folder."""
    project, installed = tmp_path / "project", tmp_path / "installed"
    project.mkdir()
    for language, name in (("python", "shapes_plugin.py"), ("toml", "pyproject.toml")):
        code = re.search(rf"^```{language}\n(.*?)^```$", page_text("plugins.md"), re.MULTILINE | re.DOTALL)
        (project / name).write_text(code[1])
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", installed]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, project, EXAMPLE], check=True)
    monkeypatch.syspath_prepend(installed)
    assert row("shapes").provides == ("model shapes",)
    assert row("slideshow").provides == ("video reader slideshow",)
