"""The files of examples/operations: their structure, references and options, and systemd's check of the unit."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import shlex
import shutil
import subprocess
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_server.metrics import PREFIX
from tests.pages import ROOT, page_text
from tests.samples import image_url
from tests.server.conftest import log_format, serving  # noqa: F401  # `--log-format` is restored after each test
from tests.test_scale_out import environment_variables, parse, targets
from tests.waiting import HANG, until
from tests.web import free_port

FOLDER = ROOT / "examples/operations"
UNIT = FOLDER / "dashinfer-vlm.service"
LANDLOCK = {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"}


@pytest.fixture(scope="module")
def service():
    """Return the values of each setting in the section Service."""
    lines = [line for line in UNIT.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    section = lines[lines.index("[Service]") + 1 : lines.index("[Install]")]
    values = {}
    for line in section:
        name, _, value = line.partition("=")
        values.setdefault(name, []).append(value)
    return values


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))


def test_unit_starts_with_valid_options(service):
    (command,) = service["ExecStart"]
    program, *arguments = shlex.split(command)
    assert program.endswith("/bin/dashinfer-vlm")
    assert arguments[0] == "serve"
    options = parse(arguments[1:])
    assert f"{options['api_key_file']}" == "${CREDENTIALS_DIRECTORY}/keys"
    assert service["LoadCredential"][0].startswith("keys:")
    names = {value.partition("=")[0] for value in service["Environment"]}
    assert {name for name in names if name.startswith("DASHINFER_VLM_")} <= environment_variables()


def test_unit_allows_restrictions_of_media_workers(service):
    """@system-service of systemd 252 has no Landlock, without which workers can read the files of the user."""
    (calls,) = service["SystemCallFilter"]
    assert set(calls.split()) == {"@system-service", *LANDLOCK}
    assert "MemoryDenyWriteExecute" not in service
    assert "ProcSubset" not in service


def test_unit_allows_time_to_drain(service):
    grace = parse([])["grace"]
    assert float(service["TimeoutStopSec"][0]) > grace
    assert service["RestartPreventExitStatus"] == ["2"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed: apt-get install systemd")
def test_systemd_accepts_unit(tmp_path):
    """systemd also checks that the program exists, so another one stands in for it."""
    text = UNIT.read_text(encoding="utf-8")
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("ExecStart=/opt/dashinfer-vlm/bin/dashinfer-vlm", f"ExecStart={shutil.which('true')}"))
    command = ["systemd-analyze", "verify", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if UNIT.name in line]) == (0, [])


def test_compose_refers_to_what_exists(compose):
    top = {"name", "services", "configs", "secrets", "volumes"}
    assert set(compose) == top
    made = {secret["file"] for secret in compose["secrets"].values()}
    for name, each in compose["services"].items():
        assert set(each.get("secrets", ())) <= set(compose["secrets"]), name
        assert {config["source"] for config in each.get("configs", ())} <= set(compose["configs"])
        assert set(each.get("depends_on", ())) <= set(compose["services"]) - {name}
        for volume in each.get("volumes", ()):
            source = volume.rpartition(":ro")[0] or volume
            source = source.rpartition(":")[0]
            known = source in compose["volumes"] or source.startswith("${") or source in made
            assert known or (FOLDER / source).is_file(), volume
    build = compose["services"]["server"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert build["target"] in targets()


def test_compose_server_starts_with_valid_options(compose):
    server = compose["services"]["server"]
    options = parse([*targets()["server"][2:], *server["command"]])
    assert f"{options['api_key_file']}" == f"/run/secrets/{server['secrets'][0]}"
    assert any(volume.endswith(f":{options['model'][0]}:ro") for volume in server["volumes"])


def test_compose_header_makes_what_file_needs(compose):
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    header = text[: text.index("\nname:")]
    assert set(re.findall(r"\$\{(\w+)", text)) == set(re.findall(r"export (\w+)=", header))
    assert {secret["file"].removeprefix("./") for secret in compose["secrets"].values()} == set(
        re.findall(r"> (\w+)", header)
    )


def test_grafana_of_compose_reads_prometheus_of_compose(compose):
    services, configs = compose["services"], compose["configs"]
    (source,) = yaml.safe_load(configs["datasource"]["content"])["datasources"]
    assert urlsplit(source["url"]).hostname in services
    (provider,) = yaml.safe_load(configs["dashboards"]["content"])["providers"]
    (mount,) = services["grafana"]["volumes"]
    assert mount.split(":")[1].startswith(provider["options"]["path"])
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": ["server:8000"]}]
    key = scrape["authorization"]["credentials_file"]
    assert any(volume.endswith(f":{key}:ro") for volume in services["prometheus"]["volumes"])


def test_dashboard_uses_documented_metrics(dashboard):
    """A test below runs the queries in Prometheus, where it is installed."""
    documented = set(re.findall(r"^\| `([a-z0-9_]+)` \|", page_text("monitoring.md"), re.MULTILINE))
    assert len(dashboard["panels"]) >= 12
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            used = re.findall(rf"\b{PREFIX}(\w+)", target["expr"])
            plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
            assert plain <= documented, panel["title"]
            assert '{job="$job", instance=~"$instance"' in target["expr"]


def test_panels_of_dashboard_do_not_overlap(dashboard):
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(column for column, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


KEY = "sk-prometheus"


@pytest.fixture
def prometheus(tmp_path, tiny_checkpoint):
    """Run Prometheus with the configuration of compose.yaml, and yield its client and one of the server it reads."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (scrape,) = config["scrape_configs"]
    keys = tmp_path / "server_key"
    keys.write_text(KEY)
    engine = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny")
    with Engine(engine) as started, serving(started, api_key_file=keys) as server:
        config["global"]["scrape_interval"] = "100ms"
        scrape["authorization"]["credentials_file"] = str(keys)
        scrape["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        with prometheus_process(tmp_path) as client, server.http() as requests:
            requests.headers["Authorization"] = f"Bearer {KEY}"
            yield client, requests


@contextlib.contextmanager
def prometheus_process(folder):
    address = f"127.0.0.1:{free_port()}"
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=HANG) as client:
            until(lambda: is_ready(client) or process.poll() is not None)
            assert process.poll() is None, (folder / "log").read_text()
            yield client
        process.terminate()


def is_ready(client):
    with contextlib.suppress(httpx.ConnectError):
        return client.get("/-/ready").is_success


def values(client, target):
    """Return the present values of a panel's query; those of fractions of zero are not numbers, and left out."""
    query = target["expr"].replace("$job", "dashinfer-vlm").replace("$instance", ".*").replace("$__rate_interval", "1m")
    response = client.get("/api/v1/query", params={"query": query}).json()
    assert response["status"] == "success", response
    found = [float(each["value"][1]) for each in response["data"]["result"]]
    return [value for value in found if math.isfinite(value)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no Prometheus: apt-get install prometheus")
def test_every_query_of_dashboard_returns_values(prometheus, dashboard):
    client, requests = prometheus
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    seeds = itertools.count()

    def empty_queries():
        """Send a new image, twice, and return the queries without values."""
        image = {"type": "image_url", "image_url": {"url": image_url(seed=next(seeds))}}
        for text in ("What is it?", "Where is it?"):
            message = {"role": "user", "content": [image, {"type": "text", "text": text}]}
            body = {"messages": [message], "max_tokens": 4, "ignore_eos": True}
            requests.post("/v1/chat/completions", json=body).raise_for_status()
        return [target["expr"] for target in targets if not values(client, target)]

    until(lambda: empty_queries() == [])
    assert max(values(client, targets[0])) == 1
