"""The step that installs an extra repeats how this package was installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dashinfer_vlm_core.installation import DISTRIBUTION, install_step

EDITABLE = {"dir_info": {"editable": True}}


@pytest.mark.parametrize(
    ("files", "source", "expected"),
    [
        (["constraints.txt"], {"url": ".", **EDITABLE}, "install -c constraints.txt -e '.[video]'"),
        (["constraints.txt"], {"url": "."}, "install -c constraints.txt '.[video]'"),
        (["it.whl", "constraints.txt"], {"url": "it.whl"}, "install -c constraints.txt './it.whl[video]'"),
        (["it.whl"], {"url": "it.whl"}, "install './it.whl[video]'"),
        ([], {"url": "deleted.whl"}, None),
        ([], {}, None),
    ],
    ids=["editable", "folder", "wheel with constraints", "wheel", "deleted wheel", "index"],
)
def test_step_repeats_the_installation(tmp_path, monkeypatch, files, source, expected):
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    info = tmp_path / f"{DISTRIBUTION.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n")
    if source:
        (info / "direct_url.json").write_text(json.dumps(source | {"url": (folder / source["url"]).as_uri()}))
    monkeypatch.syspath_prepend(tmp_path)
    step = install_step("video")
    if expected is None:
        assert step == "Run in a checkout: pip install -c constraints.txt '.[video]'"
    else:
        assert step.startswith(f"Run: cd '{folder}' && ")
        assert step.endswith(expected)


def test_step_uses_uv_where_there_is_no_pip(tmp_path):
    """uv creates environments without pip."""
    program = "from dashinfer_vlm_core import installation; installation.find_spec = {}.get; print(installation._pip())"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout.strip() == f"uv pip install --python {sys.executable}"
