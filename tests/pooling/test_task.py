"""The task of a checkpoint, and how it pools, are read from its files."""

from __future__ import annotations

import json
import shutil

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.capabilities import configured_capabilities
from dashinfer_vlm_core.engine.manager import ManagedModel, ModelManager
from dashinfer_vlm_core.errors import CheckpointError, ConfigError, SetupError
from dashinfer_vlm_core.models.pooling import Projection, TokenContrast
from dashinfer_vlm_core.models.task import EMBED_INSTRUCTION, SCORE_INSTRUCTION, read_pooling
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.tokenization import tokenizer
from dashinfer_vlm_core.tokenization.tokenizer import read_tokenizer
from dashinfer_vlm_dashinfer import DashInferFactory
from dashinfer_vlm_qwen3_vl import Qwen3VL
from tests.pooling.checkpoints import NO, YES
from tests.pooling.late_checkpoints import WRITERS


@pytest.fixture
def folder(embedding, tmp_path):
    return shutil.copytree(embedding, tmp_path / "model")


def edit(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def pooling_of(folder, task="auto"):
    return read_pooling(Qwen3VL().load_spec(folder), task)


def test_published_layouts_are_found(base, embedding, reranker):
    assert pooling_of(base) is None
    embed, score = pooling_of(embedding), pooling_of(reranker)
    assert (embed.task, embed.normalize, embed.instruction, embed.head) == ("embed", True, EMBED_INSTRUCTION, None)
    assert embed.dimensions == range(64, 65)
    assert (score.task, score.head, score.instruction) == ("score", TokenContrast(YES, NO), SCORE_INSTRUCTION)


def test_option_overrides_the_files(base, embedding):
    assert pooling_of(embedding, "generate") is None
    assert pooling_of(base, "embed").dimensions == ()
    with pytest.raises(ConfigError, match="no tokens 'yes' and 'no'"):
        pooling_of(base, "score")


def test_modules_and_configuration_are_followed(folder):
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    edit(folder / "config.json", matryoshka_dimensions=[16, 32, 128])
    prompts = {"prompts": {"query": "Find it."}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false}')
    pooling = pooling_of(folder)
    assert (pooling.normalize, pooling.dimensions, pooling.instruction) == (False, (16, 32), "Find it.")


def test_score_head_with_a_wrong_path_needs_yes_and_no(reranker, tmp_path, caplog):
    folder = shutil.copytree(reranker, tmp_path / "reranker")
    shutil.rmtree(folder / "1_LogitScore")
    with pytest.raises(ConfigError, match="no tokens 'yes' and 'no'"):  # the tokenizer has neither
        pooling_of(folder)
    assert "yes and no are used" in caplog.text


def test_sequence_classification_has_a_head(folder):
    (folder / "modules.json").unlink()
    edit(folder / "config.json", architectures=["Qwen3VLForSequenceClassification"])
    assert (pooling_of(folder).task, pooling_of(folder).head) == ("score", "score")
    edit(folder / "config.json", classifier_from_token=["a", "b"], is_original_qwen3_reranker=True)
    vocabulary = read_tokenizer(folder).backend
    assert pooling_of(folder).head == TokenContrast(vocabulary.token_to_id("b"), vocabulary.token_to_id("a"))


def test_capabilities_of_an_unloaded_reranker_parse_its_tokenizer_once(folder, monkeypatch):
    (folder / "modules.json").unlink()
    tokens = {"classifier_from_token": ["a", "b"]}
    edit(folder / "config.json", architectures=["Qwen3VLForSequenceClassification"], **tokens)
    read = []
    monkeypatch.setattr(tokenizer, "read_tokenizer", lambda path: read.append(path) or read_tokenizer(path))
    manager = ModelManager([ManagedModel(config=EngineConfig(model=str(folder), served_model_name="a"))])
    assert [manager.for_model("a").capabilities().task for _ in range(2)] == ["score", "score"]
    assert read == [folder]


def test_weights_that_cannot_be_read_are_named(folder):
    (folder / "missing.safetensors").symlink_to(folder / "deleted")
    with pytest.raises(CheckpointError, match=r"missing\.safetensors cannot be read"):
        configured_capabilities(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["a"], "must be two tokens"),
        ("ab", "must be two tokens"),
        (["a", "no such token"], "must be tokens of the vocabulary"),
    ],
)
def test_classifier_tokens_are_checked(folder, tokens, words):
    (folder / "modules.json").unlink()
    edit(folder / "config.json", architectures=["Qwen3VLForSequenceClassification"], classifier_from_token=tokens)
    with pytest.raises(CheckpointError, match=f"`classifier_from_token` {words}"):
        pooling_of(folder)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("1_Pooling/config.json", '{"pooling_mode": "mean"}', "must be 'lasttoken', got mean"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true}', "got cls_token"),
        ("modules.json", '[{"type": "sentence_transformers.models.Dense", "path": "2"}]', "'Dense'"),
        ("modules.json", '[{"path": "2"}]', "is not a list of objects"),
        pytest.param("modules.json", "[" * 100_000, "is not a list of objects", id="nested"),
    ],
)
def test_unsupported_pooling_is_named(folder, name, text, words):
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=words):
        pooling_of(folder)
    assert pooling_of(folder, "generate") is None


