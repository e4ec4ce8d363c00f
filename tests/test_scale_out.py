"""The deployment files of docs/scale-out.md: structure, references between them, and options. They are not run."""

from __future__ import annotations

import importlib.util
import re
from urllib.parse import urlsplit

import pytest
import yaml
from click.core import Context

from dashinfer_vlm_core.config import EngineConfig, variable
from dashinfer_vlm_core.embedding_store import EmbeddingStoreOptions
from dashinfer_vlm_core.installation import install_step
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.plugin import serve
from tests.pages import ROOT, page_text
from tests.server.conftest import log_format  # noqa: F401  # `--log-format` is restored after each test

FOLDER = ROOT / "examples/scale-out"
SERVERS = ("server-1", "server-2", "server-3")
RAY_ARGUMENTS = {"min_replicas", "max_replicas", "cpus", "ingress_cpus", "routing"}
"""Arguments of `dashinfer_vlm_ray:app` that are not options of the server."""


def read(name):
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load(read("compose.yaml"))


@pytest.fixture(scope="module")
def objects():
    """Return the objects of rayservice.yaml by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(read("rayservice.yaml"))}


@pytest.fixture(scope="module")
def ray_application(objects):
    (application,) = yaml.safe_load(objects["RayService"]["spec"]["serveConfigV2"])["applications"]
    return application


def parse(arguments):
    """Parse arguments of `dashinfer-vlm serve`; unknown options and wrong types raise."""
    context: Context = serve.make_context("serve", list(arguments))
    return {name: value for name, value in context.params.items() if value not in (None, ())}


def environment_variables():
    """Return the variables of all options of the server and of the store."""
    names = {*EngineConfig.option_fields(), *EmbeddingStoreOptions.model_fields, *(each.name for each in serve.params)}
    return {variable(name) for name in names}


def targets():
    """Return the entry point of each target of the Dockerfile; none for the one that has that of its base."""
    stages = re.split(r"^FROM .* AS (\w+)$", read("Dockerfile"), flags=re.MULTILINE)[1:]
    found = {}
    for name, text in zip(stages[::2], stages[1::2], strict=True):
        entry = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
        found[name] = yaml.safe_load(entry[1]) if entry else []
    return found


def test_compose_has_only_known_keys(compose):
    """The keys of the Compose specification that the file uses."""
    service = {
        "build", "image", "command", "environment", "volumes", "secrets", "depends_on", "healthcheck", "ports",
        "cpuset", "stop_grace_period", "restart",
    }  # fmt: skip
    assert set(compose) == {"name", "x-server", "services", "secrets"}
    for name, each in compose["services"].items():
        assert set(each) <= service, name
        assert each["image"]
        assert set(each.get("build", ())) <= {"context", "dockerfile", "target"}
        assert set(each.get("healthcheck", ())) <= {"test", "interval", "timeout", "start_period", "start_interval"}
        assert all(isinstance(value, str) for value in each.get("environment", {}).values())
        assert all(isinstance(word, str) for word in each["command"]), name


def test_compose_refers_to_what_exists(compose):
    services = compose["services"]
    for name, each in services.items():
        assert set(each.get("secrets", ())) <= set(compose["secrets"])
        assert set(each.get("depends_on", ())) <= set(services) - {name}
        for other, condition in each.get("depends_on", {}).items():
            assert condition["condition"] == (
                "service_healthy" if "healthcheck" in services[other] else "service_started"
            )
        if build := each.get("build"):
            assert (FOLDER / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]).exists()
            assert targets()[build["target"]]
            assert each["image"] == f"dashinfer-vlm:{build['target']}"


def test_compose_servers_start_with_valid_options(compose):
    for name in SERVERS:
        server = compose["services"][name]
        options = parse([*targets()["server"][2:], *server["command"]])
        assert options["host"] == "0.0.0.0"
        assert options["served_model_name"] == "qwen"
        assert f"{options['api_key_file']}" == f"/run/secrets/{server['secrets'][0]}"
        assert {option for option in server["environment"] if option not in environment_variables()} == set()
        store = urlsplit(re.sub(r"\$\{.*?\}", "secret", server["environment"]["DASHINFER_VLM_EMBEDDING_STORE"]))
        assert store.hostname in compose["services"]
        (model,) = options["model"]
        assert any(volume.endswith(f":{model}:ro") for volume in server["volumes"])


def test_compose_servers_have_separate_cores(compose):
    used = []
    for name in SERVERS:
        first, last = map(int, compose["services"][name]["cpuset"].split("-"))
        used += range(first, last + 1)
    assert len(used) == len(set(used))


def test_health_check_uses_existing_route(compose):
    program = compose["services"]["server-1"]["healthcheck"]["test"][-1]
    compile(program, "healthcheck", "exec")
    path = urlsplit(re.search(r"http://[^\"]+", program)[0]).path
    assert path in {route.path for route in create_app(scripted_engine("Yes.")).routes}


def test_proxy_configuration_lists_servers_of_compose(compose):
    config = yaml.safe_load(read("litellm.yaml"))
    hosts = {urlsplit(each["litellm_params"]["api_base"]).netloc for each in config["model_list"]}
    assert hosts == {f"{name}:8000" for name in SERVERS}
    assert {each["litellm_params"]["model"] for each in config["model_list"]} == {"openai/qwen"}
    proxy = compose["services"]["litellm"]
    assert proxy["command"] == ["--config", "/config/litellm.yaml"]
    assert proxy["volumes"] == ["./litellm.yaml:/config/litellm.yaml:ro"]
    needed = set(re.findall(r"os\.environ/(\w+)", read("litellm.yaml")))
    assert needed <= set(proxy["environment"])


def test_page_shows_part_of_proxy_configuration():
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", page_text("scale-out.md"), re.MULTILINE | re.DOTALL)
    part, config = yaml.safe_load(shown), yaml.safe_load(read("litellm.yaml"))
    assert part.pop("model_list") == config["model_list"][:1]
    assert part == {name: config[name] for name in part}


def test_compose_header_sets_variables_and_secrets_that_file_needs(compose):
    text = read("compose.yaml")
    header = text[: text.index("\nname:")]
    assert set(re.findall(r"\$\{(\w+)", text)) == set(re.findall(r"(\w+)=", header))
    assert {secret["file"].removeprefix("./") for secret in compose["secrets"].values()} <= set(
        re.findall(r"> (\w+)", header)
    )


def test_ray_service_has_structure_of_kuberay(objects):
    """The fields of `ray.io/v1` that the file uses."""
    service = objects["RayService"]
    assert service["apiVersion"] == "ray.io/v1"
    assert set(service["spec"]) == {"serveConfigV2", "rayClusterConfig"}
    cluster = service["spec"]["rayClusterConfig"]
    assert set(cluster) == {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
    assert f"rayproject/ray:{cluster['rayVersion']}-" in read("Dockerfile")
    assert set(cluster["headGroupSpec"]) == {"rayStartParams", "template"}
    (group,) = cluster["workerGroupSpecs"]
    assert set(group) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for spec in (cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
        check_pod(spec)
        assert spec["containers"][0]["image"].partition(":")[2] in targets()
        assert spec["enableServiceLinks"] is False


def check_pod(spec):
    keys = {"name", "image", "args", "env", "ports", "resources", "volumeMounts"}
    for container in spec["containers"]:
        assert set(container) <= keys
        assert {"name", "image"} <= set(container)
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= {
            volume["name"] for volume in spec.get("volumes", ())
        }
        known = set()
        for each in container["env"]:  # a reference works only to a variable before it
            assert set(each) in ({"name", "value"}, {"name", "valueFrom"})
            assert set(re.findall(r"\$\((\w+)\)", each.get("value", ""))) <= known
            known.add(each["name"])


def test_ray_service_starts_with_valid_options(objects, ray_application):
    arguments = ray_application["args"]
    assert ray_application["import_path"] == "dashinfer_vlm_ray:app"
    server = {name: value for name, value in arguments.items() if name not in RAY_ARGUMENTS}
    parse(f"--{name.replace('_', '-')}={value}" for name, value in server.items())
    (group,) = objects["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    # Each worker has space for one replica and one ingress replica.
    assert arguments["cpus"] + arguments["ingress_cpus"] <= int(container["resources"]["requests"]["cpu"])
    assert (arguments["min_replicas"], arguments["max_replicas"]) == (group["minReplicas"], group["maxReplicas"])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for name in ("model", "api_key_file", "embedding_store_secret_file"):
        assert f"/{arguments[name].split('/')[1]}" in mounts


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=f"ray is not installed. {install_step('ray')}")
def test_ray_adapter_accepts_arguments(ray_application):
    config = pytest.importorskip("dashinfer_vlm_ray.config")
    parsed = config.parse_arguments(ray_application["args"])
    assert parsed.engine.served_model_name == "qwen"


def test_ray_service_finds_its_store(objects):
    (group,) = objects["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    variables = {each["name"]: each.get("value") for each in group["template"]["spec"]["containers"][0]["env"]}
    assert {name for name in variables if name.startswith("DASHINFER")} <= environment_variables()
    store = urlsplit(variables["DASHINFER_VLM_EMBEDDING_STORE"])
    service, deployment = objects["Service"], objects["Deployment"]
    assert (store.hostname, store.port) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    template = deployment["spec"]["template"]
    assert (
        service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    )
    check_pod(template["spec"])


def test_secret_of_header_has_all_keys_that_are_used(objects):
    text = read("rayservice.yaml")
    created = set(re.findall(r"--from-(?:literal|file)=([\w-]+)=", text))
    used = set(re.findall(r"key: ([\w-]+)\}", text)) | set(re.findall(r"/secrets/([\w-]+)", text))
    assert used == created
