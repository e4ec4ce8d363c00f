"""The text model: ours = transformers, batched = alone, chunked = whole, rewound = never computed."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from dashinfer_vlm_core.kernels.quantization import INT4, INT8
from tests.kernels import load_fastest, needs_native
from tests.lora_folders import ATTENTION, MLP, merge_lora, write_lora
from tests.quantized_checkpoints import LAYOUTS, write_quantized

from .states import Sequences, Step
from .tiny_qwen3_5 import write_checkpoint

IDS = torch.randint(0, 250, (200,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["dense", "moe"])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def expected(folder):
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=IDS[None]).logits[0]


@pytest.mark.parametrize(
    "lengths",
    [[200], [64, 128, 8], [128, *[1] * 72], [1] * 200, [64, *[1] * 5, 131], [64, *[1] * 5, 59, 72]],
    ids=["whole", "cut", "decoded", "decoded from start", "next turn", "next turn, cut"],
)
def test_logits_equal_transformers(folder, expected, lengths):
    found = Sequences(folder).logits(IDS, lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert expected.std() > 1


def test_tokens_of_several_sequences_equal_transformers(folder, expected):
    """A prompt, a later part of one, a step, and a step with drafts, in one forward pass."""
    model = Sequences(folder, 4)
    model.run(Step(1, IDS[:64]), Step(2, IDS[:70]), Step(3, IDS[:5]))
    found = model.run(
        Step(0, IDS[:90]), Step(1, IDS[64:130]), Step(2, IDS[70:71], is_decoding=True),
        Step(3, IDS[5:9], num_drafts=3, is_decoding=True),
    )  # fmt: skip
    rows = torch.cat([torch.arange(90), torch.arange(64, 130), torch.tensor([70]), torch.arange(5, 9)])
    torch.testing.assert_close(found, expected[rows], rtol=0, atol=2e-4)


@pytest.mark.slow
def test_logits_of_long_prompt_equal_transformers(dense):
    ids = torch.randint(0, 250, (8192,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = AutoModelForImageTextToText.from_pretrained(dense).eval()(input_ids=ids[None]).logits[0]
    found = Sequences(dense, rows=8192).logits(ids, [2048] * 4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def native_model(folder):
    """Return a function that creates sequences in bfloat16 with the C kernels, whose rows are independent."""
    return lambda count=1, starts=(): Sequences(
        folder, count, kernels=load_fastest(), dtype=torch.bfloat16, response_boundaries=starts
    )


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("lengths", [[64, 136], [64, 64, 72], [128, 72], [192, 8]])
def test_prompt_cut_at_chunks_has_the_same_bits(native_model, lengths):
    assert torch.equal(native_model().logits(IDS, lengths), native_model().logits(IDS, [200]))


@needs_native
@pytest.mark.parametrize("lengths", [[70, 130], [64, 6, 60, 70], [194, 6]])
def test_prompt_with_responses_has_the_same_bits_and_states(native_model, lengths):
    """Chunks end after 64, 70, 130 and 194 tokens."""
    starts = (70, 130)
    whole, cut = native_model(2, starts), native_model(2, starts)
    expected = whole.run(Step(0, IDS, saved=((70, 2), (194, 3))))
    assert torch.equal(cut.logits(IDS, lengths), expected)
    for slot, length in ((2, 70), (3, 194)):
        alone = native_model(1, starts)
        alone.run(Step(0, IDS[:length]))
        for saved, state in zip(whole.states, alone.states, strict=True):
            assert torch.equal(saved[:, slot], state[:, alone.sources[0]])


@needs_native
def test_prompt_after_an_output_is_cut_at_the_same_chunks(native_model):
    cut, whole = ([64, *[1] * 5, *lengths] for lengths in ([59, 72], [131]))
    assert torch.equal(native_model().logits(IDS, cut), native_model().logits(IDS, whole))


@needs_native
def test_batched_has_the_same_bits_as_alone(native_model):
    """Prompts, steps and drafts of five sequences of different lengths, in one forward pass and in one each."""
    starts = [IDS[:70], IDS[10:75], IDS[20:25], IDS[:64], IDS[30:31]]
    together, alone = native_model(5), native_model(5)
    steps = [
        Step(0, IDS[70:71], is_decoding=True),
        Step(1, IDS[75:79], num_drafts=3, is_decoding=True),
        Step(2, IDS[25:28], num_drafts=2, is_decoding=True),
        Step(3, IDS[64:150], num_drafts=4),
        Step(4, IDS[31:32], is_decoding=True),
    ]
    for part in ([Step(number, ids) for number, ids in enumerate(starts)], steps, [steps[4], steps[1], steps[0]]):
        assert torch.equal(together.run(*part), torch.cat([alone.run(step) for step in part]))


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("is_decoding", [False, True])
def test_rejected_drafts_leave_no_trace(native_model, accepted, is_decoding):
    """Rejected drafts of one sequence are computed in a batch with another one; its later logits have the same bits."""
    start, count = 64, 66 if not is_decoding else 1
    kept = count + accepted
    sequences, expected = native_model(2), native_model()
    sequences.run(Step(0, IDS[:start]), Step(1, IDS[50:60]))
    ids = torch.cat([IDS[start : start + kept], IDS[: 4 - accepted]])
    step = Step(0, ids, num_drafts=4, is_decoding=is_decoding)
    sequences.run(Step(1, IDS[60:61], is_decoding=True), step)
    sequences.rewind(1, step, kept)
    expected.run(Step(0, IDS[:start]))
    expected.run(Step(0, IDS[start : start + kept], num_drafts=accepted, is_decoding=is_decoding))
    for position in range(start + kept, start + kept + 3):
        after = Step(0, IDS[position : position + 1], is_decoding=True)
        assert torch.equal(sequences.run(after), expected.run(after))


PUBLISHED_MODULES = r"layers\.\d+\.(self_attn|mlp|linear_attn).*(_proj|_qkv|_z)$"
"""Those that published checkpoints quantize: all but the projections to beta and the step of the decay."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dense", "awq"),
        ("dense", "gptq-act-order"),
        ("dense", "int8"),
        ("dense", "fp8-block"),
        ("moe", "int4-asymmetric"),
        ("moe", "fp8-block"),
    ],
)
def test_quantized_checkpoint_equals_the_dequantized_one(request, tmp_path, name, layout):
    experts = "fused" if layout == "fp8-block" else "separate"
    source = request.getfixturevalue(name)
    written = write_quantized(source, tmp_path, LAYOUTS[layout], modules=PUBLISHED_MODULES, experts=experts)
    found, expected = (Sequences(folder).logits(IDS[:70], [70]) for folder in (written.quantized, written.twin))
    assert torch.equal(found, expected)
    assert not torch.equal(found, Sequences(source).logits(IDS[:70], [70]))


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    ("options", "least"), [({"quantization": INT8}, 0.97), ({"quantization": INT4}, 0.8), ({}, 0.99)],
    ids=["int8", "int4", "cache"],
)  # fmt: skip
def test_8_and_4_bits_are_close_to_bfloat16(native_model, dense, options, least):
    cache = None if options else torch.int8
    model = Sequences(dense, kernels=load_fastest(), dtype=torch.bfloat16, cache_dtype=cache, **options)
    found = model.logits(IDS, [192, *[1] * 8])
    expected = Sequences(dense, kernels=load_fastest(), dtype=torch.bfloat16).logits(IDS, [192, *[1] * 8])
    similarity = torch.cosine_similarity(found, expected, dim=-1).median()
    assert least < similarity < 1


def test_separate_experts_equal_fused_ones(moe, tmp_path):
    folder = write_checkpoint(tmp_path, moe=True, fused=False)
    assert torch.equal(Sequences(folder).logits(IDS, [200]), Sequences(moe).logits(IDS, [200]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("dense", ATTENTION),
        ("dense", MLP),
        ("dense", ("in_proj_qkv",)),
        ("dense", ("in_proj_z", "in_proj_a", "in_proj_b", "out_proj")),
        ("moe", MLP),
        ("moe", ("shared_expert_gate",)),
        ("moe", (*ATTENTION, "up_proj", "shared_expert_gate")),
    ],
)
def test_lora_equals_merged_weights(request, tmp_path, name, targets):
    """In a mixture of experts, it changes the shared expert."""
    folder = request.getfixturevalue(name)
    lora = write_lora(tmp_path / "adapter", folder, targets)
    merged = Sequences(merge_lora(tmp_path / "merged", folder, lora)).logits(IDS, [128, *[1] * 72])
    found = Sequences(folder, lora=lora).logits(IDS, [128, *[1] * 72])
    torch.testing.assert_close(found, merged, rtol=0, atol=5e-4)
    assert (found - Sequences(folder).logits(IDS, [200])).abs().max() > 0.1
