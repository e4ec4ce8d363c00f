"""`pull` and `run` with a hub that sends what it should, and with one that does not."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import huggingface_hub
import pytest

from dashinfer_vlm_cli.pull import interruptible
from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError, PluginError
from dashinfer_vlm_core.models.checkpoint import find_model
from dashinfer_vlm_core.models.hub import is_safe_path
from tests.hub import COMMIT, MAIN, endless, entry, halves, serve_hub, start
from tests.waiting import HANG, until

WEIGHTS = "model.safetensors"


def requested(hub, name=WEIGHTS):
    return [line for line in hub.asked if line.startswith("GET /maker") and name in line]


def left(repository):
    """Return the names of the blobs, and whether there is a snapshot."""
    blobs = {path.suffix for path in (repository / "blobs").glob("*")} if repository.exists() else set()
    return blobs, (repository / "snapshots").exists()


def test_pull_states_needs_downloads_and_verifies(run, hub, repository, tiny_checkpoint):
    result = run("pull", "maker/tiny")
    size = sum(path.stat().st_size for path in tiny_checkpoint.iterdir())
    assert f"maker/tiny: {size / 1e6:.1f} MB to download; needs 0." in result.stderr
    folder = repository / "snapshots" / COMMIT
    assert result.stdout == f"{folder}\n"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in tiny_checkpoint.iterdir()
    }
    assert all(path.is_symlink() for path in folder.iterdir())
    assert left(repository) == ({""}, True)
    hub.asked.clear()
    assert "maker/tiny is complete." in run("pull", "maker/tiny").stderr
    assert requested(hub, "") == []
    assert find_model("maker/tiny", registered={}) == folder


def test_cache_is_used_while_hub_fails(run, hub, repository, caplog):
    run("pull", "maker/tiny")
    hub.statuses["api"] = (503, "")
    assert find_model("maker/tiny", registered={}) == repository / "snapshots" / COMMIT
    assert "Using maker/tiny from the cache: " in caplog.text


@pytest.mark.parametrize("name", ["huggingface", "modelscope"])
def test_pull_of_complete_model_needs_no_hub(run, hub, repository, monkeypatch, name):
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hub.url)
    folder = run("pull", "maker/tiny", "--hub", name).stdout.strip()
    hub.mute = True
    result = run("pull", "maker/tiny", "--hub", name)
    assert result.stdout == f"{folder}\n"
    assert f"maker/tiny is complete as of its cached revision {folder[-40:]}. Whether there is a newer" in result.stderr
    Path(folder, WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"connection to .* was lost"):
        run("pull", "maker/tiny", "--hub", name)


def test_complete_model_in_read_only_cache_is_used(run, hub, repository):
    run("pull", "maker/tiny")
    (repository / "refs" / "main").unlink()
    (repository / "refs").rmdir()
    (repository / "refs").write_text("a file, so that nothing can be written to this folder, even by root")
    assert find_model("maker/tiny", registered={}) == repository / "snapshots" / COMMIT


def test_commit_of_branch_is_stored_for_later(run, hub, repository):
    run("pull", "maker/tiny", "--revision", COMMIT)
    assert not (repository / "refs").exists()
    find_model("maker/tiny", registered={})
    assert (repository / "refs" / "main").read_text() == COMMIT


def test_half_file_is_resumed(run, hub, repository, tiny_checkpoint):
    file = entry(tiny_checkpoint / WEIGHTS)
    partial = repository / "blobs" / f"{file['lfs']['oid']}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes((tiny_checkpoint / WEIGHTS).read_bytes()[:1000])
    assert run("pull", "maker/tiny").exit_code == 0
    assert [line.rpartition(" ")[2] for line in requested(hub)] == ["bytes=1000-"]
    assert left(repository) == ({""}, True)


def test_lost_connection_is_resumed(run, hub, repository, tiny_checkpoint):
    content = (tiny_checkpoint / WEIGHTS).read_bytes()

    def once(handler):
        del hub.bodies[WEIGHTS]
        halves(content)(handler)

    hub.bodies[WEIGHTS] = once
    assert run("pull", "maker/tiny").exit_code == 0
    assert requested(hub)[-1].endswith(f"bytes={len(content) // 2}-")
    assert left(repository) == ({""}, True)


def test_damaged_file_is_found_and_downloaded_again(run, hub, repository, tiny_checkpoint):
    run("pull", "maker/tiny")
    file = repository / "snapshots" / COMMIT / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.resolve().write_bytes(content)
    result = run("pull", "maker/tiny")
    assert f"Damaged, and downloaded again: {WEIGHTS}" in result.stderr
    assert file.read_bytes() == (tiny_checkpoint / WEIGHTS).read_bytes()


def test_wrong_checksum_leaves_no_file(run, hub, repository, tiny_checkpoint):
    size = (tiny_checkpoint / WEIGHTS).stat().st_size
    hub.bodies[WEIGHTS] = lambda handler: handler._send(b"x" * size)
    with pytest.raises(CheckpointError, match=rf"checksum of {WEIGHTS} is wrong.*`dashinfer-vlm pull maker/tiny`"):
        run("pull", "maker/tiny")
    assert left(repository) == ({""}, False)
    (row,) = [line for line in run("list").stdout.splitlines() if line.startswith("maker/tiny")]
    assert row.endswith("incomplete; run: dashinfer-vlm pull maker/tiny")
    run("rm", "maker/tiny")
    assert "maker/tiny" not in run("list").stdout


def test_endless_file_is_stopped(run, hub, repository):
    hub.bodies[WEIGHTS] = endless
    with pytest.raises(CheckpointError, match=rf"sends more than the \d+ bytes that it states for {WEIGHTS}"):
        run("pull", "maker/tiny")
    assert left(repository) == ({""}, False)


@pytest.mark.parametrize(
    "path",
    ["../evil.json", "/tmp/evil.json", "a/../../evil.json", "..\\evil.json", "a\nb.json", "./a.json", "a//b.json", 7],
)
def test_hostile_paths_are_rejected(run, hub, repository, path):
    assert not is_safe_path(path)
    hub.entries["evil"] = {"type": "file", "path": path, "size": 1, "oid": "0" * 40}
    with pytest.raises(CheckpointError, match="which is not valid, so nothing was downloaded"):
        run("pull", "maker/tiny")
    assert not repository.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"size": -1},
        {"size": "9"},
        {"oid": "../../../evil"},
        {"oid": None},
        {"lfs": {"oid": "x", "size": 1}},
        {"size": 10**9},
        {"path": []},
    ],
)
def test_hostile_entries_are_rejected(run, hub, repository, tiny_checkpoint, changes):
    hub.entries["config.json"] = entry(tiny_checkpoint / "config.json") | changes
    with pytest.raises(CheckpointError):
        run("pull", "maker/tiny")
    assert not repository.exists()


def test_hostile_commit_is_rejected(run, hub, repository):
    hub.commit = "../../../../evil"
    with pytest.raises(CheckpointError, match="lists the commit"):
        run("pull", "maker/tiny")
    assert not repository.exists()


def test_endless_list_is_stopped(run, hub, monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_core.models.hub_requests.MAX_LIST_BYTES", 10**6)
    hub.lists = endless
    with pytest.raises(CheckpointError, match=r"list of files from http://127\.0\.0\.1.* is too long"):
        run("pull", "maker/tiny")


NESTED = pytest.param(b"[" * 100_000, id="nested")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b'{"sha": 7}', b'{"sha": null}', NESTED])
def test_lists_that_are_none_are_explained(run, hub, repository, content):
    hub.lists = lambda handler: handler._send(content)
    with pytest.raises(CheckpointError, match=r"not a list of files|not valid, so nothing"):
        run("pull", "maker/tiny")
    assert not repository.exists()


def test_files_of_all_pages_are_downloaded_and_other_hosts_refused(run, hub, repository, tiny_checkpoint):
    hub.next_page = f"{hub.url}/api/models/maker/tiny/tree/{COMMIT}?page=2"
    (hub.folder / "second.json").write_text("{}")
    hub.entries["second.json"] = None
    hub.second_page = [entry(hub.folder / "second.json")]
    run("pull", "maker/tiny")
    assert (repository / "snapshots" / COMMIT / "second.json").read_text() == "{}"
    for page in ("http://127.0.0.2/api", "http://[", f"{hub.url}x/api", "http://127.0.0.1:99999999/", "/api"):
        hub.next_page = page
        with pytest.raises(CheckpointError, match=r"continues at .*, which is invalid, or has another host"):
            run("pull", "maker/tiny")


def test_content_of_link_is_not_followed(run, hub, repository, tmp_path):
    """A link in a repository is a file with a path; it is written as such."""
    (hub.folder / "extra.json").write_text("/etc/passwd")
    run("pull", "maker/tiny")
    file = repository / "snapshots" / COMMIT / "extra.json"
    assert file.read_text() == "/etc/passwd"
    assert file.resolve().parent == repository / "blobs"


@pytest.mark.parametrize(
    ("place", "refusal", "message"),
    [
        ("api", (404, "RepoNotFound"), r"has no model 'maker/tiny', or it is private.*`hf auth login`"),
        ("api", (401, ""), r"has no model 'maker/tiny', or it is private.*HF_TOKEN"),
        ("api", (404, "RevisionNotFound"), r"no such revision. Check `revision`"),
        ("api", (403, "GatedRepo"), r"is gated: request access on its page.*HF_TOKEN"),
        ("api", (403, ""), r"denies access to 'maker/tiny' \(403\)"),
        (WEIGHTS, (403, ""), r"denies access to 'maker/tiny' \(403\)"),
        (WEIGHTS, (404, "EntryNotFound"), r"lists a file of 'maker/tiny' that it does not have \(404\)"),
        (WEIGHTS, (500, ""), r"responded .* with 500. Try again later"),
    ],
)
def test_refusals_are_explained(run, hub, repository, *, place, refusal, message):
    hub.statuses[place] = refusal
    with pytest.raises(CheckpointError, match=message):
        run("pull", "maker/tiny")
    assert not left(repository)[1]


def test_token_is_not_sent_to_other_hosts(run, hub, monkeypatch):
    """Hubs redirect requests for large files."""

    def redirect(handler):
        handler.send_response(302)
        handler.send_header("Location", f"{storage.url}{handler.path}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serve_hub(hub.folder) as storage:
        hub.bodies[WEIGHTS] = redirect
        run("pull", "maker/tiny")
        assert len(requested(storage)) == 1
        assert (hub.tokens, storage.tokens) == ({"Bearer hf_secret"}, {None})


def test_gated_model_needs_token(run, hub, monkeypatch):
    hub.token = "hf_secret"
    with pytest.raises(CheckpointError, match="is gated"):
        run("pull", "maker/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert run("pull", "maker/tiny").exit_code == 0


def test_offline_mode_is_explained(run, hub, monkeypatch):
    run("pull", "maker/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert find_model("maker/tiny", registered={}).name == COMMIT
    with pytest.raises(CheckpointError, match="'maker/other' is not in the cache, and HF_HUB_OFFLINE"):
        find_model("maker/other", registered={})


def test_space_is_checked_before_weights(run, hub, repository):
    huge = entry(hub.folder / WEIGHTS)
    huge["lfs"] = huge["lfs"] | {"size": 1 << 60}
    hub.entries[WEIGHTS] = huge
    with pytest.raises(CheckpointError, match=r"needs 1152921504\.6 GB more on the disk.*`dashinfer-vlm rm`.*HF_HOME"):
        run("pull", "maker/tiny")
    assert requested(hub) == []


def test_full_disk_is_explained(run, hub, repository):
    """/dev/full stands for a file on a full disk."""
    partial = repository / "blobs" / f"{entry(hub.folder / WEIGHTS)['lfs']['oid']}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"No space left on device.*free space, or set HF_HOME.*continues there"):
        run("pull", "maker/tiny")
    assert not left(repository)[1]


def test_other_architecture_is_refused_before_weights(run, hub):
    (hub.folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(PluginError, match="No model family is named 'bert'"):
        run("pull", "maker/tiny")
    assert requested(hub) == []


def test_repository_without_safetensors_is_refused(run, hub):
    hub.entries[WEIGHTS] = None
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        run("pull", "maker/tiny")
    assert requested(hub, "") == []


def test_model_on_this_machine_is_not_downloaded(run, tiny_checkpoint):
    for model in ("demo", str(tiny_checkpoint)):
        result = run("pull", model)
        assert (result.exit_code, result.stderr) == (0, f"{model} is already on this machine.\n")
        assert (Path(result.stdout.strip()) / "config.json").is_file()


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "../x", ""])
def test_invalid_name_is_rejected(run, name):
    with pytest.raises(CheckpointError, match=r"is not a model ID\. Write OWNER/NAME"):
        run("pull", name)


def test_several_files_are_downloaded_at_once(run, hub):
    together = threading.Barrier(3)
    names = ["config.json", "tokenizer.json", "preprocessor_config.json"]

    def wait(handler):
        together.wait(HANG)
        handler._send((hub.folder / handler.path.rpartition("/")[2]).read_bytes())

    hub.bodies |= dict.fromkeys(names, wait)
    assert run("pull", "maker/tiny").exit_code == 0


def test_run_downloads_and_chats(run, hub):
    result = run("run", "maker/tiny", "Hello", "--set", "max_tokens=2", "--device", "cpu")
    assert result.exit_code == 0
    assert "to download; needs" in result.stderr
    hub.asked.clear()
    assert "to download" not in run("run", "maker/tiny", "Hello", "--set", "max_tokens=2", "--device", "cpu").stderr
    assert requested(hub, "") == []


@pytest.fixture
def modelscope(hub, monkeypatch):
    """The hub as ModelScope; that of Hugging Face cannot be reached."""
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return hub


def test_modelscope_is_another_hub(run, modelscope, repository, tiny_checkpoint):
    options = ("--hub", "modelscope", "--set", "max_tokens=2", "--device", "cpu")
    assert "to download; needs" in run("run", "maker/tiny", "Hello", *options).stderr
    (folder,) = (repository / "snapshots").iterdir()
    assert (folder / WEIGHTS).read_bytes() == (tiny_checkpoint / WEIGHTS).read_bytes()
    assert modelscope.tokens == {None}
    assert run("pull", "maker/tiny", "--hub", "modelscope").stdout == f"{folder}\n"


def test_errors_of_modelscope_are_explained(run, modelscope):
    with pytest.raises(CheckpointError, match=r"ModelScope has no model 'maker/none', or it is private"):
        run("pull", "maker/none", "--hub", "modelscope")
    damaged = b"x" * (modelscope.folder / "config.json").stat().st_size
    modelscope.bodies["config.json"] = lambda handler: handler._send(damaged)
    with pytest.raises(CheckpointError, match="Run `dashinfer-vlm pull maker/tiny --hub modelscope` to download"):
        run("pull", "maker/tiny", "--hub", "modelscope")
    modelscope.bodies["config.json"] = endless
    with pytest.raises(CheckpointError, match="Check MODELSCOPE_DOMAIN"):
        run("pull", "maker/tiny", "--hub", "modelscope")
    modelscope.statuses["config.json"] = (403, "")
    with pytest.raises(CheckpointError, match=r"ModelScope denies access to 'maker/tiny' \(403\): use a public model"):
        run("pull", "maker/tiny", "--hub", "modelscope")
    (modelscope.folder / "a\nb.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"so nothing was downloaded\. Check MODELSCOPE_DOMAIN"):
        run("pull", "maker/tiny", "--hub", "modelscope")


def test_interruption_names_the_command_that_resumes(capsys):
    for hub, revision, options in (
        ("huggingface", None, ""),
        ("modelscope", "v1", " --hub modelscope --revision v1"),
    ):
        config = EngineConfig(model="maker/tiny", revision=revision)
        with pytest.raises(SystemExit), interruptible(config, hub):
            raise KeyboardInterrupt
        assert f"`dashinfer-vlm pull maker/tiny{options}` resumes" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted_pull_of_slow_hub_is_resumable(hub, repository, tmp_path):
    content = (hub.folder / WEIGHTS).read_bytes()
    over = threading.Event()
    hub.bodies[WEIGHTS] = halves(content, then=over)
    process = start("pull", "maker/tiny", home=tmp_path / "home", endpoint=hub.url)
    blob = entry(hub.folder / WEIGHTS)["lfs"]["oid"]

    def half_received():
        return any(path.stat().st_size for path in repository.rglob(f"{blob}.incomplete"))

    until(lambda: requested(hub) and half_received())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG)
    over.set()
    assert process.returncode == 130
    assert "Interrupted. `dashinfer-vlm pull maker/tiny` resumes the download; `dashinfer-vlm rm maker/tiny`" in errors
    assert not left(repository)[1]
    partial = (repository / "blobs" / f"{blob}.incomplete").read_bytes()
    assert content.startswith(partial)
    del hub.bodies[WEIGHTS]
    process = start("pull", "maker/tiny", home=tmp_path / "home", endpoint=hub.url)
    process.communicate(timeout=HANG)
    assert requested(hub)[-1].endswith(f"bytes={len(partial)}-")
    assert (repository / "snapshots" / COMMIT / WEIGHTS).read_bytes() == content


@pytest.mark.slow
def test_interrupted_load_names_next_step(terminal, tiny_checkpoint):
    shown = terminal("chat", str(tiny_checkpoint), "Hello", program=MAIN)
    shown.wait_for("Loading")
    os.kill(shown._pid, signal.SIGINT)
    shown.wait_for("was loaded. Run the same command to load it again.")
    assert shown.wait() == 130
