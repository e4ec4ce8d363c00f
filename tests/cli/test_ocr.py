"""`ocr`: Markdown per file, bad pages, and resuming after an interruption."""

from __future__ import annotations

import json

import pytest

from dashinfer_vlm_core.errors import CheckpointError, ConfigError, DecoderFailed, EngineClosed
from tests.cli.conftest import run_process
from tests.pdfs import document
from tests.samples import encode, noise

SIZE = (84, 84)


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.pdf"
    path.write_bytes(document("One", "Two", "Three", size=SIZE))
    return path


def lines(folder):
    return [json.loads(line) for line in (folder / "pages.jsonl").read_text().splitlines()]


def test_each_file_becomes_markdown(run, server_url, report, tmp_path):
    (tmp_path / "photo.png").write_bytes(encode(noise(84, 84)))
    folder = tmp_path / "text" / "new"
    result = run("ocr", report, tmp_path / "photo.png", "-o", folder, "--api-base", server_url("# Page"))
    assert result.exit_code == 0, result.output
    assert (folder / "report.md").read_text() == "# Page\n\n" * 3
    assert (folder / "photo.md").read_text() == "# Page\n\n"
    assert "4 pages converted, 0 failed." in result.output
    pages = [(line["index"], line["total_pages"], line["markdown"]) for line in lines(folder) if "pdf" in line["file"]]
    assert pages == [(index, 3, "# Page") for index in range(3)]


def test_failed_page_is_converted_by_the_next_run(run, server_url, report, tmp_path):
    url = server_url(DecoderFailed("The decoder died."), "Yes.", "Yes.", "Now.")
    result = run("ocr", report, "-o", tmp_path, "--api-base", url)
    assert result.exit_code == 1
    failed = next(line["index"] for line in lines(tmp_path) if line["error"])
    assert f"{report}, page {failed + 1}: The decoder died." in result.output
    comment = f"<!-- Page {failed + 1}: The decoder died. -->"
    assert (tmp_path / "report.md").read_text().split("\n\n")[failed] == comment
    assert run("ocr", report, "-o", tmp_path, "--api-base", url).exit_code == 0
    assert (tmp_path / "report.md").read_text().split("\n\n")[failed] == "Now."
    assert len(lines(tmp_path)) == 4


def test_page_that_fails_again_is_reported_once(run, server_url, report, tmp_path):
    url = server_url(DecoderFailed("It died."), "Yes.", "Yes.", DecoderFailed("It died again."))
    run("ocr", report, "-o", tmp_path, "--api-base", url)
    result = run("ocr", report, "-o", tmp_path, "--api-base", url)
    assert (result.exit_code, f"{report}: It died again." in result.output) == (1, True)
    assert "0 pages converted, 1 failed." in result.output


def test_page_that_succeeds_in_a_retry_has_not_failed(run, server_url, report, tmp_path):
    responses = ["One.", DecoderFailed("The decoder died."), EngineClosed("It was closed."), "Two.", "Three."]
    url = server_url(*responses, max_batch_size=2)  # page by page
    result = run("ocr", report, "-o", tmp_path, "--api-base", url)
    assert (result.exit_code, "3 pages converted, 0 failed." in result.output) == (0, True)
    assert (tmp_path / "report.md").read_text() == "One.\n\nTwo.\n\nThree.\n\n"


def test_bad_file_does_not_end_the_others(run, server_url, report, tmp_path):
    bad = tmp_path / "bad.pdf"
    bad.write_bytes(b"%PDF-1.7")
    result = run("ocr", bad, report, "-o", tmp_path, "--api-base", server_url("Yes."))
    assert result.exit_code == 1
    assert f"{bad}: This is not a complete PDF with at least one page." in result.output
    assert (tmp_path / "report.md").read_text() == "Yes.\n\n" * 3
    assert not (tmp_path / "bad.md").exists()


@pytest.mark.slow
def test_document_with_more_pages_than_a_request_can_have(run, server_url, tmp_path):
    """Only the first and the last page have a size that can be rendered."""
    path = tmp_path / "law.pdf"
    box, good = b"[0 0 84 99999]", b"[0 0 84 00084]"
    data = document(*[""] * 1002, size=(84, 99999)).replace(box, good, 1)
    path.write_bytes(good.join(data.rsplit(box, 1)))
    result = run("ocr", path, "-o", tmp_path, "--api-base", server_url("Yes."))
    assert "2 pages converted, 1000 failed." in result.output
    assert [line["index"] for line in lines(tmp_path)] == [*range(1002)]


