"""`embed`: a row per image, page, text file and text; bad files, and resuming after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dashinfer_vlm_cli.engines import EngineSource
from dashinfer_vlm_core import VLM
from dashinfer_vlm_core.errors import CheckpointError, ConfigError
from tests.conversations import as_openai, blurred_image, user
from tests.pdfs import document
from tests.pooling.checkpoints import write_embedding
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint
from tests.samples import data_url
from tests.server.conftest import serving
from tests.waiting import until

IMAGE = blurred_image(1)
SIZE = (84, 84)
VIDEO = Path(__file__).parents[2] / "examples/pictures/moving.mp4"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def vlm(base, tmp_path_factory):
    folder = write_embedding(base, tmp_path_factory.mktemp("model") / "embedding")
    with VLM(folder, device="cpu", dtype="float32", kv_cache_mib=64) as vlm:
        yield vlm


@pytest.fixture(scope="module")
def server(vlm):
    with serving(vlm.engine) as server:
        yield server


@pytest.fixture
def embed(run, server, tmp_path):
    """Run the command with the server, and return its result: `embed(file, "--text", "A dog.")`."""
    return lambda *args: run("embed", *args, "-o", tmp_path / "out.npy", "--api-base", f"{server.url}/v1")


@pytest.fixture
def files(tmp_path):
    """An image, a document with three pages, and a text."""
    IMAGE.save(tmp_path / "photo.png")
    (tmp_path / "report.pdf").write_bytes(document("One", "Two", "Three", size=SIZE))
    (tmp_path / "note.md").write_text("A dog.")
    return [tmp_path / name for name in ("photo.png", "report.pdf", "note.md")]


def rows(folder):
    """Return the vectors by what they are of."""
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    vectors = np.load(folder / "out.npy")
    assert vectors.shape == (len(lines), 64)
    assert [line["row"] for line in lines] == list(range(len(lines)))
    return {
        (Path(line["file"]).name if "file" in line else line["text"], line.get("page")): vector
        for line, vector in zip(lines, vectors, strict=True)
    }


def test_rows_equal_the_embeddings_of_vlm(embed, files, vlm, tmp_path):
    result = embed(*files, VIDEO, "--text", "A cat.", "--text", "A cat.")
    assert result.exit_code == 0, result.output
    assert f"7 rows computed, 0 failed. Rows: {tmp_path}/out.jsonl" in result.output
    found = rows(tmp_path)
    assert set(found) == {
        ("photo.png", None),
        *(("report.pdf", page) for page in (1, 2, 3)),
        ("note.md", None),
        ("moving.mp4", None),
        ("A cat.", None),
    }
    conversations = [as_openai([user(each)]) for each in (IMAGE, "A dog.", "A cat.")]
    expected = [output.outputs.embedding for output in vlm.embed(conversations, use_tqdm=False)]
    same = [found["photo.png", None], found["note.md", None], found["A cat.", None]]
    np.testing.assert_allclose(same, expected, atol=1e-5)
    file = data_url(files[1].read_bytes(), "application/pdf")
    page = {"type": "file", "file": {"file_data": file, "pages": "2", "render": "image"}}
    request = {"messages": [{"role": "user", "content": [page]}]}
    np.testing.assert_allclose([found["report.pdf", 2]], vlm.engine.embed(request).values, atol=1e-5)


def test_instruction_and_dimensions_are_sent(embed, vlm, tmp_path):
    with pytest.raises(ConfigError, match=r"^`--dimensions` is 32, but embeddings of this model have 64 dimensions"):
        embed("--text", "A cat.", "--dimensions", "32")
    words = ("--text", "A dog.", "--instruction", "Find it.", "--dimensions")
    assert embed(*words, "64").exit_code == 0
    expected = vlm.engine.embed({"input": "A dog.", "instruction": "Find it."}).values
    np.testing.assert_allclose([rows(tmp_path)["A dog.", None]], expected, atol=1e-5)
    with pytest.raises(ConfigError, match=r"has vectors with 64 dimensions, not with 32"):
        embed(*words, "32")  # there is nothing to compute


def test_bad_files_do_not_end_the_others(embed, files, tmp_path):
    bad = {"bad.pdf": b"%PDF-1.7", "bad.png": b"PNG", "bad.bin": b"\xff\xff", "empty.txt": b""}
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    result = embed(*(tmp_path / name for name in bad), *files)
    assert result.exit_code == 1
    assert len(rows(tmp_path)) == 5
    assert "5 rows computed, 4 failed." in result.output
    assert f"{tmp_path}/bad.pdf: This is not a complete PDF with at least one page." in result.output
    assert f"{tmp_path}/bad.bin: This is neither text in UTF-8" in result.output
    assert f"{tmp_path}/empty.txt: The file is empty" in result.output
    assert result.output.count(f"{tmp_path}/bad.png: ") == 1


@pytest.mark.parametrize("page", [1, 2])
def test_bad_page_does_not_end_the_document(embed, files, tmp_path, page):
    pieces = files[1].read_bytes().split(b"0 0 84 84")
    files[1].write_bytes(b"0 0 84 84".join(pieces[:page]) + b"0 0 84 99999" + b"0 0 84 84".join(pieces[page:]))
    result = embed(files[1])
    assert "2 rows computed, 1 failed." in result.output
    assert f"report.pdf, page {page}: Page {page} of the document" in result.output
    assert set(rows(tmp_path)) == {("report.pdf", number) for number in {1, 2, 3} - {page}}


def test_second_run_computes_what_is_missing(embed, files, tmp_path):
    embed(files[0])
    before = rows(tmp_path)
    result = embed(*files)
    assert "4 rows computed, 0 failed." in result.output
    np.testing.assert_array_equal(rows(tmp_path)["photo.png", None], before["photo.png", None])
    vectors = (tmp_path / "out.npy").read_bytes()
    (tmp_path / "out.npy").write_bytes(vectors.replace(b"(5, 64)", b"(4, 64)", 1))  # as after an interruption
    assert "0 rows computed, 0 failed." in embed(*files).output
    assert len(rows(tmp_path)) == 5
    lines = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(lines[:-5])  # the same
    assert "1 row computed, 0 failed." in embed(*files).output
    assert (tmp_path / "out.jsonl").read_text().count('"pages": 3') == 3
    assert len(rows(tmp_path)) == 5
    files[2].write_text("A cat.")
    assert "note.md has changed since its rows were computed" in embed(*files).output


@pytest.mark.slow
def test_ctrl_c_keeps_rows_and_the_next_run_resumes(terminal, embed, server, tmp_path):
    texts = [word for index in range(300) for word in ("--text", f"Text {index}")]
    program = terminal("embed", *texts, "-o", tmp_path / "out.npy", "--api-base", f"{server.url}/v1")
    until(lambda: (tmp_path / "out.jsonl").exists() and (tmp_path / "out.jsonl").stat().st_size)
    program.type("\x03")
    program.wait_for("Run the command again to resume")
    assert program.wait() == 130
    done = len(rows(tmp_path))
    assert 0 < done < 300
    assert f"{300 - done} rows computed, 0 failed." in embed(*texts).output
    assert len(rows(tmp_path)) == 300


def write_other(folder):
    np.save(folder / "out.npy", np.zeros((4, 2), np.float32))


def leave_only_matrix_of_a_row(folder):
    delete_lines(folder)
    np.save(folder / "out.npy", np.zeros((1, 2), np.float32))


def write_foreign_lines(folder):
    (folder / "out.jsonl").write_text('{"name": 1}\n')


def delete_lines(folder):
    (folder / "out.jsonl").unlink()


def delete_vectors(folder):
    (folder / "out.npy").unlink()


@pytest.mark.parametrize(
    "change", [write_other, leave_only_matrix_of_a_row, write_foreign_lines, delete_lines, delete_vectors]
)
def test_other_files_are_not_overwritten(embed, tmp_path, change):
    embed("--text", "A dog.", "--text", "A cat.")
    change(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out.*") if path.stat().st_size}
    with pytest.raises(ConfigError, match=r"Move|Choose another"):
        embed("--text", "Rain.")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out.*") if path.stat().st_size} == before


def test_vectors_of_another_model_are_an_error(run, embed, base, tmp_path):
    """In this process, a model that generates text is used for embeddings."""
    embed("--text", "A dog.")
    options = ("--model", base, "--dtype", "float32", "--kv-cache-mib", "64", "--device", "cpu")
    for text in ("A dog.", "A cat."):
        with pytest.raises(ConfigError, match=r"out\.npy has vectors of 'embedding', not of 'tiny'\. Choose another"):
            run("embed", "--text", text, "-o", tmp_path / "out.npy", *options)
    assert run("embed", "--text", "A cat.", "-o", tmp_path / "other.npy", *options).exit_code == 0


def test_run_without_rows_leaves_no_files(embed, run, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert "0 rows computed, 1 failed." in embed(tmp_path / "empty.txt").output
    assert not list(tmp_path.glob("out.*"))
    with pytest.raises(CheckpointError):
        run("embed", "--text", "a", "-o", tmp_path / "out.npy", "--model", tmp_path)
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.parametrize("rows", [0, 1])
def test_run_without_rows_keeps_files_of_the_user(embed, tmp_path, rows):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "out.jsonl").touch()
    np.save(tmp_path / "out.npy", np.ones((rows, 8), np.float32))
    before = (tmp_path / "out.npy").read_bytes()
    assert "0 rows computed, 1 failed." in embed(tmp_path / "empty.txt").output
    assert (tmp_path / "out.jsonl").exists()
    assert (tmp_path / "out.npy").read_bytes() == before


def test_model_is_not_loaded_if_nothing_is_to_do(embed, files, tmp_path, monkeypatch):
    arguments = (*files, "--text", "A cat.")
    assert embed(*arguments).exit_code == 0
    monkeypatch.setattr(EngineSource, "open", lambda _: pytest.fail("the model was loaded"))
    result = embed(*arguments)
    assert (result.exit_code, "0 rows computed, 0 failed." in result.output) == (0, True)


def test_model_with_another_task_ends_the_run(run, server_url, tmp_path):
    text = r"'tiny' generates text, so .* `--task embed`.* Qwen/Qwen3-VL-Embedding-2B"
    with pytest.raises(ConfigError, match=text):
        run("embed", "--text", "a", "-o", tmp_path / "out.npy", "--api-base", server_url("Yes."))


def test_arguments_are_checked(run, tmp_path):
    assert "A --text is empty" in run("embed", "--text", "", "-o", tmp_path / "out.npy").output
    assert "Pass FILES or --text" in run("embed", "-o", tmp_path / "out.npy").output
    with pytest.raises(ConfigError, match=r"must end with \.npy"):
        run("embed", "--text", "a", "-o", tmp_path / "out.txt")
