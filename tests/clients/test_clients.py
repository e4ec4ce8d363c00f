"""Every client with every feature, against an engine with a scripted decoder; docs/clients.md shows the results."""

from __future__ import annotations

import pytest

from tests.clients import table
from tests.clients.drivers import DRIVERS
from tests.clients.features import CHECKS, cells, serve_script


@pytest.fixture(scope="module")
def served(tiny_checkpoint):
    with serve_script(str(tiny_checkpoint)) as served:
        yield served


# Variants, whose parts other tests cover.
SLOW = {"litellm-server", "langchain-server", "chat-openai", "chat-openai-responses"}
# Ctrl-C, which ends the requests of `VLM`, is tested in tests/core/test_offline.py.
CELLS = [cell for cell in cells(list(DRIVERS), slow=SLOW) if cell.id != "vllm-style-cancel"]


@pytest.mark.parametrize(("client", "feature"), CELLS)
def test_client_supports_feature(served, client, feature):
    CHECKS[feature](DRIVERS[client], served)


def test_page_has_a_result_or_a_reason_for_every_cell():
    page = table.PAGE.read_text(encoding="utf-8")
    rows = [line.strip("| \n").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    found = {row[0]: dict(zip(table.FEATURES, row[1:], strict=True)) for row in rows[1:]}
    assert found.keys() == set(table.CLIENTS.values())
    for client, title in table.CLIENTS.items():
        for feature, cell in found[title].items():
            assert cell.startswith("no (") == ((client, feature) in table.REASONS)
            assert cell.startswith(("yes", "no ("))


REPORT = """\
<testsuites><testsuite>
<testcase name="a"><properties><property name="client" value="openai text yes"/></properties></testcase>
<testcase name="b"><properties><property name="client" value="llama-index text yes"/></properties><skipped/></testcase>
<testcase name="c"><properties><property name="client" value="openai image yes"/></properties><failure/></testcase>
</testsuite></testsuites>
"""


def test_page_is_rendered_from_reports(tmp_path):
    (tmp_path / "results.xml").write_text(REPORT)
    outcomes = table.read_properties(tmp_path / "results.xml", table.PROPERTY)
    assert outcomes == {
        ("openai", "text"): "yes",
        ("llama-index", "text"): "not run",
        ("openai", "image"): "failed",
    }
    page = table.render(outcomes, "openai 2.54.0.", "On a test machine.")
    assert "| [openai](openai.md) | yes | failed | - |" in page
    assert "| LlamaIndex `OpenAILike` | not run | - | no (2) |" in page
    assert "\n2. LlamaIndex does not" in page


def test_unknown_client_of_mark_is_named():
    with pytest.raises(KeyError, match="'openia', which is not one of openai"):
        table.mark_property("openia", "text")
