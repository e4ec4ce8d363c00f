"""Drafts of a smaller model: it reads the text of a request, and no token changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.drafts import with_draft
from dashinfer_vlm_core.engine.loading import select_decoder
from dashinfer_vlm_core.errors import CheckpointError, ConfigError, SetupError
from dashinfer_vlm_core.models.lora import read_lora
from dashinfer_vlm_core.models.memory import ModelSize, kv_bytes_per_token
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.tokenization.tokenizer import TokenizerCache
from dashinfer_vlm_torch.drafter import sample_drafts
from dashinfer_vlm_torch.model_drafter import MAX_ROWS, TextTokens
from dashinfer_vlm_torch.sequence import LogitsRow, SequenceState
from tests.kernels import needs_native
from tests.lora_folders import ATTENTION, write_lora
from tests.qwen3_5.tiny_qwen3_5 import write_checkpoint as write_qwen3_5
from tests.tiny import write_checkpoint

from .drafting import LONG, SEEDED, create, recorded_logits, run
from .oracle import Shape, ids, next_turn, one_by_one, prompt, save_random_model, text, visual


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model of the same vocabulary."""
    folder = tmp_path_factory.mktemp("other")
    save_random_model(folder, Shape(heads=2, kv_heads=1, layers=1))
    return read_spec(folder)


def image_prompt(oracle, content, **sampling):
    return visual(9, (1, 8, 9), 11, (4, 5, 5), 8, width=oracle.width, content=content, **LONG | sampling)


def check_equal(oracle, draft, requests, **options):
    """Check that drafts change no token; return the statistics with them."""
    expected, _, _ = run(create(oracle.folder, speculative_method="ngram", **options), requests)
    found, stats, _ = run(create(oracle.folder, draft, **options), requests)
    assert found == expected
    return stats


def test_tokens_are_equal(oracle, other, tmp_path):
    """Of all kinds of sampling, with images, and an adapter of the model."""
    lora = read_lora("a", str(write_lora(tmp_path / "a", oracle.folder, ATTENTION)), read_spec(oracle.folder))
    requests = [
        prompt(1, 60, **LONG),
        prompt(2, 40, **LONG | SEEDED),
        prompt(3, 30, **LONG, logprobs=2, presence_penalty=0.5, temperature=0.7, seed=4),
        image_prompt(oracle, 1, **SEEDED),
        replace(prompt(4, 20, **LONG), lora=lora),
    ]
    options = {"max_batch_size": 3, "prefill_chunk": 50}
    expected, _, _ = run(create(oracle.folder, speculative_method="ngram", **options), requests)
    for draft, least in ((other, 0), (read_spec(oracle.folder), 20)):
        found, stats, _ = run(create(oracle.folder, draft, **options), requests)
        assert found == expected
        assert stats.accepted_tokens >= least
        assert stats.draft_tokens > 0


def test_tokens_are_equal_after_preemption(oracle):
    requests = [prompt(number, 255, max_tokens=100, ignore_eos=True, **SEEDED) for number in range(3)]
    stats = check_equal(oracle, read_spec(oracle.folder), requests, kv_cache_mib=1)
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 20


@needs_native
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8", "quantization": "int8"}])
def test_c_kernels_compute_the_same_tokens(oracle, options):
    requests = [prompt(1, 60, **LONG), prompt(2, 40, **LONG | SEEDED), image_prompt(oracle, 3)]
    stats = check_equal(oracle, read_spec(oracle.folder), requests, dtype="bfloat16", **options)
    assert stats.accepted_tokens > 20


def test_equal_model_drafts_all_tokens(oracle):
    """Also of a prompt that it reads in several parts, and of sampled tokens."""
    requests = [
        prompt(5, 2 * MAX_ROWS + 50, **LONG | {"max_tokens": 80}),
        prompt(6, 20, **LONG | SEEDED, no_repeat_ngram_size=2, no_repeat_ngram_window=200),
    ]
    _, stats, _ = run(create(oracle.folder, read_spec(oracle.folder)), requests, how=one_by_one)
    assert stats.steps < 50
    assert stats.accepted_tokens >= 0.9 * stats.draft_tokens > 20


