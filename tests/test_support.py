"""docs/support.md states what the marked tests of this checkout show."""

import ast

import pytest

from tests import support
from tests.pages import ROOT

pytestmark = pytest.mark.slow

REPORT = """\
<testsuites><testsuite>
<testcase name="a"><properties><property name="supports" value="qwen2_vl text torch-cpu yes"/></properties></testcase>
<testcase name="b"><properties><property name="supports" value="qwen2_vl text torch-cpu yes"/></properties>
<skipped/></testcase>
<testcase name="c"><properties><property name="supports" value="qwen2_vl images torch-cuda yes"/></properties>
<skipped/></testcase>
<testcase name="d"><properties><property name="supports" value="qwen2_vl images dashinfer-cpu rejected"/></properties>
</testcase>
<testcase name="e"><properties><property name="supports" value="qwen2_vl int8 torch-cpu yes"/></properties>
<failure/></testcase>
<testcase name="f"/>
</testsuite></testsuites>
"""


def test_outcome_of_feature_is_that_of_its_tests(tmp_path):
    report = tmp_path / "results.xml"
    report.write_text(REPORT)
    outcomes = support.read_outcomes(report)
    assert outcomes == {
        ("qwen2_vl", "text", "torch-cpu"): "yes",
        ("qwen2_vl", "images", "torch-cuda"): "not run",
        ("qwen2_vl", "images", "dashinfer-cpu"): "rejected",
        ("qwen2_vl", "int8", "torch-cpu"): "failed",
    }
    page = support.render(outcomes, "On a test machine.")
    assert "## PyTorch, CPU\n\n| Feature | Qwen2-VL | Qwen2.5-VL | Qwen3-VL | Qwen3.5 |\n" in page
    assert "| Text | yes | - | - | - |" in page
    assert "## PyTorch, CUDA" in page.partition("| Images | not run |")[0]
    assert "## DashInfer, CPU" in page.partition("| Images | rejected |")[0]
    assert "DashInfer, CUDA" not in page


def test_unknown_feature_of_mark_is_named():
    with pytest.raises(KeyError, match="'imagse', which is not one of text, images"):
        support.mark_property("imagse", backend="torch-cpu")


def marks():
    """Return the (family, feature, backend) of every `supports` mark."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "pytest.mark.supports":
                continue
            if isinstance(node.args[0], ast.Constant):  # not the argument of a function that returns marks
                words = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
                yield words.get("family", "qwen2_vl"), ast.literal_eval(node.args[0]), words["backend"]


def rows_of(backend):
    """Return the cells of the page by feature."""
    page = support.PAGE.read_text(encoding="utf-8")
    section = page.partition(f"## {support.BACKENDS[backend]}\n")[2].partition("\n## ")[0]
    lines = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in section.splitlines()]
    return {row[0]: row[1:] for row in lines if len(row) > 1}


def test_page_has_a_row_for_every_feature():
    header, *features = rows_of("torch-cpu")
    assert (header, features) == ("Feature", list(support.FEATURES.values()))


def test_page_has_a_result_for_every_mark():
    found = list(marks())
    columns = list(support.FAMILIES)
    assert len(found) >= 20
    for family, feature, backend in found:
        cells = rows_of(backend)[support.FEATURES[feature]]
        assert cells[columns.index(family)] in ("yes", "rejected", "not run")
