"""`batch`: OpenAI's batch files, and what is left of them after an interruption."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from dashinfer_vlm_cli.batch_files import BatchOutput, Entry, failed, read_body, read_entries
from dashinfer_vlm_cli.concurrency import run_concurrently
from dashinfer_vlm_core.errors import ConfigError, DecoderFailed, InvalidParameter, QueueFull
from tests.cli.conftest import process

URL = "/v1/chat/completions"


def line(custom_id, text="Hello", **body):
    body = {"messages": [{"role": "user", "content": text}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


@pytest.fixture
def requests(tmp_path):
    """Write a file of requests; its path."""

    def write(*lines):
        path = tmp_path / "requests.jsonl"
        path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines))
        return path

    return write


def told(item):
    return item["response"]["body"]["choices"][0]["message"]["content"]


def read(path):
    return [json.loads(item) for item in path.read_text().splitlines()]


def test_every_request_gets_a_line_of_openais_shape(run, address, requests, tmp_path):
    file = requests(line("one"), line("two"))
    result = run("batch", "--api-base", address("Yes."), file)
    assert result.exit_code == 0
    lines = read(tmp_path / "requests.answers.jsonl")
    assert {item["custom_id"] for item in lines} == {"one", "two"}
    for item in lines:
        assert item["id"].startswith("batch_req_")
        assert item["error"] is None
        assert item["response"]["status_code"] == 200
        assert item["response"]["request_id"] == item["response"]["body"]["id"]
        assert item["response"]["body"]["choices"][0]["message"]["content"] == "Yes."
    assert not (tmp_path / "requests.answers.errors.jsonl").exists()
    assert "2 answered, 0 were answered before, 0 failed" in result.stderr


def test_failures_stand_in_a_file_of_their_own_and_in_the_exit_code(run, address, requests, tmp_path):
    file = requests(line("good"), line("bad", temperature=9))
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    words = ("batch", "--api-base", address("Yes."), "-o", output, "--errors", errors, file)
    assert run(*words).exit_code == 1
    assert [item["custom_id"] for item in read(output)] == ["good"]
    (fault,) = read(errors)
    assert (fault["custom_id"], fault["response"]) == ("bad", None)
    assert (fault["error"]["code"], fault["error"]["param"]) == ("invalid_value", "temperature")


def test_what_was_answered_is_not_asked_again_and_what_failed_is(run, address, requests, tmp_path):
    file = requests(line("a"), line("b"), line("c"))
    url = address("Yes.", InvalidParameter("No."), "Yes.", "Now.")
    words = ("batch", "--concurrency", 1, "--api-base", url, file)
    assert run(*words).exit_code == 1
    result = run(*words)
    assert result.exit_code == 0
    assert "1 answered, 2 were answered before, 0 failed" in result.stderr
    texts = {
        item["custom_id"]: item["response"]["body"]["choices"][0]["message"]["content"]
        for item in read(tmp_path / "requests.answers.jsonl")
    }
    assert texts == {"a": "Yes.", "b": "Now.", "c": "Yes."}
    assert "0 answered, 3 were answered before" in run("batch", "--api-base", "http://127.0.0.1:9/v1", file).stderr


def test_a_request_that_was_changed_is_asked_again_and_has_one_answer(run, address, requests, tmp_path):
    url = address("Old.", "Old.", "New.")
    file = requests(line("a"), line("b"))
    output = tmp_path / "requests.answers.jsonl"
    assert run("batch", "--concurrency", 1, "--api-base", url, file).exit_code == 0
    output.chmod(0o640)
    result = run("batch", "--api-base", url, requests(line("a"), line("b", text="Goodbye")))
    assert result.exit_code == 0
    assert f"Changed since {output} answered them, and asked again: 1.\n" in result.stderr
    assert "1 answered, 1 were answered before, 0 failed" in result.stderr
    assert [(item["custom_id"], told(item)) for item in read(output)] == [("a", "Old."), ("b", "New.")]
    assert output.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir() if "jsonl" in path.name) == [output.name, file.name]
    again = run("batch", "--api-base", "http://127.0.0.1:9/v1", file)
    assert "0 answered, 2 were answered before" in again.stderr
    assert "Changed" not in again.stderr


def test_answers_that_were_replaced_before_an_interruption_are_dropped_by_the_next_run(
    run, address, requests, tmp_path
):
    output = tmp_path / "requests.answers.jsonl"
    for text in ("Hello", "Goodbye"):
        run("batch", "--api-base", address("Old.", "New."), requests(line("a", text=text)))
    new = output.read_text()
    output.write_text(new.replace("New.", "Old.") + new)  # as a run leaves it that is cut off before it drops any
    run("batch", "--api-base", "http://127.0.0.1:9/v1", requests(line("a", text="Goodbye")))
    assert output.read_text() == new


def test_an_old_answer_stays_until_there_is_a_new_one(run, address, requests, tmp_path):
    url = address("Old.", InvalidParameter("No."), "New.")
    output = tmp_path / "requests.answers.jsonl"
    for text, answers in (("Hello", ["Old."]), ("Goodbye", ["Old."]), ("Goodbye", ["New."])):
        run("batch", "--api-base", url, requests(line("a", text=text)))
        assert [told(item) for item in read(output)] == answers


def test_a_request_that_is_only_written_in_another_way_is_the_same(requests):
    body = line("a", temperature=0.5, stop=["x", "é"])
    first = read_entries(requests(body))
    other = dict(reversed(body.items())) | {"body": dict(reversed(body["body"].items()))}
    assert [entry.line_id for entry in read_entries(requests(json.dumps(other, ensure_ascii=False)))] == [
        entry.line_id for entry in first
    ]


def test_a_file_that_is_changed_while_it_is_read_is_named(requests):
    (entry,) = read_entries(requests(line("a")))
    file = requests(line("a", text="Goodbye"))
    with pytest.raises(ConfigError, match="was changed while it was read"):
        read_body(file, entry)


@pytest.mark.parametrize(
    "torn", ['{"id"', '{"id": "batch_req_1", "custom_id": "b', '{"id": "batch_req_1", "custom_id": "b"}']
)
def test_a_line_that_was_cut_off_is_dropped_and_asked_again(run, address, requests, tmp_path, torn):
    file = requests(line("a"), line("b"))
    output = tmp_path / "requests.answers.jsonl"
    url = address("Yes.")
    run("batch", "--api-base", url, file)
    first, second = output.read_text().splitlines()
    kept = first if json.loads(first)["custom_id"] == "a" else second
    output.write_text(f"{kept}\n{torn}")
    assert run("batch", "--api-base", url, file).exit_code == 0
    assert sorted(item["custom_id"] for item in read(output)) == ["a", "b"]


@pytest.mark.slow
def test_what_may_succeed_later_is_tried_again(run, address, requests):
    url = address(QueueFull("Busy.", retry_after=0.01), DecoderFailed("It died."), "Yes.")
    assert run("batch", "--api-base", url, "--retries", 2, requests(line("a"))).exit_code == 0
    url = address(QueueFull("Busy.", retry_after=0.01), "Yes.")
    assert run("batch", "--api-base", url, "--retries", 0, requests(line("b"))).exit_code == 1


def test_no_more_is_done_at_once_than_allowed():
    running, most, done = set(), [], []

    async def work(item):
        running.add(item)
        most.append(len(running))
        await asyncio.sleep(0.001)
        running.remove(item)
        done.append(item)

    asyncio.run(run_concurrently(range(20), work, at_once=3))
    assert (max(most), sorted(done)) == (3, list(range(20)))


def test_the_first_that_raises_ends_all():
    ended = []

    async def work(item):
        try:
            await asyncio.sleep(0 if item == 2 else 60)
        finally:
            ended.append(item)
        raise ConfigError("The disk is full.")

    with pytest.raises(ConfigError, match="The disk is full"):
        asyncio.run(run_concurrently(range(20), work, at_once=3))
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 has no custom_id"),
        (json.dumps({"method": "POST", "url": URL, "body": {}}), "line 2 has no custom_id"),
        (json.dumps(line("a")), "line 2: the custom_id 'a' is that of line 1 too"),
        (json.dumps(line("b") | {"url": "/v1/embeddings"}), "line 2: `method` has to be POST, and `url`"),
        (json.dumps(line("b", stream=True)), "line 2: `body` has to be the request, without `stream`"),
        (json.dumps(line("b") | {"body": None}), "line 2: `body` has to be"),
    ],
)
def test_a_file_is_checked_whole_before_the_first_is_asked(requests, bad, message):
    with pytest.raises(ConfigError, match=message):
        read_entries(requests(line("a"), bad))


def test_blank_lines_are_no_requests(requests):
    assert [entry.custom_id for entry in read_entries(requests(line("a"), "", line("b")))] == ["a", "b"]


@pytest.mark.parametrize("text", ["precious\n", "precious", json.dumps(line("a")) + "\n", '{"id": "mine"}\n{"id"'])
@pytest.mark.parametrize("fresh", [False, True], ids=["answers", "failures"])
def test_files_of_others_stay_as_they_are(tmp_path, text, fresh):
    (tmp_path / "out.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="line 1 is no answer of a batch"):
        BatchOutput(tmp_path / "out.jsonl", fresh=fresh)
    assert (tmp_path / "out.jsonl").read_text() == text


def test_a_device_is_no_file_to_go_on_with():
    with pytest.raises(ConfigError, match="is no file that a batch can go on with"):
        BatchOutput(Path("/dev/null"))


def test_two_batches_do_not_write_one_file(tmp_path):
    with BatchOutput(tmp_path / "out.jsonl"), pytest.raises(ConfigError, match="is being written by another batch"):
        BatchOutput(tmp_path / "out.jsonl")
    BatchOutput(tmp_path / "out.jsonl").close()


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        BatchOutput(tmp_path / "none" / "out.jsonl")


def test_wherever_a_run_was_cut_off_no_answer_is_lost_or_doubled(tmp_path):
    path = tmp_path / "out.jsonl"
    entries = [Entry(custom_id=f"é{index}", offset=0, line_id=f"batch_req_{index}") for index in range(20)]
    lines = [failed(entry, QueueFull("Busy.")) for entry in entries]
    with BatchOutput(path) as ledger:
        for item in lines:
            ledger.append(item)
    whole = path.read_bytes()
    for cut in random.Random(0).sample(range(len(whole)), 40):
        path.write_bytes(whole[:cut])
        with BatchOutput(path) as ledger:
            assert whole[:cut].count(b"\n") == len(ledger.done)
            for item in lines:
                if item["custom_id"] not in ledger.done:
                    ledger.append(item)
        assert path.read_bytes() == whole


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_answered(terminal, address, requests, tmp_path):
    file = requests(*(line(str(index)) for index in range(50)))
    url = address("Yes.", delay=0.05)
    program = terminal("batch", "--concurrency", 1, "--api-base", url, file)
    program.see("3/50")
    program.type("\x03")
    program.see("Run it again to go on")
    assert program.ended() == 130
    done = len(read(tmp_path / "requests.answers.jsonl"))
    assert 3 <= done < 50
    ended = process("batch", "--api-base", address("Yes."), file)
    assert f"{50 - done} answered, {done} were answered before, 0 failed" in ended.stderr
    assert ended.returncode == 0
