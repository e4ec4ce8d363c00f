"""The configuration of an application, from Python and from the arguments of `serve run`."""

from __future__ import annotations

import importlib
import pickle
import re
import sys

import pytest
import yaml

import dashinfer_vlm_ray
from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.errors import ConfigError, MissingDependency
from dashinfer_vlm_core.installation import install_step
from dashinfer_vlm_ray import RayConfig
from dashinfer_vlm_ray.application import cpu_shortage
from dashinfer_vlm_ray.config import parse_arguments
from dashinfer_vlm_server.settings import Settings
from tests.cases import cases
from tests.pages import page_text


def test_no_arguments_are_the_defaults():
    config = parse_arguments({})
    assert config.engine == EngineConfig()
    assert (config.min_replicas, config.max_replicas, config.routing) == (1, None, "content")
    assert (config.grace, config.settings.max_body_bytes) == (20, Settings().max_body_bytes)


def test_arguments_are_options_of_replicas_server_and_engine():
    config = parse_arguments(
        {
            "min-replicas": "2",
            "max_replicas": 4,
            "cpus": "1.5",
            "routing": "load",
            "grace": 3,
            "page": False,
            "api_key": ["one", "two"],
            "max_model_len": "512",
            "limit_mm_per_prompt": {"image": 2, "video": 1},
            "embedding_store": "file:///nowhere",
        }
    )
    assert (config.min_replicas, config.max_replicas, config.cpus, config.threads) == (2, 4, 1.5, 1)
    assert (config.routing, config.grace, config.settings.page, len(config.settings.keys)) == ("load", 3, False, 2)
    assert (config.engine.max_model_len, config.engine.limit_mm_per_prompt.image) == (512, 2)


def test_arguments_can_name_a_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("max-replicas: 3\nmax-model-len: 512\n")
    config = parse_arguments({"config": str(file), "max_model_len": 256})
    assert (config.max_replicas, config.engine.max_model_len) == (3, 256)


@cases(
    ("arguments", "message"),
    [
        ({"max_replica": 2}, "Unknown option 'max_replica'. Did you mean 'max-replicas'?"),
        ({"port": 80}, "`port` does not apply here: Ray Serve's proxy listens"),
        ({"log-format": "json"}, "`log-format` does not apply here: Ray Serve writes the logs"),
        ({"min_replicas": 0}, "Invalid option min_replicas: must be at least 1 (got '0')."),
        ({"min_replicas": [1, 2]}, "Invalid option min_replicas: must be an integer (got '1,2')."),
        ({"min_replicas": 3, "max_replicas": 2}, "`max_replicas` must be at least `min_replicas`, 3, got 2."),
        ({"page": "perhaps"}, "Invalid value for '--page': 'perhaps' is not a valid boolean"),
        ({"max_model_len": 1}, "max_model_len: must be at least 16"),
        ({"routing": "image"}, "routing: must be 'content', 'load' or 'round-robin' (got 'image')."),
        ({"ingress_replicas": 2}, "requires `max_stored_responses=0`"),
    ],
)
def test_invalid_argument_is_named(arguments, message):
    with pytest.raises(ConfigError) as caught:
        parse_arguments(arguments)
    assert message in caught.value.message


@cases(
    "options",
    [
        {"min_replicas": 0},
        {"max_ongoing_requests": 0},
        {"target_ongoing_requests": 0},
        {"cpus": -1},
        {"gpus": float("nan")},
        {"grace": float("inf")},
        {"fallback_replicas": -1},
        {"routing": "image"},
    ],
)
def test_value_out_of_range_is_rejected(options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError) as caught:
        RayConfig(**options)
    assert caught.value.param == name
    assert f"{name}: must be" in caught.value.message
    assert repr(value) in caught.value.message


def test_configuration_can_be_sent_to_another_process():
    config = parse_arguments({"api_key": "secret", "embedding_store": "file:///nowhere", "max_model_len": 512})
    copy = pickle.loads(pickle.dumps(config))
    assert copy.engine == config.engine
    assert copy.engine.plugin_options == config.engine.plugin_options
    assert copy.settings.keys.find(b"Bearer secret")


def test_documented_command_requires_two_cpus():
    (command,) = re.findall(r"^serve run dashinfer_vlm_ray:app (.*)$", page_text("ray.md"), re.MULTILINE)
    config = parse_arguments(dict(argument.split("=") for argument in command.split()))
    assert cpu_shortage(config, 2) is None
    assert cpu_shortage(config, 1.9) == (
        "The application requires 2 CPUs, and the cluster has 1.9: `min_replicas` 1 x `cpus` 1 + `ingress_replicas` 1 x"
        " `ingress_cpus` 1. Lower these options, or add CPUs; until then, the application is not ready."
    )


def test_ray_is_required_to_build_the_application(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=f"requires ray.* {re.escape(install_step('ray'))}"):
        dashinfer_vlm_ray.build_app()


def test_page_lists_all_options():
    page, others = page_text("ray.md"), {"engine", "settings"}
    assert {name for name in RayConfig.model_fields if f"`{name}`" not in page} <= others


def test_configuration_file_of_the_page_is_valid(tmp_path):
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page_text("ray.md"), re.MULTILINE | re.DOTALL)
    (application,) = yaml.safe_load(block)["applications"]
    module, _, name = application["import_path"].partition(":")
    assert getattr(importlib.import_module(module), name) is dashinfer_vlm_ray.app
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    config = parse_arguments({**application["args"], "api_key_file": str(keys)})
    assert (config.min_replicas, config.max_replicas, len(config.settings.keys)) == (2, 8, 1)


def test_limits_of_the_engine_are_a_mapping():
    config = parse_arguments({"limits": {"store_timeout": 30}, "min_replicas": 2})
    assert (config.engine.limits.store_timeout, config.min_replicas) == (30, 2)
    with pytest.raises(ConfigError, match="store_timeot"):
        parse_arguments({"limits": {"store_timeot": 30}})
