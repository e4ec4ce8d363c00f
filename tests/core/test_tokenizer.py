"""A checkpoint's tokenizer, read from its files as published; compared with transformers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.tokenization.tokenizer import TokenizerCache, read_tokenizer
from dashinfer_vlm_demo import CHECKPOINT
from tests.tiny import SPECIAL, write_tokenizer

TEXTS = st.text() | st.lists(
    st.sampled_from(
        [*SPECIAL, "Hello, wor", "ld's 2026", " \n\n ", "e\u0301", "\u4f60\u597d\uff0c", "\U0001f469\u200d"]
    )
).map("".join)


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def edit(folder, name, **fields):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def published(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def encoded(folder, text):
    return read_tokenizer(folder).backend.encode(text, add_special_tokens=False).ids


def imports_transformers(folder):
    """Return whether loading imported transformers, checked in a separate process."""
    program = (
        "import sys, pathlib, dashinfer_vlm_core.tokenization.tokenizer as t\n"
        "t.read_tokenizer(pathlib.Path(sys.argv[1]))\n"
        "print('transformers' in sys.modules)"
    )
    reported = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    return reported.stdout.strip() == "True"


@pytest.fixture(scope="module", params=["demo", "tiny"])
def both(request, tiny_checkpoint):
    path = {"demo": CHECKPOINT, "tiny": tiny_checkpoint}[request.param]
    return read_tokenizer(path), published(path)


@given(text=TEXTS)
def test_tokens_equal_transformers(both, text):
    ours, theirs = both
    ids = ours.backend.encode(text, add_special_tokens=False).ids
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.backend.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_names_and_templates_equal_transformers(both):
    ours, theirs = both
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_templates == {"default": theirs.chat_template}


def test_complete_tokenizer_json_does_not_import_transformers(folder):
    assert not imports_transformers(folder)


def test_older_files_are_read_without_tokenizer_json(folder, tmp_path_factory):
    older = tmp_path_factory.mktemp("older")
    tokenizer = published(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (older / "vocab.json").write_text(json.dumps(model["vocab"]))
    (older / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    decoder = {
        index: {"content": str(token), "special": token.special, "normalized": False}
        for index, token in tokenizer.added_tokens_decoder.items()
    }
    (older / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder})
    )
    text = "<|im_start|>the other e\u0301 in 2026<|im_end|>"
    assert encoded(older, text) == encoded(folder, text)


def test_tokens_added_by_config_are_loaded(folder):
    known = [token.content for token in read_tokenizer(folder).backend.get_added_tokens_decoder().values()]
    index = 268 + len(known)
    listed = {
        str(268 + place): {"content": name, "special": True, "normalized": False}
        for place, name in enumerate([*known, "<|new|>"])
    }
    edit(folder, "tokenizer_config.json", added_tokens_decoder=listed)
    assert encoded(folder, "a<|new|>") == [*encoded(folder, "a"), index]


@pytest.mark.parametrize("listed", [False, True])
def test_token_marked_special_by_config_is_special(folder, listed):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    if listed:
        decoder = {token["id"]: {**token, "special": True} for token in tokenizer["added_tokens"]}
        for token in decoder.values():
            del token["id"]
        edit(folder, "tokenizer_config.json", added_tokens_decoder=decoder, additional_special_tokens=[])
    last = tokenizer["added_tokens"][-1]
    last["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_tokenizer(folder).backend.get_added_tokens_decoder()[last["id"]].special


def test_special_tokens_file_is_loaded(folder):
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "cls_token": "<|cls|>"}))
    read = read_tokenizer(folder)
    assert read.special_tokens_map == published(folder).special_tokens_map
    assert "<|cls|>" in {token.content for token in read.backend.get_added_tokens_decoder().values()}


def test_truncation_and_padding_are_disabled(folder):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 100}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    plain = encoded(folder, "abcdefgh")
    edit(folder, "tokenizer.json", truncation=truncation, padding=padding)
    assert encoded(folder, "abcdefgh") == plain
    assert len(plain) == 8


def test_cache_reads_equal_files_once(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    write_tokenizer(copy)
    cache = TokenizerCache()
    first = cache.read(folder)
    assert cache.read(copy) is cache.read(folder) is first
    edit(copy, "tokenizer_config.json", chat_template="other")
    assert cache.read(copy).chat_templates == {"default": "other"}
    assert cache.read(folder) is first


def test_cache_does_not_keep_what_transformers_read(folder):
    (folder / "special_tokens_map.json").write_text(json.dumps({"cls_token": "<|cls|>"}))
    cache = TokenizerCache()
    assert cache.read(folder) is not cache.read(folder)


def test_cache_reports_a_file_that_cannot_be_read(folder):
    (folder / "chat_template.jinja").symlink_to("/proc/self/mem")  # reading its beginning is an error, also for root
    with pytest.raises(CheckpointError, match=r"tokenizer in .* cannot be read .*tokenizer\.json"):
        TokenizerCache().read(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"added_tokens_decoder": {"a": 1}}', "\x00"])
def test_damaged_file_is_reported(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer in .* cannot be read .*tokenizer\.json"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("stated", "read"),
    [
        (None, {}),
        ("a", {"default": "a"}),
        (
            [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
            {"default": "a", "tool_use": "b"},
        ),
    ],
)
def test_templates_of_config(folder, stated, read):
    edit(folder, "tokenizer_config.json", chat_template=stated)
    assert read_tokenizer(folder).chat_templates == read


@pytest.mark.slow
def test_engine_completes_without_transformers():
    """Importing it takes a quarter of the startup time of the bundled model."""
    program = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "from dashinfer_vlm_core import Engine, EngineConfig\n"
        "with Engine(EngineConfig(model='demo')) as engine:\n"
        "    asked = {'messages': [{'role': 'user', 'content': 'Hello'}], 'max_tokens': 5}\n"
        "    print(engine.chat(asked).usage.completion_tokens)\n"
    )
    reported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(reported.stdout) > 0
