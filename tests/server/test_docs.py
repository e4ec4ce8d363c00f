"""Tables and options of docs/operations.md and docs/monitoring.md match the code, as do the documented routes."""

from __future__ import annotations

import re
import shlex

import click
import yaml
from click.testing import CliRunner

from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import plugin
from dashinfer_vlm_server.app import create_app
from dashinfer_vlm_server.endpoints.openapi import document
from dashinfer_vlm_server.metrics import PREFIX
from dashinfer_vlm_server.request_context import OUTCOMES
from dashinfer_vlm_server.serving import DECODER_FAILED, GRACE_SECONDS
from tests.cases import cases
from tests.pages import page_text
from tests.server.conftest import serving

TEXT = page_text("operations.md")
MONITORING = page_text("monitoring.md")


def test_documented_metrics_match_the_code(tiny_checkpoint):
    engine = scripted_engine("Fine.", model=str(tiny_checkpoint))
    with engine, serving(engine) as server, server.http() as client:
        text = client.get("/metrics").text
    helps = re.findall(rf"^# HELP {PREFIX}(\S+) (.+)$", text, re.MULTILINE)
    kinds = dict(re.findall(rf"^# TYPE {PREFIX}(\S+) (\S+)$", text, re.MULTILINE))
    actual = [(name, kinds[name], words) for name, words in helps if not name.endswith("_created")]
    assert actual == re.findall(
        r"^\| `([a-z0-9_]+)` \| (counter|gauge|histogram|summary) \| (.+) \|$", MONITORING, re.MULTILINE
    )


def test_documented_routes_match_openapi(tiny_checkpoint):
    pages = ("http.md", "responses.md", "anthropic.md", "ollama.md")
    documented = re.findall(r"`(?:DELETE|GET|POST) (/[^`]*)`", "".join(map(page_text, pages)))
    paths = document(create_app(scripted_engine("Fine.", model=str(tiny_checkpoint))))["paths"]
    assert {path.replace("{name}", "{model}") for path in paths} | {"/", "/metrics", "/openapi.json"} == set(documented)


def test_documented_outcomes_match_the_code():
    section = MONITORING[MONITORING.index("| Outcome |") :]
    documented = re.findall(r"^\| `([a-z]+)` \| ", section, re.MULTILINE)
    assert set(documented) == {*OUTCOMES.values(), "success", "invalid", "error"}


OTHERS = {"--target"}
"""Options of Docker."""
OPTIONS = sorted(set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT + MONITORING)) - OTHERS)


@cases("option", OPTIONS)
def test_documented_option_exists(option):
    known = {
        name
        for parameter in plugin.serve.get_params(click.Context(plugin.serve))
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert option in known | {"--help", "--log-level", "--stop-timeout"}


def test_documented_commands_are_parsed(caplog):
    """They fail only where the engine would start, because the named files do not exist."""
    group = click.Group()
    plugin.register_commands(group)
    pod = yaml.safe_load(fence("yaml"))["containers"][0]
    for command in (
        shlex.split(fence("bash").partition("serve")[2]),
        pod["args"],
        shlex.split(fence("bash", 2).partition(pod["image"])[2]),
    ):
        result = CliRunner().invoke(group, ["serve", *command])
        assert "No such option" not in result.output
        assert "--api-key-file" in f"{result.exception} {caplog.text}", result.output
        caplog.clear()
    assert pod["readinessProbe"]["httpGet"]["path"] == "/health/ready"


def test_documented_numbers_match_the_code():
    assert f"`--grace` seconds ({GRACE_SECONDS:g} by default)" in " ".join(TEXT.split())
    assert f"| {DECODER_FAILED} | the decoder failed permanently |" in TEXT


def fence(language, index=0):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[index]
