"""`--config FILE`: a command's options from a file."""

from __future__ import annotations

import json
import re

import click
import pytest
from click.testing import CliRunner

from dashinfer_vlm_core.cli.command import EngineCommand
from dashinfer_vlm_core.cli.config_file import FileOption
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_server.plugin import serve


@click.command(cls=EngineCommand)
@click.option("--port", type=int, default=8000)
@click.option("--api-key", "keys", cls=FileOption, multiple=True, envvar="TEST_KEYS")
@click.option("--loud", is_flag=True)
def command(*, port, keys, loud, config):
    options = {"port": port, "keys": keys, "loud": loud, "pixels": config.max_pixels, "cache": config.prefix_cache}
    options |= {"domains": config.allowed_media_domains, "limits": str(config.limit_mm_per_prompt)}
    options["lora"] = list(map(str, config.lora))
    click.echo(json.dumps(options))


@pytest.fixture
def result(tmp_path):
    """Run the command with a configuration file and arguments."""

    def result(text, *args, mode=0o600, **environment):
        file = tmp_path / "options.yaml"
        file.write_text(text)
        file.chmod(mode)
        result = CliRunner().invoke(command, ["--config", str(file), *args], env=environment)
        if isinstance(result.exception, ConfigError):
            raise result.exception
        return result

    return result


@pytest.fixture
def options(result):
    return lambda *arguments, **environment: json.loads(result(*arguments, **environment).stdout)


def test_keys_accept_dashes_and_underscores(options):
    found = options("port: 9000\nmax-pixels: 100352\nprefix_cache: no\nloud: true\n")
    assert (found["port"], found["pixels"], found["cache"], found["loud"]) == (9000, 100352, False, True)


def test_option_that_is_given_once_per_value(options):
    assert options("lora: [a=/x, 'b=/y,z']")["lora"] == ["a=/x", "b=/y,z"]
    assert options("lora: a=/x", "--lora", "b=/y,z", "--lora", "c=d/e")["lora"] == ["b=/y,z", "c=d/e"]
    assert options("port: 1", DASHINFER_VLM_LORA="a=/x, b=/y")["lora"] == ["a=/x", "b=/y"]


def test_lists_and_mappings(options):
    found = options(
        "api_key: [one, two]\nallowed_media_domains: [a.example, b.example]\nlimit_mm_per_prompt: {image: 3}\n"
    )
    assert found["keys"] == ["one", "two"]
    assert found["domains"] == ["a.example", "b.example"]
    assert found["limits"] == "image=3,video=4,document=8"


def test_empty_file_changes_nothing(options):
    assert options("# nothing yet\n")["port"] == 8000


def test_precedence_is_command_line_file_environment(options):
    file = "port: 9000\napi-key: [file]\nmax_pixels: 100352\n"
    environment = {"TEST_KEYS": "environment", "DASHINFER_VLM_MAX_PIXELS": "200704"}
    assert options("", **environment) == options("") | {"keys": ["environment"], "pixels": 200704}
    found = options(file, **environment)
    assert (found["port"], found["keys"], found["pixels"]) == (9000, ["file"], 100352)
    found = options(file, "--port", "1", "--api-key", "line", "--max-pixels", "784", **environment)
    assert (found["port"], found["keys"], found["pixels"]) == (1, ["line"], 784)


def test_values_stay_text(options):
    """YAML would parse these values as an octal number, a sexagesimal number and a boolean."""
    assert options("api_key: [0123, 12:34, on]\n")["keys"] == ["0123", "12:34", "on"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", r"line 1: Unknown option 'prot'\. Did you mean 'port'\?"),
        ("port: 1\nmax_pixel: 9", r"line 2: Unknown option 'max_pixel'\. Did you mean 'max-pixels'\?"),
        ("max-num-seqs: 4", r"Unknown option 'max-num-seqs'\. It is `max_batch_size` here\."),
        ("qqqq: 1", "`--help` lists all options"),
        ("no-prefix-cache: true", "Unknown option 'no-prefix-cache'"),
        ("config: other.yaml", "Unknown option 'config'"),
        ("help: true", "Unknown option 'help'"),
        ("port: 1\nport: 2", "line 2: 'port' is set twice"),
        ("max_pixels: 1000\nmax-pixels: 2000", "line 2: 'max-pixels' is set twice"),
        ("port:", "line 1: 'port' has no value"),
        ("api_key: [[1]]", "nested too deeply"),
        ("- port", "must contain a mapping of option names"),
        ("port: 1\nmax_pixels: 3", r"line 2: Invalid option max_pixels: must be at least 784 \(got '3'\)"),
        ("max_pixels: many", "line 1: Invalid option max_pixels: must be an integer"),
        ("limit_mm_per_prompt: {audio: 1}", r"limit_mm_per_prompt\.audio: is not a known key"),
        ("rgba_background: [1, 2]", "rgba_background: must be three numbers"),
        ("server: {port: 1}", "line 1: Unknown option 'server'"),
        ("port:\t1", r"line 1: invalid YAML, found character '\\t' that cannot start any token"),
        ("api_key: [one\n", r"line 2: invalid YAML, expected ',' or ']'"),
        ("port: 1\nmodel: 'demo\nloud: true\n", "line 4: invalid YAML, found unexpected end of stream"),
        ("model: a: b", "line 1: invalid YAML, .* Write `name: value`, and quote"),
        ("port: !!python/object/apply:os.mkdir [made]", r"line 1: 'port' has the tag .*os\.mkdir\. Remove it"),
        ("port 8000", "must contain a mapping of option names"),
        ("? [port]\n: 1", "line 1: the name of an option is nested too deeply"),
        ("port: \x01", "cannot be read: it is not plain UTF-8 text"),
    ],
)
def test_error_names_line_and_problem(result, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        result(text)
    assert not re.search(r"while (parsing|scanning)|Input should|<unicode string>", caught.value.message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: x", "Invalid value for '--port': 'x' is not a valid integer"),
        ("port: [1, 2]", "Invalid value for '--port': '1,2' is not a valid integer"),
        ("loud: maybe", "Invalid value for '--loud': 'maybe' is not a valid boolean"),
    ],
)
def test_invalid_value_error_names_file_and_line(result, text, message):
    refused = result(text)
    assert refused.exit_code == 2
    assert message in refused.output
    assert re.search(r"It is set in .*options\.yaml, line 1\.", refused.output.replace("\n", ""))
    assert "It is set in" not in result("port: 1", "--port", "x").output


def test_missing_file_is_reported():
    refused = CliRunner().invoke(command, ["--config", "none.yaml"])
    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.message.startswith("none.yaml cannot be read: No such file or directory.")


@pytest.mark.parametrize(
    ("text", "mode", "warned"),
    [("api_key: [k]", 0o644, True), ("api_key: [k]", 0o600, False), ("port: 1", 0o644, False)],
)
def test_world_readable_secret_is_logged(result, text, mode, warned, caplog):
    result(text, mode=mode)
    assert ("chmod 600" in caplog.text) is warned


def test_serve_accepts_config_file():
    names = {param.name for param in serve.get_params(click.Context(serve))}
    assert {"config_file", "port", "max_pixels", "speculative_method"} <= names


def test_help_lists_engine_options_after_command_options():
    text = CliRunner().invoke(command, ["--help"]).output
    assert text.index("--port") < text.index("--config") < text.index("Model:") < text.index("--model")
