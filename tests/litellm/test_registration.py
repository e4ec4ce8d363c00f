"""Registration of the provider with LiteLLM and its proxy, and model information."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import litellm
import pytest
from litellm.proxy.types_utils.utils import get_instance_fn

import dashinfer_vlm_litellm
from dashinfer_vlm_core.engine.capabilities import Capabilities
from dashinfer_vlm_core.installation import install_step
from dashinfer_vlm_core.models.spec import Profile
from dashinfer_vlm_core.plugins import load_adapter
from dashinfer_vlm_core.testing import EVERYTHING, ScriptedDecoder
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


def test_user_model_info_is_kept(scripted, tiny_checkpoint):
    name = scripted("Yes.").model.partition("/")[0]
    info = {"litellm_provider": name, "mode": "chat", "max_input_tokens": 77}
    litellm.register_model({f"{name}/registered-by-user": info})
    options = {"engine_options": {"model": str(tiny_checkpoint)}}
    litellm.completion(f"{name}/registered-by-user", messages=HELLO, **options)
    assert litellm.get_model_info(f"{name}/registered-by-user")["max_input_tokens"] == 77


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
    assert install_step("litellm") in result.stdout


def supported(model):
    return (
        litellm.supports_vision(model),
        litellm.supports_function_calling(model),
        litellm.supports_parallel_function_calling(model),
        litellm.utils.supports_tool_choice(model),
        litellm.supports_response_schema(model),
        litellm.supports_reasoning(model),
    )


def test_bundled_model_has_capabilities_before_loading(demo):
    assert supported(demo) == (True, True, True, True, True, False)
    info = litellm.get_model_info(demo)
    lengths = {info["max_tokens"], info["max_input_tokens"], info["max_output_tokens"], litellm.get_max_tokens(demo)}
    assert lengths == {4096}
    assert not litellm.supports_audio_input(demo)
    assert litellm.utils.supports_pdf_input(demo)


def test_loaded_model_has_capabilities_of_its_decoder(scripted):
    everything, plain = scripted("Yes.", supported_params=EVERYTHING), scripted("Yes.")
    for provider in (everything, plain):
        litellm.completion(provider.model, messages=HELLO)
    assert supported(everything.model) == (True, True, True, True, True, False)
    assert supported(plain.model) == (True, True, True, False, False, False)


def test_model_that_a_router_registered_first_has_capabilities(scripted):
    provider = scripted("Yes.", supported_params=EVERYTHING)
    router = litellm.Router([{"model_name": "vision", "litellm_params": {"model": provider.model}}])
    assert not litellm.supports_vision(provider.model)
    router.completion("vision", HELLO)
    assert supported(provider.model) == (True, True, True, True, True, False)


def test_values_of_the_user_are_kept(scripted):
    provider = scripted("Yes.")
    litellm.register_model({provider.model: {"input_cost_per_token": 1e-6, "supports_vision": False}})
    litellm.completion(provider.model, messages=HELLO)
    assert litellm.model_cost[provider.model]["input_cost_per_token"] == 1e-6
    assert not litellm.supports_vision(provider.model)
    assert litellm.supports_function_calling(provider.model)


def test_decoder_without_vision_is_reported(scripted, monkeypatch):
    monkeypatch.setattr(ScriptedDecoder, "unsupported_vision_reason", "It has no vision.")
    provider = scripted("Yes.")
    name = provider.model.partition("/")[0]
    options = {"engine_options": {"model": provider.model.partition("/")[2]}}
    litellm.completion(f"{name}/blind", messages=HELLO, **options)
    assert not litellm.supports_vision(f"{name}/blind")
    assert litellm.supports_function_calling(f"{name}/blind")


def test_model_info_follows_the_capabilities():
    name = "dashinfer_vlm/images-only"
    profile = Profile(videos=False, tools=False, reasoning=True)
    capabilities = Capabilities(profile=profile, max_model_len=100, guided_decoding=True)
    register_model_info(name, capabilities)
    register_model_info(name, replace(capabilities, max_model_len=50))
    known = litellm.model_cost[name]
    assert (known["max_input_tokens"], known["supports_video_input"]) == (50, False)
    assert supported(name) == (True, False, False, False, True, True)
