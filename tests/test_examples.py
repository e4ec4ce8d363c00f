"""The programs of `examples` print what the pages show; each page shows them without arguments, too."""

from __future__ import annotations

import re
import runpy
import shlex
import sys

import pytest

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.shared import SHARED, close_shared
from tests.pages import ROOT, read_page
from tests.pdfs import document
from tests.server.conftest import serving

COMMAND = re.compile(r"^\$ python (examples/\S+)(.*)\n((?:(?!\$ |```).*\n)*)", re.MULTILINE)
COMMANDS = [command for page in sorted((ROOT / "docs").glob("*.md")) for command in COMMAND.findall(read_page(page))]


@pytest.fixture(scope="module")
def server():
    from tests.litellm import conftest  # noqa: F401  imports LiteLLM without its warnings

    with serving(SHARED.get(EngineConfig())) as server:
        yield server
    close_shared()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "".join(command[:2]))
def test_program_prints_documented_output(command, server, monkeypatch, capsys, tmp_path):
    """Where a page shows no output, the program only has to run."""
    program, arguments, printed = command
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)  # programs may write files
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setattr(sys, "argv", [program, *shlex.split(arguments)])
    runpy.run_path(program, run_name="__main__")
    output = capsys.readouterr().out
    assert output == printed or (output and not printed)


def test_each_program_is_shown_without_arguments():
    programs = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.py")}
    shown = {program for program, arguments, _ in COMMANDS if not arguments}
    assert programs - shown == {"examples/write_a_plugin/slideshow_plugin.py"}


@pytest.mark.slow
@pytest.mark.usefixtures("server")  # closes the engines
def test_pages_of_pdf_files_with_the_same_name_are_indexed(monkeypatch, capsys, tmp_path):
    files = [tmp_path / folder / "report.pdf" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(document(file.parent.name))
    monkeypatch.setattr(sys, "argv", ["pages.py", *map(str, files), "Describe the pictures."])
    found = runpy.run_path(str(ROOT / "examples/langchain/pages.py"), run_name="__main__")["found"]
    assert len({page.page_content for page in found}) == 2
    assert capsys.readouterr().out.endswith(" (report.pdf, page 1; report.pdf, page 1)\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "there is no folder none"),
        (["examples", "--image", "none.png"], "--image: there is no file none.png"),
        (["examples", "--text", "a", "--output", "LICENSE"], "--output: LICENSE is not a folder"),
    ],
)
def test_visual_search_names_what_is_missing(monkeypatch, capsys, arguments, message):
    program = str(ROOT / "examples/visual_search/search.py")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(program, run_name="__main__")
    assert message in capsys.readouterr().err