@torch.inference_mode()
def expected_logits(oracle, request, output):
    is_text = np.ones(len(request.token_ids), dtype=bool)
    for span in request.spans:
        is_text[span.start : span.stop] = False
    tokens = np.concatenate((request.token_ids[is_text], output))
    positions = torch.arange(len(tokens)).expand(3, 1, -1)
    return oracle.model(input_ids=torch.tensor(tokens)[None], position_ids=positions).logits[0, -1]


def test_draft_model_reads_the_text_of_a_conversation(oracle):
    """Its logits are those of transformers for the text, also after a prefix was found in the cache."""

    async def turns(running, requests):
        first = await one_by_one(running, requests)
        following = next_turn(requests[0], ids(first[0]), prompt(77, 20))
        return first + await one_by_one(running, [following])

    def watch(drafter):
        forward = drafter._forward
        rows = []

        def count(parts, predicts):
            rows.append(sum(len(part.ids) for part in parts))
            return forward(parts, predicts)

        drafter._forward = count
        return rows, recorded_logits(drafter, drafter._draft.logits)

    decoder = create(oracle.folder, read_spec(oracle.folder), kv_cache_mib=2)
    _, stats, (rows, found) = run(decoder, [image_prompt(oracle, 3)], how=turns, watch=watch)
    assert stats.hits == 1
    assert max(rows) < 60  # neither visual tokens nor the cached text
    for request, output, _, logits in found[:: max(len(found) // 8, 1)]:
        expected = expected_logits(oracle, request, output)
        assert (logits - expected).abs().max() < 2e-3 * expected.std()


def test_each_sequence_gets_its_turn(oracle, other):
    """If the draft model cannot process what all sequences have added since the last time."""

    def watch(drafter):
        drafter._budget.tokens = lambda **_: 40
        found, draft = [], drafter.draft

        def recorded(chunks, hidden, counts):
            drafted = draft(chunks, hidden, counts)
            found.extend((sequence.request, len(sequence.output_ids)) for sequence in drafted.tokens)
            return drafted

        drafter.draft = recorded
        return found

    sampling = LONG | {"max_tokens": 300, "temperature": 1.0}  # nothing repeats
    requests = [prompt(number, 10, **sampling, seed=number) for number in range(3)]
    _, _, found = run(create(oracle.folder, other), requests, watch=watch)
    late = [request for request, length in found if length > 100]
    assert all(request in late for request in requests)


def test_prompt_is_left_out_if_few_tokens_can_follow(oracle):
    """It counts as a wrong prediction: soon, there is no further attempt."""
    calls, asked = [], []

    def watch(drafter):
        draft = drafter.draft
        drafter._forward = lambda parts, _: calls.append(parts)
        drafter.draft = lambda chunks, hidden, counts: asked.append(counts) or draft(chunks, hidden, counts)

    request = prompt(1, 180, max_tokens=20, ignore_eos=True)
    run(create(oracle.folder, read_spec(oracle.folder)), [request], watch=watch)
    assert not calls
    assert len([counts for counts in asked if counts]) < 10


def test_text_tokens_skip_visual_ones():
    request = visual(2, (1, 2, 2), 3, width=8)
    sequence = SequenceState(request, stop=())
    sequence.append(50)
    tokens = TextTokens.of(sequence)
    assert [tokens.count(length) for length in range(11)] == [0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 6]
    assert [tokens.length(count) for count in range(7)] == [0, 1, 6, 7, 8, 9, 10]
    whole = [*request.token_ids[:2], *request.token_ids[6:], 50]
    assert tokens.ids(sequence, 0, 6).tolist() == whole
    assert tokens.ids(sequence, 4, 6).tolist() == whole[4:]


class FixedOutput:
    """Returns the same logits for each row."""

    def __init__(self, *logits):
        self.row = torch.tensor(logits)

    def argmax(self, x):
        return self.row.argmax().expand(len(x))

    def logits(self, x):
        return self.row.expand(len(x), -1)


@pytest.mark.parametrize(
    ("logits", "vocab_size", "greedy", "sampled"),
    [((1.0, 9.0, 30.0), 2, -1, 1), ((1.0, 30.0), 4, 1, 1), ((1.0, 30.0, 2.0), 3, 1, 1)],
)
def test_drafts_are_tokens_of_the_model(logits, vocab_size, greedy, sampled):
    for sampling, expected in (({}, greedy), ({"temperature": 0.1, "seed": 1}, sampled)):
        row = LogitsRow(SequenceState(text(1, **sampling), stop=()))
        found = sample_drafts(
            FixedOutput(*logits), torch.zeros(1, 4), [row], vocab_size=vocab_size, kernel_sampler=None
        )
        assert found == [expected]


def test_draft_model_takes_memory(oracle, other):
    size = ModelSize.of(replace(read_spec(oracle.folder), draft=other))
    assert size.draft == other.text
    assert size.draft_bytes == (other.folder / "model.safetensors").stat().st_size
    plain, drafting = (create(oracle.folder, draft, kv_cache_mib=1).snapshot().kv_size for draft in (None, other))
    own, its = (kv_bytes_per_token(text, 4) for text in (read_spec(oracle.folder).text, other.text))
    assert drafting == pytest.approx(plain * own / (own + its), abs=1)


# What is refused


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def load(folder, name, **options):
    config = EngineConfig(model=str(folder), speculative_model=str(name), **options)
    registry = load_plugins()
    return with_draft(registry.load_spec(folder), config, registry, TokenizerCache())


def test_model_of_the_same_tokens_is_loaded(model, tmp_path):
    draft = write_checkpoint(tmp_path / "draft", num_hidden_layers=1)
    spec = load(model, draft)
    assert spec.draft == load_plugins().load_spec(draft)
    config = EngineConfig(model=str(model), decoder="dashinfer")
    with pytest.raises(SetupError, match=r"does not use drafts of a model \(`speculative_model`\)"):
        select_decoder(load_plugins(), spec, config)


def test_engine_drafts_with_a_model(model):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with Engine(EngineConfig(model=str(model), speculative_model=str(model), device="cpu")) as engine:
        engine.chat(body)
        assert engine.stats().decoder.draft_tokens > 0


def test_unsuitable_models_are_refused(model, tmp_path):
    renamed = write_checkpoint(tmp_path / "renamed")
    tokenizer = renamed / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|video_pad|>", "<|other_pad|>"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    cases = [
        (renamed, ConfigError, "the tokens of its tokenizer are not those of"),
        (write_qwen3_5(tmp_path / "hybrid"), ConfigError, "cannot be used"),
        (tmp_path / "none", CheckpointError, "`speculative_model`: There is no model"),
        (other, CheckpointError, "`speculative_model`: No model family is named 'llama'"),
    ]
    for name, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            load(model, name)
        assert caught.value.param == "speculative_model"


def test_missing_tokenizer_of_the_model_is_not_a_fault_of_the_draft(model, tmp_path):
    incomplete = write_checkpoint(tmp_path / "incomplete")
    (incomplete / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="incomplete") as caught:
        load(incomplete, model)
    assert caught.value.param != "speculative_model"


@pytest.mark.parametrize("method", ["ngram", "none"])
def test_method_without_drafts_of_a_model_is_refused_before_a_download(method):
    config = EngineConfig(model="no/model", speculative_model="no/draft", speculative_method=method)
    with pytest.raises(ConfigError, match=f"not used with `speculative_method` {method}") as caught:
        load_plugins().resolve_options(config)
    assert caught.value.param == "speculative_model"
