"""`batch`: OpenAI's batch files, and resuming after an interruption."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from dashinfer_vlm_cli.batch_files import BatchOutput, Entry, error_line, read_body, read_entries
from dashinfer_vlm_core.concurrency.tasks import run_concurrently
from dashinfer_vlm_core.errors import ConfigError, DecoderFailed, InvalidParameter, QueueFull
from tests.cli.conftest import run_process
from tests.pdfs import document
from tests.samples import data_url

URL = "/v1/chat/completions"


def line(custom_id, text="Hello", **body):
    body = {"messages": [{"role": "user", "content": text}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


@pytest.fixture
def requests(tmp_path):
    """Write a file of requests and return its path."""

    def write(*lines):
        path = tmp_path / "requests.jsonl"
        path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines))
        return path

    return write


def text_of(item):
    return item["response"]["body"]["choices"][0]["message"]["content"]


def read(path):
    return [json.loads(item) for item in path.read_text().splitlines()]


def test_output_line_has_openai_batch_format(run, server_url, requests, tmp_path):
    file = requests(line("one"), line("two"))
    result = run("batch", "--api-base", server_url("Yes."), file)
    assert result.exit_code == 0
    lines = read(tmp_path / "requests.responses.jsonl")
    assert {item["custom_id"] for item in lines} == {"one", "two"}
    for item in lines:
        assert item["id"].startswith("batch_req_")
        assert item["error"] is None
        assert item["response"]["status_code"] == 200
        assert item["response"]["request_id"] == item["response"]["body"]["id"]
        assert item["response"]["body"]["choices"][0]["message"]["content"] == "Yes."
    assert not (tmp_path / "requests.responses.errors.jsonl").exists()
    assert "2 completed, 0 completed before, 0 failed" in result.stderr


def test_request_with_a_document(run, server_url, requests, tmp_path):
    pages = data_url(document("One", "Two", size=(84, 84)), "application/pdf")
    url = server_url(lambda request: f"{len(request.spans)} pages.")
    file = requests(line("one", [{"type": "file", "file": {"file_data": pages}}]))
    assert run("batch", "--api-base", url, file).exit_code == 0
    (item,) = read(tmp_path / "requests.responses.jsonl")
    assert text_of(item) == "2 pages."


def test_failures_are_in_error_file_and_exit_code(run, server_url, requests, tmp_path):
    file = requests(line("good"), line("bad", temperature=9))
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    args = ("batch", "--api-base", server_url("Yes."), "-o", output, "--errors", errors, file)
    assert run(*args).exit_code == 1
    assert [item["custom_id"] for item in read(output)] == ["good"]
    (failure,) = read(errors)
    assert (failure["custom_id"], failure["response"]) == ("bad", None)
    assert (failure["error"]["code"], failure["error"]["param"]) == ("invalid_value", "temperature")


def test_rerun_retries_failed_requests_only(run, server_url, requests, tmp_path):
    file = requests(line("a"), line("b"), line("c"))
    url = server_url("Yes.", InvalidParameter("No."), "Yes.", "Now.")
    args = ("batch", "--concurrency", 1, "--api-base", url, file)
    assert run(*args).exit_code == 1
    result = run(*args)
    assert result.exit_code == 0
    assert "1 completed, 2 completed before, 0 failed" in result.stderr
    texts = {
        item["custom_id"]: item["response"]["body"]["choices"][0]["message"]["content"]
        for item in read(tmp_path / "requests.responses.jsonl")
    }
    assert texts == {"a": "Yes.", "b": "Now.", "c": "Yes."}
    assert "0 completed, 3 completed before" in run("batch", "--api-base", "http://127.0.0.1:9/v1", file).stderr


def test_changed_request_is_sent_again_and_later_response_counts(run, server_url, requests, tmp_path):
    url = server_url("Old.", "Old.", "New.")
    file = requests(line("a"), line("b"))
    output = tmp_path / "requests.responses.jsonl"
    assert run("batch", "--concurrency", 1, "--api-base", url, file).exit_code == 0
    output.chmod(0o640)
    result = run("batch", "--api-base", url, requests(line("a"), line("b", text="Goodbye")))
    assert result.exit_code == 0
    assert f"1 requests changed after their responses were written to {output} and are sent again.\n" in result.stderr
    assert "1 completed, 1 completed before, 0 failed" in result.stderr
    assert {item["custom_id"]: text_of(item) for item in read(output)} == {"a": "Old.", "b": "New."}
    assert output.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir() if "jsonl" in path.name) == [file.name, output.name]
    again = run("batch", "--api-base", "http://127.0.0.1:9/v1", file)
    assert "0 completed, 2 completed before" in again.stderr
    assert "sent again" not in again.stderr


def test_old_response_is_kept_until_new_one_arrives(run, server_url, requests, tmp_path):
    url = server_url("Old.", InvalidParameter("No."), "New.")
    output = tmp_path / "requests.responses.jsonl"
    for text, expected in (("Hello", ["Old."]), ("Goodbye", ["Old."]), ("Goodbye", ["Old.", "New."])):
        run("batch", "--api-base", url, requests(line("a", text=text)))
        assert [text_of(item) for item in read(output)] == expected


def test_line_id_ignores_key_order_and_escapes(requests):
    body = line("a", temperature=0.5, stop=["x", "é"])
    first = read_entries(requests(body))
    other = dict(reversed(body.items())) | {"body": dict(reversed(body["body"].items()))}
    assert [entry.line_id for entry in read_entries(requests(json.dumps(other, ensure_ascii=False)))] == [
        entry.line_id for entry in first
    ]


def test_read_body_rejects_file_changed_during_run(requests):
    (entry,) = read_entries(requests(line("a")))
    file = requests(line("a", text="Goodbye"))
    with pytest.raises(ConfigError, match="changed during the run"):
        read_body(file, entry)


@pytest.mark.slow
@pytest.mark.parametrize(
    "incomplete", ['{"id"', '{"id": "batch_req_1", "custom_id": "b', '{"id": "batch_req_1", "custom_id": "b"}']
)
def test_incomplete_last_line_is_dropped_and_request_sent_again(run, server_url, requests, tmp_path, incomplete):
    file = requests(line("a"), line("b"))
    output = tmp_path / "requests.responses.jsonl"
    url = server_url("Yes.")
    run("batch", "--api-base", url, file)
    first, second = output.read_text().splitlines()
    complete = first if json.loads(first)["custom_id"] == "a" else second
    output.write_text(f"{complete}\n{incomplete}")
    assert run("batch", "--api-base", url, file).exit_code == 0
    assert sorted(item["custom_id"] for item in read(output)) == ["a", "b"]


@pytest.mark.slow
def test_transient_errors_are_retried(run, server_url, requests):
    url = server_url(QueueFull("Busy.", retry_after=0.01), DecoderFailed("It died."), "Yes.")
    assert run("batch", "--api-base", url, "--retries", 2, requests(line("a"))).exit_code == 0
    url = server_url(QueueFull("Busy.", retry_after=0.01), "Yes.")
    assert run("batch", "--api-base", url, "--retries", 0, requests(line("b"))).exit_code == 1


def test_run_concurrently_respects_limit():
    running, counts, done = set(), [], []

    async def work(item):
        running.add(item)
        counts.append(len(running))
        await asyncio.sleep(0.001)
        running.remove(item)
        done.append(item)

    asyncio.run(run_concurrently(range(20), work, max_concurrency=3))
    assert (max(counts), sorted(done)) == (3, list(range(20)))


def test_run_concurrently_cancels_all_on_first_exception():
    finished = []

    async def work(item):
        try:
            await asyncio.sleep(0 if item == 2 else 60)
        finally:
            finished.append(item)
        raise ConfigError("The disk is full.")

    with pytest.raises(ConfigError, match="The disk is full"):
        asyncio.run(run_concurrently(range(20), work, max_concurrency=3))
    assert sorted(finished) == [0, 1, 2]


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[]", "line 2 has no custom_id"),
        (json.dumps({"method": "POST", "url": URL, "body": {}}), "line 2 has no custom_id"),
        (json.dumps(line("a")), "line 2: the custom_id 'a' is also used in line 1"),
        (json.dumps(line("b") | {"url": "/v1/embeddings"}), "line 2: `method` must be POST, and `url` must be"),
        (json.dumps(line("b", stream=True)), "line 2: `body` must be a chat completion request without `stream`"),
        (json.dumps(line("b") | {"body": None}), "line 2: `body` must be"),
    ],
)
def test_read_entries_rejects_invalid_line(requests, invalid, message):
    with pytest.raises(ConfigError, match=message):
        read_entries(requests(line("a"), invalid))


def test_blank_lines_are_skipped(requests):
    assert [entry.custom_id for entry in read_entries(requests(line("a"), "", line("b")))] == ["a", "b"]


@pytest.mark.parametrize("text", ["precious\n", "precious", json.dumps(line("a")) + "\n", '{"id": "mine"}\n{"id"'])
@pytest.mark.parametrize("overwrite", [False, True], ids=["responses", "failures"])
def test_unrelated_output_file_is_rejected_unchanged(tmp_path, text, overwrite):
    (tmp_path / "out.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="line 1 is not an output line of a batch"):
        BatchOutput(tmp_path / "out.jsonl", overwrite=overwrite)
    assert (tmp_path / "out.jsonl").read_text() == text


def test_device_as_output_is_rejected():
    with pytest.raises(ConfigError, match="is not a regular file"):
        BatchOutput(Path("/dev/null"))


def test_output_file_is_locked(tmp_path):
    with BatchOutput(tmp_path / "out.jsonl"), pytest.raises(ConfigError, match="is being written by another process"):
        BatchOutput(tmp_path / "out.jsonl")
    BatchOutput(tmp_path / "out.jsonl").close()


def test_output_in_missing_folder_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        BatchOutput(tmp_path / "none" / "out.jsonl")


def test_output_truncated_anywhere_loses_no_response(tmp_path):
    path = tmp_path / "out.jsonl"
    entries = [Entry(custom_id=f"é\udc80{index}", offset=0, line_id=f"batch_req_{index}") for index in range(20)]
    lines = [error_line(entry, QueueFull("Busy.")) for entry in entries]
    with BatchOutput(path) as batch_output:
        for item in lines:
            batch_output.append(item)
    data = path.read_bytes()
    for cut in random.Random(0).sample(range(len(data)), 40):
        path.write_bytes(data[:cut])
        with BatchOutput(path) as batch_output:
            assert data[:cut].count(b"\n") == len(batch_output.completed)
            for item in lines:
                if item["custom_id"] not in batch_output.completed:
                    batch_output.append(item)
        assert path.read_bytes() == data


@pytest.mark.slow
def test_ctrl_c_keeps_completed_responses(terminal, server_url, requests, tmp_path):
    file = requests(*(line(str(index)) for index in range(50)))
    url = server_url("Yes.", delay=0.05)
    program = terminal("batch", "--concurrency", 1, "--api-base", url, file)
    program.wait_for("3/50")
    program.type("\x03")
    program.wait_for("Run the command again to resume")
    assert program.wait() == 130
    done = len(read(tmp_path / "requests.responses.jsonl"))
    assert 3 <= done < 50
    result = run_process("batch", "--api-base", server_url("Yes."), file)
    assert f"{50 - done} completed, {done} completed before, 0 failed" in result.stderr
    assert result.returncode == 0
