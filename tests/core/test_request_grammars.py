"""Grammars of requests: compiled in separate threads, in linear time, and only while somebody waits."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from dashinfer_vlm_core.errors import DeadlineExceeded, InvalidParameter
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.protocol.client import Client, current_client
from dashinfer_vlm_core.structured_output import request_grammars
from dashinfer_vlm_core.structured_output.grammar_compiler import GrammarCompiler
from dashinfer_vlm_core.structured_output.request_grammars import THREADS, RequestGrammars
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_core.tokenization.conversation import HERMES
from dashinfer_vlm_demo import CHECKPOINT
from tests.waiting import HANG, until

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def grammars():
    tokens = SimpleNamespace(stop=(TOKENIZER.token_to_id("<|im_end|>"),))
    spec = SimpleNamespace(vocab_size=TOKENIZER.get_vocab_size(), tokens=tokens, conversation=HERMES, coordinates=None)
    grammars = RequestGrammars(TOKENIZER, spec)
    yield grammars
    grammars.close()


def schema_request(properties, *, strict=True):
    schema = {"type": "object", "properties": properties}
    json_schema = {"name": "a", "schema": schema, "strict": strict}
    return ChatRequest.parse(
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": json_schema}}
    )


def broken_schema(count, label, *, strict=True):
    """Return a request with this many patterns, the last of which is invalid."""
    patterns = [*(f"^{label}{index}$" for index in range(count - 1)), "("]
    return schema_request(
        {f"p{index}": {"type": "string", "pattern": text} for index, text in enumerate(patterns)}, strict=strict
    )


def compile_grammar(grammars, request):
    return asyncio.run(grammars.compile(request, lambda _: False))


def compiled_characters(monkeypatch, work):
    """Return how much text was compiled."""
    counts = []
    matcher = GrammarCompiler._matcher

    def counting(self, text):
        counts.append(len(text))
        return matcher(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(GrammarCompiler, "_matcher", counting)
        work()
    return sum(counts)


@pytest.mark.parametrize("strict", [True, False])
def test_security_35_grammar_that_fails_costs_linear_time(grammars, monkeypatch, strict):
    def fail(count):
        if strict:
            with pytest.raises(InvalidParameter, match=rf"properties\.p{count - 1}\.pattern"):
                compile_grammar(grammars, broken_schema(count, f"{count}a"))
        else:
            assert compile_grammar(grammars, broken_schema(count, f"{count}b", strict=False)) is not None

    short, long = (compiled_characters(monkeypatch, lambda count=count: fail(count)) for count in (40, 160))
    assert long < 4.5 * short


@pytest.mark.parametrize("count", [1, 50])
def test_security_35_canceled_request_stops_compiling(grammars, monkeypatch, count):
    request = schema_request({f"p{index}": {"type": "string", "pattern": f"^c{index}$"} for index in range(count)})
    compiled = []

    async def cancel():
        loop = asyncio.get_running_loop()

        def compiles(_, text):
            compiled.append(text)
            loop.call_soon_threadsafe(task.cancel)
            until(task.done)
            return True

        monkeypatch.setattr(GrammarCompiler, "compiles", compiles)
        monkeypatch.setattr(GrammarCompiler, "compile", lambda *_, **__: compiled.append("the grammar"))
        task = asyncio.ensure_future(grammars.compile(request, lambda _: False))
        with pytest.raises(asyncio.CancelledError):
            await task
        await loop.run_in_executor(grammars._threads, time.sleep, 0)

    asyncio.run(cancel())
    grammars._threads.shutdown()
    assert len(compiled) == 1


def test_security_35_grammar_has_a_deadline(grammars, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(request_grammars, "COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(GrammarCompiler, "compiles", lambda *_: ended.wait(HANG))
    with pytest.raises(DeadlineExceeded, match="Make its schemas simpler"):
        compile_grammar(grammars, broken_schema(50, "d"))
    ended.set()


def test_security_35_grammars_do_not_delay_plain_requests(monkeypatch):
    waiting, ended = threading.Semaphore(0), threading.Event()

    def compiles(*_):
        waiting.release()
        return ended.wait(HANG)

    monkeypatch.setattr(GrammarCompiler, "compiles", compiles)
    patterns = [{"p0": {"type": "string", "pattern": f"^x{{1,{length}}}$"}} for length in range(1, 41)]
    with scripted_engine('{"p0":"x"}', max_batch_size=64) as engine:
        threads = [threading.Thread(target=engine.chat, args=(schema_request(each),)) for each in patterns]
        for thread in threads:
            thread.start()
        assert waiting.acquire(timeout=HANG)
        until(lambda: engine.stats().active_requests >= 40)
        try:
            assert engine.chat({"messages": MESSAGES, "max_tokens": 1}).choices[0].finish_reason == "length"
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def test_security_35_grammars_of_one_client_leave_a_thread_to_others(grammars, monkeypatch):
    begun, order = asyncio.Event(), []
    ended = threading.Event()

    def compiles(_, text):
        order.append(text)
        loop.call_soon_threadsafe(begun.set)
        return ended.wait(HANG)

    async def compile_as(client, label):
        current_client.set(Client(id=client))
        await grammars.compile(schema_request({"p": {"type": "string", "pattern": f"^{label}$"}}), lambda _: False)

    async def scene():
        nonlocal loop
        loop = asyncio.get_running_loop()
        alice = [asyncio.ensure_future(compile_as("alice", f"alice{index}")) for index in range(THREADS + 4)]
        await begun.wait()
        bob = asyncio.ensure_future(compile_as("bob", "bob"))
        try:
            await asyncio.to_thread(until, lambda: any("bob" in text for text in order))
            assert len(order) <= THREADS + 1
        finally:
            ended.set()
        await asyncio.gather(*alice, bob)

    loop = None
    monkeypatch.setattr(GrammarCompiler, "compiles", compiles)
    asyncio.run(scene())


def test_schemas_that_are_too_complex_together_are_widened(grammars, monkeypatch):
    """The parts compile, but not the whole."""
    compile_text = GrammarCompiler.compile

    def limited(self, rules, start, *, param):
        if r"\"a\"" in rules.text(start):
            raise InvalidParameter("Too complex.", param=param)
        return compile_text(self, rules, start, param=param)

    monkeypatch.setattr(GrammarCompiler, "compile", limited)
    properties = {"a": {"type": "integer"}}
    assert compile_grammar(grammars, schema_request(properties, strict=False)) is not None
    with pytest.raises(InvalidParameter, match="Too complex"):
        compile_grammar(grammars, schema_request(properties))


def test_widened_parts_are_logged_once_and_shortened(grammars, caplog):
    request = schema_request({"p" * 500: {"type": "string", "not": {}}, "e": {"enum": []}}, strict=False)
    for _ in range(3):
        compile_grammar(grammars, request)
    (record,) = [record for record in caplog.records if "cannot be guaranteed" in record.getMessage()]
    assert "response_format: properties.ppp" in record.getMessage()
    assert "'response_format: properties.e.enum'" in record.getMessage()
    assert len(record.getMessage()) < 300