def test_decoder_that_cannot_pool_is_refused_by_name(embedding):
    assert "pooling" not in DashInferFactory().supported_params
    with pytest.raises(SetupError, match="dashinfer: It does not support the task embed"):
        Engine(EngineConfig(model=str(embedding), decoder="dashinfer", device="cpu")).start()


def late_pooling(folder, task="auto"):
    return read_pooling(load_plugins().load_spec(folder), task)


@pytest.mark.parametrize(
    ("name", "head", "prefix", "suffix"),
    [
        ("colqwen2", Projection("embedding_proj_layer", 128), "Query: ", "\n"),
        ("colqwen2_5", Projection("custom_text_proj", 128), "Query: ", ""),
        ("colqwen3", Projection("embedding_proj_layer", 320), "", ""),
    ],
)
def test_late_interaction_is_found(tmp_path, name, head, prefix, suffix):
    folder = WRITERS[name](tmp_path / name)
    pooling = late_pooling(folder)
    assert late_pooling(folder, "score") == late_pooling(folder, "token_embed") == pooling
    assert late_pooling(folder, "generate") is None
    assert (pooling.task, pooling.head, pooling.instruction) == ("token_embed", head, "")
    assert (pooling.format.query_prefix, pooling.format.query_suffix) == (prefix, "<|endoftext|>" * 10 + suffix)
    assert pooling.format.media_suffix == "<|im_end|><|endoftext|>"


def test_processor_changes_the_prompts(tmp_path, colqwen2):
    folder = shutil.copytree(colqwen2, tmp_path / "model")
    media = "<|vision_start|><|image_pad|><|vision_end|>"
    fields = {"query_prefix": "Q: ", "visual_prompt_prefix": f"Page: {media}Read it.<|im_end|>\n"}
    (folder / "processor_config.json").write_text(json.dumps(fields))
    prompts = late_pooling(folder).format
    assert prompts.query_prefix == "Q: "
    assert (prompts.media_prefix, prompts.media_text, prompts.media_suffix) == ("Page: ", "Read it.", "<|im_end|>\n")
    for name, value, words in (("visual_prompt_prefix", "Read it.", "once"), ("query_prefix", 1, "must be a text")):
        (folder / "processor_config.json").write_text(json.dumps({name: value}))
        with pytest.raises(CheckpointError, match=words):
            late_pooling(folder)


def test_late_interaction_needs_a_projection(tmp_path, base):
    with pytest.raises(ConfigError, match="is not a ColQwen checkpoint"):
        pooling_of(base, "token_embed")
    folder = shutil.copytree(base, tmp_path / "model")
    edit(folder / "config.json", architectures=["ColQwen3"])
    with pytest.raises(CheckpointError, match="no tensor embedding_proj_layer"):
        pooling_of(folder)
    edit(folder / "config.json", architectures=["ColQwen3"], model_type="colqwen2", vlm_config=[])
    with pytest.raises(CheckpointError, match="`vlm_config` must be an object"):
        late_pooling(folder)


def test_late_interaction_has_its_own_prompts(colqwen2, tmp_path):
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match="`chat_template` has no effect"):
        Engine(EngineConfig(model=str(colqwen2), chat_template=tmp_path / "template.jinja", device="cpu")).start()


def test_base_of_an_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "vidore/colqwen2-base"}')
    with pytest.raises(CheckpointError, match="vidore/colqwen2-base"):
        load_plugins().load_spec(tmp_path)
