"""Startup cost of the command line, its help, and unknown environment variables."""

from __future__ import annotations

import re

import click
import pytest

from dashinfer_vlm_cli.plugin import COMMANDS
from dashinfer_vlm_core.cli.command import unknown_variables
from dashinfer_vlm_core.cli.main import COMMAND_HINTS
from dashinfer_vlm_core.cli.main import cli as core
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.plugins import add_commands
from dashinfer_vlm_server.plugin import serve
from tests.cli.conftest import MAIN, run_process

HEAVY = ("torch", "transformers", "tokenizers", "openai", "huggingface_hub", "litellm", "fastapi", "av")

HELPED = [[], *([name] for name in COMMANDS), ["serve"], ["plugins"]]
PROGRAM = f"""
import sys
from dashinfer_vlm_core.cli.main import cli
from dashinfer_vlm_core.plugins import add_commands
add_commands(cli)
for words in {HELPED!r}:
    try:
        cli([*words, "--help"])
    except SystemExit as end:
        print("EXIT", end.code, words, sorted(set(sys.modules) & set({HEAVY!r})))
"""


@pytest.mark.slow
def test_help_imports_nothing_heavy():
    """In one process: a command whose help imports something heavy fails, and so may those after it."""
    result = run_process(program=PROGRAM, fork=False)
    ends = [line for line in result.stdout.splitlines() if line.startswith("EXIT ")]
    assert ends == [f"EXIT 0 {words} []" for words in HELPED]
    assert result.stdout.count("Usage: ") == len(HELPED)


@pytest.mark.slow
def test_environment_sets_log_level():
    """By default, commands log only warnings."""
    program = f"import atexit, logging\natexit.register(lambda: print(logging.getLogger().level))\n{MAIN}"
    for level, number in (("", 30), ("info", 20), ("debug", 10)):
        variables = {"DASHINFER_VLM_LOG_LEVEL": level} if level else {}
        assert run_process("models", program=program, **variables).stdout.splitlines()[-1] == str(number)


def test_group_help_lists_commands_with_summaries(run):
    text = run("--help").output
    for name, summary in COMMANDS.items():
        assert f"  {name}" in text
        assert summary[:40] in text


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_is_first_line_of_help(run, name):
    assert COMMANDS[name].rstrip(".") in " ".join(run(name, "--help").output.split())


def helps(group, *path):
    """Yield the help of every command of a group for a terminal with 80 columns."""
    with click.Context(group, info_name="dashinfer-vlm", terminal_width=80) as context:
        yield " ".join(path), group.get_help(context)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from helps(command, *path, name)
        else:
            made = command.make_context(name, [], resilient_parsing=True, terminal_width=80)
            yield " ".join([*path, name]), made.command.get_help(made)


def test_help_has_no_noise():
    cli = click.Group(params=core.params, commands=dict(core.commands))
    add_commands(cli)
    found = dict(helps(cli))
    assert {"", "serve", "chat", "batch", "bench", "models", "doctor", "plugins", "dashinfer install"} <= set(found)
    for name, text in found.items():
        words = " ".join(text.split())
        assert "..." not in re.sub(r"[],A-Z]\.\.\.", "", words), f"{name}: a summary is cut short"
        for noise in ('[default: ""]', "[default: True]", "[default: False]", "INTEGER", "FLOAT", "XHEIGHT"):
            assert noise not in words, f"{name}: {noise}"
        assert re.findall(r"(\S+) \[[^]]*\] [^[]*\[default: none\]", words) in ([], ["--quantization"]), name
        assert max(map(len, text.splitlines())) <= 80, name


def test_help_shows_units_and_defaults(run):
    text = " ".join(run("chat", "--help").output.split())
    for words in (
        "--image-max-bytes BYTES Maximum size of an encoded image or document, in bytes. [default: 20971520, 20 MiB]",
        "--kv-cache-mib MIB ",
        "--video-fetch-timeout SECONDS ",
        "--limit-mm-per-prompt image=N,video=N ",
        "[default: prefix-cache]",
        "[default: no-enable-mm-embeds]",
        "--revision NAME Branch, tag or commit of a Hugging Face model; defaults to the main branch. --",
    ):
        assert words in text


@pytest.mark.parametrize("name", COMMAND_HINTS)
def test_commands_of_other_programs_name_ours(run, group, name):
    group.add_command(serve)
    result = run(name, "maker/model")
    assert result.exit_code == 2
    assert f"No such command '{name}'. {COMMAND_HINTS[name]}" in result.stderr
    assert set(re.findall(r"`dashinfer-vlm (\w+)", COMMAND_HINTS[name])) <= group.commands.keys()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve", "demo", "--gpu-memory-utilization=0.9"], "Set its maximum size, `--kv-cache-mib`."),
        (["serve", "--tensor-parallel-size", "2"], "start one server for each GPU"),
        (["serve", "--max_num_batched_tokens", "64"], "It is `--prefill-chunk` here."),
        (["serve", "--no-enable-prefix-caching"], "It is `--no-prefix-cache` here."),
        (["serve", "--trust-remote-code"], "Remove it: code of checkpoints is never executed."),
        (["serve", "--lora-modules", "a=b"], "It is `--lora` here, once for each adapter."),
        (["chat", "--max-num-seqs", "4"], "It is `--max-batch-size` here."),
        (["serve", "--prot", "1"], "'--port'"),
    ],
)
def test_options_of_vllm_name_ours(run, group, words, hint):
    group.add_command(serve)
    result = run(*words)
    assert result.exit_code == 2
    assert hint in result.stderr


@pytest.fixture
def messages(group):
    """Return the messages about unknown environment variables."""
    group.add_command(serve)

    def messages(*names):
        with click.Context(group) as context:
            return list(unknown_variables(names, context, ["max_pixels"]))

    return messages


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("DASHINFER_VLM_MAX_PIXEL", "Did you mean DASHINFER_VLM_MAX_PIXELS?"),
        ("DASHINFER_VLM_HOTS", "Did you mean DASHINFER_VLM_HOST?"),
        ("DASHINFER_VLM_ZQX", "`dashinfer-vlm serve --help` lists all options."),
    ],
)
def test_unknown_variable_is_reported(messages, name, fix):
    assert messages(name) == [f"The environment variable {name} does not set any option. {fix}"]


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
def test_known_and_kubernetes_variables_are_accepted(messages, name):
    assert messages(name) == []


def test_command_logs_unknown_variable(run, caplog, tmp_path):
    with pytest.raises(CheckpointError):
        run("chat", "Hello?", "--model", tmp_path, DASHINFER_VLM_MAX_PIXEL="784")
    assert "Did you mean DASHINFER_VLM_MAX_PIXELS?" in caplog.text
