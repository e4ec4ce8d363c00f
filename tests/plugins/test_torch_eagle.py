"""Drafts of an EAGLE-3 head: its logits are those of the published computation, and no token changes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb

from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.eagle import is_eagle, read_eagle
from dashinfer_vlm_core.models.lora import read_lora
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.plugins import load_plugins
from tests.kernels import needs_native
from tests.lora_folders import ATTENTION, write_lora
from tests.qwen3_5.tiny_qwen3_5 import write_checkpoint as write_qwen3_5
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint as write_qwen3_vl

from .drafting import LONG, SEEDED, create, create_from, recorded_logits, run
from .oracle import VOCAB, Oracle, Shape, ids, next_turn, one_by_one, prompt, save_random_model, visual

SHAPE = Shape(layers=5)
HIDDEN = SHAPE.heads * SHAPE.head_dim
LAYERS = (1, 2, 4)
DRAFTED = range(3, VOCAB, 2)
"""The tokens of the draft vocabulary."""
SECTIONS = [2, 3, 3]
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "rope_scaling": {"type": "mrope", "mrope_section": SECTIONS},
    "vocab_size": VOCAB,
    "draft_vocab_size": len(DRAFTED),
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [number - 1 for number in LAYERS]},
}
EPS = CONFIG["rms_norm_eps"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return Oracle(folder, save_random_model(folder, SHAPE))


def write_head(folder, *, own_embeddings=False, **config):
    """Write a random head in the published layout, and return its tensors."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (128, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (64, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (64, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, 128),
        "midlayer.mlp.gate_proj": (80, HIDDEN),
        "midlayer.mlp.up_proj": (80, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 80),
        "lm_head": (len(DRAFTED), HIDDEN),
    } | ({"embed_tokens": (VOCAB, HIDDEN)} if own_embeddings else {})
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 1.5 * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    tensors["norm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    tensors["d2t"] = torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), torch.tensor(DRAFTED))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return tensors


class ReferenceHead:
    """The head in float32, with the whole sequence at once."""

    def __init__(self, target, tensors, *, adds_normalized=False):
        self.target = target
        self.model = target.model.model.language_model
        self.tensors = tensors
        self.adds_normalized = adds_normalized

    def norm(self, x, name):
        return F.rms_norm(x, (HIDDEN,), self.tensors[f"{name}.weight"], EPS)

    def linear(self, x, name):
        return F.linear(x, self.tensors[f"{name}.weight"])

    def attend(self, x, positions):
        q, k, v = (
            self.linear(x, f"midlayer.self_attn.{name}_proj").view(len(x), -1, 16).transpose(0, 1)[None]
            for name in "qkv"
        )
        cos, sin = self.model.rotary_emb(x, positions[:, None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.linear(mixed[0].transpose(0, 1).flatten(1), "midlayer.self_attn.o_proj")

    def layer(self, embeddings, hidden, positions):
        normed = self.norm(hidden, "midlayer.hidden_norm")
        inputs = torch.cat([self.norm(embeddings, "midlayer.input_layernorm"), normed], dim=-1)
        x = (normed if self.adds_normalized else hidden) + self.attend(inputs, positions)
        normed = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up = (self.linear(normed, f"midlayer.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self.linear(F.silu(gate) * up, "midlayer.mlp.down_proj")

    def embed(self, tokens):
        table = self.tensors.get("embed_tokens.weight", self.model.embed_tokens.weight)
        return table[torch.tensor(tokens, dtype=torch.long)]

    @torch.inference_mode()
    def logits(self, request, output, drafted):
        """Return the logits of the token after an output and drafted tokens."""
        tail = self.model.embed_tokens(torch.tensor(output))
        after = int(request.positions.max()) + 1
        rest = np.tile(np.arange(after, after + len(output) + len(drafted)), (3, 1))
        positions = torch.from_numpy(np.concatenate((request.positions, rest), axis=1))
        length = len(request.token_ids) + len(output)
        states = self.model(
            inputs_embeds=torch.cat((self.target.inputs(request), tail[None]), 1),
            position_ids=positions[:, None, :length],
            output_hidden_states=True,
        ).hidden_states
        hidden = self.linear(torch.cat([states[number][0] for number in LAYERS], dim=-1), "fc")[:-1]
        embeddings = self.embed([*request.token_ids, *output, *drafted])
        for span in request.spans:
            embeddings[span.start : span.stop] = span.tokens.embedding
        for stop in range(length, length + len(drafted) + 1):
            x = self.layer(embeddings[1:stop], hidden, positions[:, : stop - 1])
            hidden = torch.cat([hidden, x[-1:]])
        rows = self.linear(self.norm(x[-1], "norm"), "lm_head")
        return torch.full((VOCAB,), -torch.inf).index_copy_(0, torch.tensor(DRAFTED), rows)


def image_prompt(target, content, **sampling):
    return visual(9, (1, 8, 9), 11, (4, 5, 5), 8, width=target.width, content=content, **LONG | sampling)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"own_embeddings": True}, {"prefill_chunk": 70}),
        ({"norm_before_residual": True}, {}),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": list(LAYERS)}, {}),
    ],
)
def test_logits_equal_the_published_computation(target, tmp_path, changes, options):
    """With visual tokens, in chunks, from the prefix cache, and of several tokens in a row."""
    tensors = write_head(tmp_path / "head", **changes)
    reference = ReferenceHead(target, tensors, adds_normalized="norm_before_residual" in changes)

    async def turns(running, requests):
        first = await one_by_one(running, requests)
        following = next_turn(requests[0], ids(first[0]), prompt(77, 20))
        return first + await one_by_one(running, [following])

    def watch(drafter):
        return recorded_logits(drafter, drafter._head.logits)

    draft = read_eagle(tmp_path / "head", read_spec(target.folder).text)
    requests = [image_prompt(target, 1), prompt(5, 90, **LONG | SEEDED)]
    _, stats, found = run(create(target.folder, draft, **options), requests, how=turns, watch=watch)
    assert stats.hits == 1
    assert len({num_drafted for _, _, num_drafted, _ in found}) > 1
    for request, output, num_drafted, logits in found[:: max(len(found) // 10, 1)]:
        known = len(output) - num_drafted
        expected = reference.logits(request, output[:known], output[known:])
        is_drafted = expected.isfinite()
        assert torch.equal(logits.isfinite(), is_drafted)
        difference = (logits - expected)[is_drafted].abs().max()
        assert difference < 2e-3 * expected[is_drafted].std()


def right_answers(drafter, completions):
    """Let a drafter predict the right tokens, as a trained head would; `completions` are by the id of the request."""
    sample = drafter._sample

    def predict(x, rows):
        sample(x, rows)
        found = []
        for row in rows:
            completion = completions[row.sequence.request.id]
            place = len(row.sequence.output_ids) + len(row.draft)
            found.append(completion[place] if place < len(completion) else -1)
        return found

    drafter._sample = predict


def test_tokens_are_equal(target, tmp_path):
    """If all drafts are wrong, and if all are right: with images, sampling, adapters and preemption."""
    write_head(tmp_path / "head")
    spec = read_spec(target.folder)
    lora = read_lora("a", str(write_lora(tmp_path / "a", target.folder, ATTENTION)), spec)
    requests = [
        *(prompt(number, 255, **SEEDED, max_tokens=110, ignore_eos=True) for number in (1, 2, 3)),
        prompt(5, 255, max_tokens=110, ignore_eos=True),
        image_prompt(target, 1, **SEEDED),
        replace(prompt(4, 20, **LONG), lora=lora),
    ]
    requests = [replace(request, id=str(number)) for number, request in enumerate(requests)]
    draft = read_eagle(tmp_path / "head", spec.text)
    expected, _, _ = run(create(target.folder, speculative_method="ngram", kv_cache_mib=1), requests)
    found, stats, _ = run(create(target.folder, draft, kv_cache_mib=1), requests)
    assert found == expected
    assert stats.preemptions > 0
    completions = {str(number): tokens for number, tokens in enumerate(expected)}
    found, stats, _ = run(
        create(target.folder, draft, kv_cache_mib=1), requests, watch=lambda each: right_answers(each, completions)
    )
    assert found == expected
    assert stats.accepted_tokens > 80


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (write_qwen3_vl, {}),
        (write_qwen3_5, {}),
        pytest.param(write_qwen3_5, {"dtype": "bfloat16"}, marks=needs_native, id="C kernels"),
    ],
)
def test_hidden_states_between_layers_change_no_token(tmp_path, write, options):
    """With levels of visual tokens, or with recurrent states."""
    spec = load_plugins().load_spec(write(tmp_path / "model"))
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_config": None}
    write_head(tmp_path / "head", vocab_size=spec.vocab_size, **ids)
    draft = read_eagle(tmp_path / "head", spec.text)
    requests = [prompt(1, 60, **LONG), visual(9, (1, 8, 9), 11, width=spec.visual_width, **LONG | SEEDED)]
    expected, _, _ = run(create_from(spec, speculative_method="ngram", **options), requests)
    completions = {request.id: tokens for request, tokens in zip(requests, expected, strict=True)}
    decoder = create_from(replace(spec, draft=draft), **options)
    found, stats, _ = run(decoder, requests, watch=lambda each: right_answers(each, completions))
    assert found == expected
    assert stats.accepted_tokens > 40


@needs_native
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8", "quantization": "int8"}])
def test_c_kernels_compute_the_same_tokens(target, tmp_path, options):
    write_head(tmp_path / "head")
    options |= {"dtype": "bfloat16"}
    requests = [prompt(1, 60, **LONG), image_prompt(target, 1, **SEEDED)]
    expected, _, _ = run(create(target.folder, speculative_method="ngram", **options), requests)
    completions = {request.id: tokens for request, tokens in zip(requests, expected, strict=True)}
    draft = read_eagle(tmp_path / "head", read_spec(target.folder).text)
    found, stats, _ = run(
        create(target.folder, draft, **options), requests, watch=lambda each: right_answers(each, completions)
    )
    assert found == expected
    assert stats.accepted_tokens > 40


# Configurations


def read(tmp_path, target, **config):
    write_head(tmp_path / "head", **config)
    return read_eagle(tmp_path / "head", read_spec(target.folder).text)


def test_head_is_read(tmp_path, target):
    spec = read(tmp_path, target)
    assert is_eagle(spec.folder)
    assert not is_eagle(target.folder)
    assert spec.target_layers == LAYERS
    interleaved = {"rope_type": "mrope", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    assert read(tmp_path, target, rope_scaling=interleaved).text.attention.rotary.axes == (0, 1, 2, 0, 1, 2, 0, 0)
    assert set(read(tmp_path, target, rope_scaling=None).text.attention.rotary.axes) == {0}


@pytest.mark.parametrize("offset", [-4, 90])
def test_wrong_draft_vocabulary_is_refused(tmp_path, target, offset):
    tensors = write_head(tmp_path / "head")
    tensors["d2t"][0] += offset
    save_file(tensors, tmp_path / "head" / "model.safetensors", {"format": "pt"})
    draft = read_eagle(tmp_path / "head", read_spec(target.folder).text)
    with pytest.raises(CheckpointError, match="'d2t' does not map 47 rows") as caught:
        create(target.folder, draft)._load()
    assert caught.value.param == "speculative_model"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": VOCAB + 1}, "`vocab_size` is 97, but the model's is 96. Set `speculative_model` to a head"),
        ({"hidden_size": 32}, "`hidden_size` is 32, but the model's is 64"),
        ({"target_hidden_size": 32}, "`target_hidden_size` is not the model's hidden size, 64"),
        ({"num_hidden_layers": 2}, "`num_hidden_layers` is 2. Only 1 is supported"),
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}}, "not three of the model's 5 layers"),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": "1"}, "is '1', not three"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` does not divide"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "`rope_scaling.rope_type` is 'yarn'"),
        ({"rope_scaling": {"mrope_section": [1, 2, 3]}}, "`rope_scaling.mrope_section` does not add up"),
        ({"rope_scaling": {"mrope_section": [4, 2, 2.5]}}, "must be three positive integers"),
        ({"speculators_config": {}}, "`speculators_config` is the layout of speculators"),
    ],
)
def test_other_heads_are_refused(tmp_path, target, config, message):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, target, **config)
    assert message in str(caught.value)
