"""Gated delta nets: the kernels match the formulas token by token, and equal bits in any batch and any steps."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from dashinfer_vlm_core.kernels.delta_net import CHUNK
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import DeltaInputs, DeltaNet, RecurrentStates, StateSpan, StateSpans
from dashinfer_vlm_core.text_spec import DeltaNetSpec
from dashinfer_vlm_cpu.build import AMX, AVX2, AVX512, Variant
from dashinfer_vlm_cpu.native import load_variant
from tests.kernels import VARIANT_PARAMS, load_kernels, needs_native, skip_reason

SPECS = {
    "published": DeltaNetSpec(num_key_heads=2, num_value_heads=2, key_dim=128, value_dim=128, conv_width=4),
    "shared keys": DeltaNetSpec(num_key_heads=1, num_value_heads=2, key_dim=32, value_dim=64, conv_width=4),
    "partial vectors": DeltaNetSpec(num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=20, conv_width=3),
    "no convolution": DeltaNetSpec(num_key_heads=1, num_value_heads=1, key_dim=16, value_dim=72, conv_width=1),
}


@pytest.fixture(params=[pytest.param(TorchKernels, id="torch"), *VARIANT_PARAMS])
def kernels(request):
    return load_kernels(request.param) if isinstance(request.param, Variant) else request.param("cpu")


class Sample(NamedTuple):
    """A random gated delta net and the inputs of some tokens."""

    net: DeltaNet
    inputs: DeltaInputs

    def states(self, slots):
        """Return slots with random states."""
        spec = self.net.spec
        generator = torch.Generator().manual_seed(4)
        conv = torch.randn(slots, spec.conv_width - 1, spec.conv_channels, generator=generator)
        shape = (slots, spec.num_value_heads, spec.key_dim, spec.value_dim)
        return RecurrentStates(conv.bfloat16(), torch.randn(shape, generator=generator))

    def rows(self, start, stop):
        return DeltaInputs(*(part[start:stop] for part in self.inputs))


def sample(spec, tokens):
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    heads = spec.num_value_heads
    net = DeltaNet(
        spec, None, None, None, conv=numbers(spec.conv_width, spec.conv_channels) / 2,
        rate=-torch.rand(heads, generator=generator), step_bias=numbers(heads), norm=numbers(spec.value_dim), eps=1e-6,
    )  # fmt: skip
    qkvz = numbers(tokens, spec.conv_channels + spec.value_width).bfloat16()
    return Sample(net, DeltaInputs(qkvz, 3 * numbers(tokens, 2 * heads)))


def reference(sample, conv, state):
    """Compute all tokens one by one in float64; returns the outputs and the state."""
    net, spec = sample.net, sample.net.spec
    rows = torch.cat([conv, sample.inputs.qkvz[:, : spec.conv_channels]]).double()
    x = F.silu(F.conv1d(rows.T, net.conv.double().T[:, None], groups=spec.conv_channels)).T
    keys = spec.num_key_heads * spec.key_dim
    q, k, v = x.split([keys, keys, spec.value_width], dim=1)
    q, k = (part.unflatten(1, (spec.num_key_heads, spec.key_dim)) for part in (q, k))
    q, k = ((part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()) for part in (q, k))
    repeats = spec.num_value_heads // spec.num_key_heads
    q, k = q.repeat_interleave(repeats, 1) * spec.key_dim**-0.5, k.repeat_interleave(repeats, 1)
    v = v.unflatten(1, (spec.num_value_heads, spec.value_dim))
    beta, step = sample.inputs.gates.double().chunk(2, dim=1)
    decay = torch.exp(net.rate * F.softplus(step + net.step_bias))
    state, outputs = state.double(), []
    for i in range(len(q)):
        state = state * decay[i, :, None, None]
        update = beta[i].sigmoid()[:, None] * (v[i] - torch.einsum("hk,hkv->hv", k[i], state))
        state = state + k[i, :, :, None] * update[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[i], state))
    gate = sample.inputs.qkvz[:, spec.conv_channels :].double().unflatten(1, (-1, spec.value_dim))
    mixed = torch.stack(outputs)
    normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + net.eps) * net.norm
    return (normed * F.silu(gate)).flatten(1), state


def chunks(count):
    return tuple(min(CHUNK, count - start) for start in range(0, count, CHUNK))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("source", [-1, 0])
def test_outputs_and_states_equal_the_formulas(kernels, name, source):
    """Of tokens in chunks, and of single ones after them."""
    for count, single in ((1, 0), (0, 1), (63, 2), (64, 0), (65, 3), (150, 1)):
        given = sample(SPECS[name], count + single)
        states = given.states(2)
        start = [part[0] if source == 0 else torch.zeros_like(part[0]) for part in states]
        expected, state = reference(given, *start)
        span = StateSpan(0, count + single, 0, source, 1, chunks(count))
        found = kernels.mix_delta_net(given.net, given.inputs, states, StateSpans([span]))
        torch.testing.assert_close(found.double(), expected, rtol=8e-3, atol=1e-3)
        torch.testing.assert_close(states.delta[1].double(), state, rtol=0, atol=2e-5)
        window = torch.cat([start[0], given.inputs.qkvz[:, : given.net.spec.conv_channels]])
        assert torch.equal(states.conv[1], window[count + single :])


BATCH = (
    StateSpan(0, 1, 0, 0, 5),
    StateSpan(1, 70, 3, -1, 6, (64, 3)),
    StateSpan(71, 3, 2, 2, 7),
    StateSpan(74, 130, 0, 3, 8, (10, 64, 56), ((10, 10), (74, 11))),
    StateSpan(204, 1, 0, 0, 9),
)
"""Steps, drafts and prompts; two of them continue from the same state."""


@pytest.mark.parametrize("name", SPECS)
def test_batched_has_the_same_bits_as_alone(kernels, name):
    given = sample(SPECS[name], 205)
    together, alone = given.states(12), given.states(12)
    found = kernels.mix_delta_net(given.net, given.inputs, together, StateSpans(BATCH))
    for span in BATCH:
        rows = slice(span.first_token, span.first_token + span.num_tokens)
        inputs = given.rows(rows.start, rows.stop)
        expected = kernels.mix_delta_net(given.net, inputs, alone, StateSpans([span._replace(first_token=0)]))
        assert torch.equal(found[rows], expected)
    for found_states, expected_states in zip(together, alone, strict=True):
        assert torch.equal(found_states, expected_states)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("steps", [[(64,), (64, 23), (40,)], [(64, 64), (23, 40)]])
def test_prompt_in_steps_has_the_same_bits_as_whole(kernels, name, steps):
    given = sample(SPECS[name], 191)
    whole, cut = given.states(4), given.states(4)
    span = StateSpan(0, 191, 0, -1, 3, (64, 64, 23, 40), ((128, 2),))
    expected = kernels.mix_delta_net(given.net, given.inputs, whole, StateSpans([span]))
    slot, start, found = -1, 0, []
    for parts in steps:
        stop = start + sum(parts)
        span = StateSpan(0, stop - start, 0, slot, (slot + 1) % 2, parts)
        found.append(kernels.mix_delta_net(given.net, given.rows(start, stop), cut, StateSpans([span])))
        slot, start = span.target, stop
        if stop == 128:
            assert all(torch.equal(ours[slot], theirs[2]) for ours, theirs in zip(cut, whole, strict=True))
    assert torch.equal(torch.cat(found), expected)
    assert all(torch.equal(ours[slot], theirs[3]) for ours, theirs in zip(cut, whole, strict=True))


@pytest.mark.parametrize("native", VARIANT_PARAMS)
def test_threads_change_no_bit(native):
    kernels, given, threads = load_kernels(native), sample(SPECS["shared keys"], 205), torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        states = given.states(12)
        results.append([kernels.mix_delta_net(given.net, given.inputs, states, StateSpans(BATCH)), *states])
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


PAGE = mmap.PAGESIZE


def at_end_of_page(tensor):
    """Return a copy that ends at a page which must not be read."""
    size = -(-tensor.nbytes // PAGE) * PAGE
    pages = mmap.mmap(-1, size + PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), PAGE, 0) == 0
    copy = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=size - tensor.nbytes)
    return copy.view(tensor.shape).copy_(tensor)


def mix_at_end_of_pages():
    """Run the C kernels of this CPU where reading past a tensor ends the process."""
    for variant in (AVX512, AMX, AVX2):
        if skip_reason(variant):
            continue
        try:
            kernels = load_kernels(variant)
        except pytest.skip.Exception:  # a container may not permit AMX
            continue
        for spec in (SPECS["partial vectors"], SPECS["no convolution"]):
            given = sample(spec, 70)
            net = given.net._replace(conv=at_end_of_page(given.net.conv))
            inputs = DeltaInputs(*map(at_end_of_page, given.inputs))
            states = RecurrentStates(*(at_end_of_page(part) if part.numel() else part for part in given.states(2)))
            spans = StateSpans([StateSpan(0, 70, 0, 1, 0, (64, 5))])
            kernels.mix_delta_net(net, inputs, states, spans)


@needs_native
def test_nothing_is_read_past_the_end():
    code = "from tests.core.test_delta_net import mix_at_end_of_pages; mix_at_end_of_pages()"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


@needs_native
def test_kernels_for_shorter_chunks_are_rejected(monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_cpu.native.CHUNK", 2 * CHUNK)
    loaded = load_variant.__wrapped__(AVX2)
    assert loaded.kernels is None
    assert "chunks of 64 tokens" in loaded.reason
