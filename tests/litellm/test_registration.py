"""Registration of the provider with LiteLLM and its proxy, and model information."""

from __future__ import annotations

import subprocess
import sys

import litellm
import pytest
from litellm.proxy.types_utils.utils import get_instance_fn

import dashinfer_vlm_litellm
from dashinfer_vlm_core.models.spec import Profile
from dashinfer_vlm_core.plugins import load_adapter
from dashinfer_vlm_litellm.model_info import register_model_info
from tests.litellm.conftest import HELLO
from tests.waiting import HANG


def test_entry_point_is_register():
    assert load_adapter("litellm") is dashinfer_vlm_litellm.register


def test_proxy_finds_handler(tmp_path):
    found = get_instance_fn("dashinfer_vlm_litellm.handler", str(tmp_path / "config.yaml"))
    assert found is dashinfer_vlm_litellm.handler


def test_register_keeps_other_providers():
    other = {"provider": "other", "custom_handler": dashinfer_vlm_litellm.handler}
    before = litellm.custom_provider_map
    litellm.custom_provider_map = [*before, other]
    dashinfer_vlm_litellm.register()
    assert other in litellm.custom_provider_map
    assert [item["provider"] for item in litellm.custom_provider_map].count("dashinfer_vlm") == 1
    litellm.custom_provider_map = [item for item in litellm.custom_provider_map if item is not other]


def test_router_works_after_register(demo):
    params = {"model": demo, "engine_options": {"max_model_len": 512}}
    router = litellm.Router(model_list=[{"model_name": "vision", "litellm_params": params}])
    assert router.completion("vision", messages=HELLO, max_tokens=1).usage.completion_tokens == 1
    router.discard()


def test_user_model_info_is_kept(scripted):
    provider = scripted("Yes.")
    info = {"litellm_provider": provider.model.partition("/")[0], "mode": "chat", "max_input_tokens": 77}
    litellm.register_model({provider.model: info})
    litellm.completion(provider.model, messages=HELLO)
    assert litellm.get_model_info(provider.model)["max_input_tokens"] == 77


@pytest.mark.slow
def test_missing_litellm_error_names_extra():
    program = (
        "import sys\n"
        "sys.modules['litellm'] = None\n"
        "from dashinfer_vlm_core.errors import MissingDependency\n"
        "from dashinfer_vlm_core.plugins import load_adapter\n"
        "try:\n"
        "    load_adapter('litellm')\n"
        "except MissingDependency as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, check=False)
    assert "pip install 'dashinfer-vlm-adapters[litellm]'" in result.stdout


def test_profile_is_kept_when_context_length_changes():
    name = "dashinfer_vlm/images-only"
    register_model_info(name, 100, Profile(videos=False))
    register_model_info(name, 50)
    known = litellm.model_cost[name]
    assert (known["max_input_tokens"], known["supports_vision"], known["supports_video_input"]) == (50, True, False)
