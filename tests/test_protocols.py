"""`benchmarks.protocols` measures whole responses; nothing here measures speed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from benchmarks import protocols
from benchmarks.scripted_server import CALL, CALL_TOP_P, TEXT, TEXT_TOKENS, respond
from dashinfer_vlm_core.decoders import DecodeRequest, Sampling
from dashinfer_vlm_demo import CHECKPOINT
from tests.cases import cases


@cases(("top_p", "text"), [(1.0, TEXT), (CALL_TOP_P, CALL)])
def test_length_of_a_response_does_not_make_it_a_tool_call(top_p, text):
    sampling = Sampling(max_tokens=99, top_p=top_p)
    request = DecodeRequest(id="1", token_ids=np.zeros(1, int), positions=np.zeros((3, 1), int), sampling=sampling)
    assert respond(request) == text


def test_more_tokens_than_the_text_has_are_rejected(capsys):
    assert len(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(TEXT).ids) >= TEXT_TOKENS
    with pytest.raises(SystemExit):
        protocols.main(["--tokens", str(TEXT_TOKENS + 1)])
    assert f"2 to {TEXT_TOKENS} tokens" in capsys.readouterr().err


@cases("error", [b'{"error":"Busy."}', b'data: {"error": {"message": "Busy."}}'])
def test_error_within_a_stream_is_found(error):
    async def answer(request):
        return web.Response(body=error if request.path == "/fails" else b'{"error":null}')

    async def post():
        application = web.Application()
        application.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        try:
            async with aiohttp.ClientSession() as session:
                client = protocols.Client(session, SimpleNamespace(base=f"http://{host}:{port}/v1"))
                assert await client.post("/", {})
                await client.post("/fails", {})
        finally:
            await runner.cleanup()

    with pytest.raises(RuntimeError, match="/fails: HTTP 200"):
        asyncio.run(post())