def test_converted_files_are_skipped_unless_they_change(run, server_url, report, tmp_path):
    run("ocr", report, "-o", tmp_path, "--api-base", server_url("First."))
    result = run("ocr", report, "-o", tmp_path, "--api-base", server_url("Second."))
    assert "0 pages converted, 0 failed." in result.output
    assert (tmp_path / "report.md").read_text() == "First.\n\n" * 3
    report.write_bytes(document("Other", size=SIZE))
    run("ocr", report, "-o", tmp_path, "--api-base", server_url("Second."))
    assert (tmp_path / "report.md").read_text() == "Second.\n\n"


def test_pages_of_an_equal_file_are_those_of_both_names(run, server_url, report, tmp_path):
    folder = tmp_path / "text"
    run("ocr", report, "-o", folder, "--api-base", server_url("First."))
    other = report.rename(tmp_path / "renamed.pdf")
    for _ in range(2):
        result = run("ocr", other, "-o", folder, "--api-base", server_url("Second."))
        assert (result.exit_code, "0 pages converted, 0 failed." in result.output) == (0, True)
        assert (folder / "renamed.md").read_text() == "First.\n\n" * 3
    assert [line["file"] for line in lines(folder)] == ["report.pdf"] * 3 + ["renamed.pdf"] * 3


def test_incomplete_last_line_is_converted_again(run, server_url, report, tmp_path):
    run("ocr", report, "-o", tmp_path, "--api-base", server_url("First."))
    data = (tmp_path / "pages.jsonl").read_bytes()
    (tmp_path / "pages.jsonl").write_bytes(data[:-5])
    result = run("ocr", report, "-o", tmp_path, "--api-base", server_url("Second."))
    assert "1 page converted" in result.output
    assert (tmp_path / "report.md").read_text() == "First.\n\nFirst.\n\nSecond.\n\n"


def test_other_files_of_the_folder_are_not_overwritten(run, report, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "report.png").write_bytes(encode(noise(84, 84)))
    with pytest.raises(ConfigError, match="would both become"):
        run("ocr", report, tmp_path / "b" / "report.png", "-o", tmp_path / "text")
    (tmp_path / "pages.jsonl").write_text('{"name": 1}\n')
    with pytest.raises(ConfigError, match=r"pages\.jsonl, line 1 is not a page"):
        run("ocr", report, "-o", tmp_path)


def test_folder_that_cannot_be_written_is_an_error(run, server_url, report, tmp_path):
    with pytest.raises(ConfigError, match=r"report\.pdf/text cannot be created: Not a directory"):
        run("ocr", report, "-o", report / "text")
    url = server_url("Yes.")
    run("ocr", report, "-o", tmp_path, "--api-base", url)
    (tmp_path / "report.md").unlink()
    (tmp_path / "report.md").mkdir()
    with pytest.raises(ConfigError, match=r"report\.md cannot be written: Is a directory"):
        run("ocr", report, "-o", tmp_path, "--api-base", url)


def test_markdown_of_another_program_is_not_overwritten(run, report, tmp_path):
    """Not even if pages of another file are in the folder. No model is loaded."""
    line = {"file": "report.png", "digest": "0", "total_pages": 1, "index": 0, "markdown": "Mine.", "error": None}
    (tmp_path / "pages.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "report.md").write_text("Mine.\n\n")
    with pytest.raises(ConfigError, match=r"report\.md exists, .* no page of report\.pdf.* Move it away") as caught:
        run("ocr", report, "-o", tmp_path, "--model", tmp_path / "missing")
    assert str(tmp_path / "report.md") in caught.value.message
    assert (tmp_path / "report.md").read_text() == "Mine.\n\n"
    (tmp_path / "report.md").rename(tmp_path / "mine.md")
    with pytest.raises(CheckpointError):
        run("ocr", report, "-o", tmp_path, "--model", tmp_path / "missing")


@pytest.mark.slow
def test_ctrl_c_keeps_pages_and_the_next_run_resumes(terminal, server_url, tmp_path):
    path = tmp_path / "long.pdf"
    path.write_bytes(document(*map(str, range(40)), size=SIZE))
    url = server_url("word " * 10, delay=0.05, max_batch_size=2)
    program = terminal("ocr", path, "-o", tmp_path, "--api-base", url)
    program.wait_for("3/40 [")
    assert " pages per minute, 0" in program.wait_for(" left]")
    program.type("\x03")
    program.wait_for("Run the command again to resume")
    assert program.wait() == 130
    done = len(lines(tmp_path))
    assert 3 <= done < 40
    result = run_process("ocr", path, "-o", tmp_path, "--api-base", server_url("Yes."))
    assert f"{40 - done} pages converted, 0 failed." in result.stderr
    assert result.returncode == 0
    assert (tmp_path / "long.md").read_text().split("\n\n").count(" ".join(["word"] * 10)) == done
