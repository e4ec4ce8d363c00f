"""What the command line costs before it does anything."""

from __future__ import annotations

import re

import click
import pytest

from dashinfer_vlm_cli.plugin import COMMANDS
from dashinfer_vlm_core.cli.main import cli as core
from dashinfer_vlm_core.config.env_check import unknown_variables
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.plugins import add_commands
from dashinfer_vlm_server.plugin import serve
from tests.cli.conftest import MAIN, process

HEAVY = ("torch", "transformers", "tokenizers", "openai", "huggingface_hub", "litellm", "fastapi", "av")

PROGRAM = f"""
import atexit, sys
atexit.register(lambda: print("LOADED", sorted(set(sys.modules) & set({HEAVY!r}))))
from dashinfer_vlm_core.cli.main import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS), ("serve",), ("plugins",)], ids=" ".join)
def test_help_imports_nothing_heavy(words):
    ended = process(*words, "--help", program=PROGRAM)
    assert ended.stdout.splitlines()[-1] == "LOADED []"
    assert "Usage: " in ended.stdout


@pytest.mark.slow
def test_the_environment_may_ask_for_more_of_the_log():
    """Than warnings, which is what commands that say themselves what matters log."""
    program = f"import atexit, logging\natexit.register(lambda: print(logging.getLogger().level))\n{MAIN}"
    for level, number in (("", 30), ("info", 20), ("debug", 10)):
        asked = {"DASHINFER_VLM_LOG_LEVEL": level} if level else {}
        assert process("models", program=program, **asked).stdout.splitlines()[-1] == str(number)


def test_the_group_lists_each_command_with_what_it_does(run):
    text = run("--help").output
    for name, summary in COMMANDS.items():
        assert f"  {name}" in text
        assert summary[:40] in text


@pytest.mark.parametrize("name", COMMANDS)
def test_each_summary_is_the_first_line_of_the_help(run, name):
    assert COMMANDS[name].rstrip(".") in " ".join(run(name, "--help").output.split())


def helps(group, *path):
    """The help of every command of a group, as at a terminal of 80 columns."""
    with click.Context(group, info_name="dashinfer-vlm", terminal_width=80) as context:
        yield " ".join(path), group.get_help(context)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from helps(command, *path, name)
        else:
            made = command.make_context(name, [], resilient_parsing=True, terminal_width=80)
            yield " ".join([*path, name]), made.command.get_help(made)


def test_help_is_free_of_noise():
    cli = click.Group(params=core.params, commands=dict(core.commands))
    add_commands(cli)
    found = dict(helps(cli))
    assert {"", "serve", "chat", "batch", "bench", "models", "doctor", "plugins", "dashinfer install"} <= set(found)
    for name, text in found.items():
        words = " ".join(text.split())
        assert "..." not in re.sub(r"[],]\.\.\.", "", words), f"{name}: a summary is cut short"
        for noise in ('[default: ""]', "[default: True]", "[default: False]", "INTEGER", "FLOAT", "XHEIGHT"):
            assert noise not in words, f"{name}: {noise}"
        assert re.findall(r"(\S+) \[[^]]*\] [^[]*\[default: none\]", words) in ([], ["--quantization"]), name
        assert max(map(len, text.splitlines())) <= 80, name


def test_help_says_units_and_defaults(run):
    text = " ".join(run("chat", "--help").output.split())
    for words in (
        "--image-max-bytes BYTES Most bytes of one encoded picture. [default: 20971520, 20 MiB]",
        "--kv-cache-mib MIB ",
        "--video-fetch-timeout SECONDS ",
        "--limit-mm-per-prompt image=N,video=N ",
        "[default: prefix-cache]",
        "[default: no-enable-mm-embeds]",
        "--revision NAME Branch, tag or commit of a hub id; its main branch by default. --",
    ):
        assert words in text


@pytest.fixture
def told(group):
    """What is said about variables, by their names, of the program with all commands."""
    group.add_command(serve)

    def told(*names):
        with click.Context(group) as context:
            return list(unknown_variables(names, context))

    return told


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("DASHINFER_VLM_MAX_PIXEL", "Did you mean DASHINFER_VLM_MAX_PIXELS?"),
        ("DASHINFER_VLM_HOTS", "Did you mean DASHINFER_VLM_HOST?"),
        ("DASHINFER_VLM_ZQX", "`dashinfer-vlm serve --help` lists those that do."),
    ],
)
def test_a_variable_that_sets_nothing_is_told(told, name, fix):
    assert told(name) == [f"{name} is set in the environment, and sets no option. {fix}"]


@pytest.mark.parametrize(
    "name",
    [
        "DASHINFER_VLM_MAX_PIXELS",
        "DASHINFER_VLM_ROOT_PATH",
        "DASHINFER_VLM_LOG_LEVEL",
        "DASHINFER_VLM_API_KEYS",
        "DASHINFER_VLM_SERVICE_HOST",
        "DASHINFER_VLM_METRICS_PORT",
        "DASHINFER_VLM_METRICS_SERVICE_PORT_HTTP",
        "DASHINFER_VLM_PORT_8000_TCP_ADDR",
        "VLLM_IMAGE_FETCH_TIMEOUT",
        "DASHINFER",
    ],
)
def test_a_variable_of_any_command_or_of_kubernetes_is_fine(told, name):
    assert told(name) == []


def test_a_command_tells_it(run, caplog, tmp_path):
    with pytest.raises(CheckpointError):
        run("chat", "Hello?", "--model", tmp_path, DASHINFER_VLM_MAX_PIXEL="784")
    assert "Did you mean DASHINFER_VLM_MAX_PIXELS?" in caplog.text
