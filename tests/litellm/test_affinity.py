"""Sticky routing by media: the callback alone, and in LiteLLM's Router."""

from __future__ import annotations

import asyncio
import base64
import io
from collections import Counter

import litellm
import pytest
from PIL import Image

from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_litellm import media_affinity
from dashinfer_vlm_litellm.affinity import media_key, rendezvous_score
from tests.cases import cases
from tests.litellm.conftest import HELLO

SERVERS = ("server-1", "server-2", "server-3")


def image(shade):
    """Return a content part with a gray image of its own."""
    file = io.BytesIO()
    Image.new("L", (28, 28), shade).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def order_of(messages, servers=SERVERS):
    """Return the servers in the order in which requests with these messages use them."""
    key = media_key(messages)
    return sorted(servers, key=lambda name: rendezvous_score(key, name), reverse=True)


def shade_for(server):
    """Return a gray level whose image belongs to a server."""
    return next(shade for shade in range(256) if order_of(user(image(shade)))[0] == server)


URL = "https://example.com/a.png"
SAME = {
    "data URL": {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
    "string": {"type": "image_url", "image_url": "DATA:image/jpeg;base64,QUJD"},
    "options": {"type": "image_url", "image_url": {"url": "data:;base64,QUJD", "detail": "low"}, "max_pixels": 5},
    "file": {"type": "file", "file": {"file_data": "QUJD", "format": "image/png"}},
    "Responses API": {"type": "input_image", "image_url": "data:image/png;base64,QUJD"},
    "Messages API": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
    "frames": {"type": "video_url", "video_url": {"url": [{"url": "data:image/png;base64,QUJD"}, {"url": URL}]}},
}
DIFFERENT = {
    "URL": {"type": "image_url", "image_url": {"url": URL}},
    "other URL": {"type": "image_url", "image_url": {"url": f"{URL}?2"}},
    "video": {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
    "base64": {"type": "input_video", "input_video": {"data": "QUJE"}},
    "file ID": {"type": "input_image", "file_id": "file-1"},
    "uuid": {"type": "image_url", "image_url": {"url": URL}, "uuid": "first"},
    "embeddings": {"type": "image_embeds", "image_embeds": {"image_embeds": "QUJF"}},
}
NO_MEDIA = {
    "none": None,
    "string": "Hello",
    "text": HELLO,
    "text part": [{"role": "user", "content": [{"type": "text", "text": "Hi", "url": URL}]}],
    "invalid": [5, {"content": [None, {"type": ["image_url"]}, {"type": "image_url", "image_url": [[URL]]}]}],
    "deep": [{"content": [{"type": "file", "file": {"file": {"file": {"file": {"file": {"url": URL}}}}}}]}],
}


@cases("part", SAME.values())
def test_key_is_equal_for_same_content(part):
    assert media_key(user(part)) == media_key(user(SAME["data URL"]))


def test_keys_of_different_media_differ():
    parts = [SAME["data URL"], *DIFFERENT.values()]
    assert len({media_key(user(part)) for part in parts} - {None}) == len(parts)


@cases("messages", NO_MEDIA.values())
def test_messages_without_media_have_no_key(messages):
    assert media_key(messages) is None


def test_conversation_keeps_key_of_its_first_image():
    first = user(DIFFERENT["uuid"])
    alone = user({"type": "image_url", "uuid": "first"})
    longer = [*HELLO, *alone, {"role": "assistant", "content": "A."}, *user(DIFFERENT["URL"])]
    assert media_key(first) == media_key(alone) == media_key(longer)


def test_clients_with_different_salts_have_different_keys():
    messages = user(DIFFERENT["uuid"])
    assert len({media_key(messages, salt) for salt in (None, "a", "b")}) == 3
    assert media_key(messages, "") == media_key(messages, ["invalid"]) == media_key(messages)
    owners = {chosen(deployments(), messages, cache_salt=f"{index}")[0] for index in range(20)}
    assert owners == set(SERVERS)


def test_only_keys_of_removed_server_move():
    names = [f"server-{index}" for index in range(5)]
    keys = [media_key(user({"type": "image_url", "image_url": f"{URL}?{index}"})) for index in range(1000)]

    def owners(servers):
        return [max(servers, key=lambda name: rendezvous_score(key, name)) for key in keys]

    before, after = owners(names), owners(names[1:])
    moved = Counter(new for old, new in zip(before, after, strict=True) if old == names[0])
    assert all(old == new for old, new in zip(before, after, strict=True) if old != names[0])
    assert all(150 <= count <= 250 for count in Counter(before).values())
    assert len(moved) == 4
    assert all(count >= 30 for count in moved.values())


def test_keys_are_distributed_by_weight():
    keys = [media_key(user({"type": "image_url", "image_url": f"{URL}?{index}"})) for index in range(3000)]
    weights = {"small": 1, "large": 2}
    owners = Counter(max(weights, key=lambda name: rendezvous_score(key, name, weights[name])) for key in keys)
    assert 1900 <= owners["large"] <= 2100


def deployments(**params):
    return [{"litellm_params": {"model": "openai/qwen", **params}, "model_info": {"id": name}} for name in SERVERS]


def chosen(healthy, messages=None, **request):
    filtered = media_affinity.async_filter_deployments(
        model="qwen", healthy_deployments=healthy, messages=messages, request_kwargs=request
    )
    return [each["model_info"]["id"] for each in asyncio.run(filtered)]


def test_request_with_media_goes_to_one_server():
    messages = user(image(1))
    assert chosen(deployments(), messages) == order_of(messages)[:1]
    assert chosen(deployments(), None, input=messages) == order_of(messages)[:1]  # the Responses API


@pytest.mark.parametrize(
    ("change", "messages", "request_"),
    [
        ({}, HELLO, {}),
        ({}, user(image(1)), {"previous_response_id": "resp_1"}),
        ({"media_affinity": False}, user(image(1)), {}),
    ],
    ids=["no media", "stored response", "disabled"],
)
def test_request_is_not_affected(change, messages, request_):
    healthy = deployments()
    healthy[0]["model_info"].update(change)
    assert chosen(healthy, messages, **request_) == list(SERVERS)


@pytest.mark.parametrize(
    "attempts",
    [
        lambda failed: {"metadata": {"previous_models": ({"deployment_id": failed},)}},
        lambda failed: {"litellm_metadata": {"previous_models": [{"deployment_id": failed}, None]}},
        lambda failed: {"_excluded_deployment_ids": [failed]},
        lambda failed: {"_retry_skipped_deployment_ids": (failed,)},
    ],
    ids=["retry", "retry of a response", "failover", "refused"],
)
def test_retry_goes_to_next_server_of_image(attempts):
    messages = user(image(1))
    first, second, _ = order_of(messages)
    assert chosen(deployments(), messages, **attempts(first)) == [second]


def test_request_that_failed_everywhere_starts_again():
    messages = user(image(1))
    failed = {"metadata": {"previous_models": [{"deployment_id": name} for name in SERVERS]}}
    assert chosen(deployments(), messages, **failed) == order_of(messages)[:1]


def test_order_and_weight_of_deployments_are_respected():
    messages = user(image(1))
    first, second, third = order_of(messages)
    healthy = {each["model_info"]["id"]: each for each in deployments(order=2)}
    healthy[third]["litellm_params"]["order"] = 1
    assert set(chosen(list(healthy.values()), messages)) == {first, third}  # LiteLLM selects by order afterwards
    for name, weight in ((first, 0), (second, 5), (third, 0)):
        healthy[name]["litellm_params"] = {"weight": weight}
    assert chosen(list(healthy.values()), messages) == [second]


@pytest.fixture
def router(scripted, monkeypatch):
    """Create a Router over scripted providers, which are the servers by name."""
    monkeypatch.setattr(litellm, "callbacks", [media_affinity])

    def start(**servers):
        providers = {name.replace("_", "-"): scripted(response) for name, response in servers.items()}
        made = litellm.Router(
            model_list=[
                {"model_name": "qwen", "litellm_params": {"model": each.model}, "model_info": {"id": name}}
                for name, each in providers.items()
            ],
            num_retries=2,
            retry_after=0,
        )
        return made, {name: each.script for name, each in providers.items()}

    return start


def test_router_sends_same_image_to_same_provider(router):
    made, scripts = router(server_1="A.", server_2="B.", server_3="C.")
    first = user(image(1))
    later = [*first, {"role": "assistant", "content": "A."}, {"role": "user", "content": "Why?"}]

    async def main():
        for messages in (first, later, first, later):
            await made.acompletion("qwen", messages=messages)

    asyncio.run(main())
    assert [len(scripts[name].requests) for name in order_of(first)] == [4, 0, 0]


def test_router_retries_on_next_provider_of_image(router):
    messages = user(image(1))
    first, second, third = order_of(messages)
    responses = {first: DecoderFailed("Dead."), second: "Yes.", third: "No."}
    made, _ = router(**{name.replace("-", "_"): response for name, response in responses.items()})
    response = asyncio.run(made.acompletion("qwen", messages=messages))
    assert response.choices[0].message.content == "Yes."
