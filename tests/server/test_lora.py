"""LoRA adapters over HTTP: the list of models, requests that name one, and the adapters for other libraries."""

from __future__ import annotations

import openai
import pytest

from dashinfer_vlm_core.testing import EVERYTHING
from tests.lora_folders import write_lora

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def served(scripted, tiny_checkpoint, tmp_path):
    folder = write_lora(tmp_path / "trained", tiny_checkpoint, ("q_proj",))
    return scripted("Yes.", "No.", supported_params=EVERYTHING, lora={"sql": str(folder)})


def test_loras_are_listed_with_their_parent(served):
    with served.server.http() as client:
        listed = client.get("/v1/models").json()["data"]
        assert client.get("/v1/models/sql").json() == listed[1]
    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        ("tiny", "tiny", None),
        ("sql", "trained", "tiny"),
    ]


def test_request_names_lora(served):
    with served.server.openai() as client:
        adapted = client.chat.completions.create(model="sql", messages=HELLO)
        plain = client.chat.completions.create(model="tiny", messages=HELLO)
        chunks = list(client.chat.completions.create(model="sql", messages=HELLO, stream=True))
    assert [adapted.model, plain.model, {chunk.model for chunk in chunks}] == ["sql", "tiny", {"sql"}]
    used = [request.lora.name if request.lora else None for request in served.script.requests]
    assert used == ["sql", None, "sql"]


def test_unknown_name_is_404(served):
    with served.server.openai() as client, pytest.raises(openai.NotFoundError, match="'no' is not served here"):
        client.chat.completions.create(model="no", messages=HELLO)
    with served.server.http() as client:
        assert client.get("/v1/models/no").status_code == 404


def test_lora_request_is_ignored_in_json(served):
    """Paths come from code in the server's process only."""
    body = {"messages": HELLO, "lora_request": {"lora_name": "x", "lora_int_id": 1, "lora_path": "/etc"}}
    with served.server.http() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert served.script.requests[0].lora is None


def test_tokenize_accepts_name_of_lora(served):
    with served.server.http() as client:
        whole = client.post("/tokenize", json={"model": "sql", "messages": HELLO}).json()
        plain = client.post("/tokenize", json={"model": "tiny", "messages": HELLO}).json()
        text = client.post("/tokenize", json={"model": "sql", "prompt": "Hello"})
    assert whole["tokens"] == plain["tokens"]
    assert text.status_code == 200
