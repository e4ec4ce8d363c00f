"""Gated delta nets (arXiv:2412.06464), composed of PyTorch's operations.

A value head has a state S [key_dim, value_dim]. A token with key k and value v changes it to

    S' = decay * S + k (beta * (v - decay * S^T k))^T

and its output is S'^T q. Tokens are computed one by one, those of all sequences at once, or in chunks. The result of a
sequence does not depend on the other ones: chunks are computed separately, and the operations on single tokens treat
each sequence alike. It depends on where chunks end, since that changes the shapes of matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .types import DeltaInputs, DeltaNet, Kernels, RecurrentBatch, RecurrentStates, StateSpan, StateSpans

CHUNK = 64
"""Maximum number of tokens of a chunk."""

EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


def sigmoid(x: Tensor) -> Tensor:
    """Return float32, each element independent of its position, unlike those of `torch.sigmoid` on a CPU."""
    return torch.neg(x.float()).exp_().add_(1).reciprocal_()


def mix_and_keep(kernels: Kernels, net: DeltaNet, inputs: DeltaInputs, batch: RecurrentBatch, number: int) -> Tensor:
    """Compute delta net layer `number`, see `Kernels.mix_delta_net`, and keep what `rewind` needs."""
    if batch.spans.drafted:
        rows = [_rows(batch.spans.spans[index]) for index in batch.spans.drafted]
        batch.kept.append(DeltaInputs(*(torch.cat([part[span] for span in rows]) for part in inputs)))
    return kernels.mix_delta_net(net, inputs, batch.states.layer(number), batch.spans)


def rewind(kernels: Kernels, nets: Sequence[DeltaNet], batch: RecurrentBatch, counts: Mapping[int, int]) -> None:
    """Compute the states of all delta net layers again, after only the first tokens of spans with drafts; `counts` has
    their numbers by the number of the span."""
    drafted = batch.spans.drafted
    accepted = StateSpans([_first_tokens(drafted[index], count) for index, count in counts.items()])
    for number, net in enumerate(nets):
        kernels.mix_delta_net(net, batch.kept[number], batch.states.layer(number), accepted)


def _first_tokens(span: StateSpan, count: int) -> StateSpan:
    num_drafts = span.num_drafts - (span.num_tokens - count)
    return span._replace(num_tokens=count, num_drafts=num_drafts, saved=())


def mix(net: DeltaNet, inputs: DeltaInputs, states: RecurrentStates, spans: StateSpans) -> Tensor:
    """See `Kernels.mix_delta_net`."""
    channels = net.spec.conv_channels
    mixed = _advance(net, _recurrence(net, inputs.qkvz[:, :channels], inputs.gates), states, spans.spans)
    gate = torch.unflatten(inputs.qkvz[:, channels:], 1, mixed.shape[1:])
    return _gated_norm(net, mixed, gate).flatten(1).to(inputs.qkvz.dtype)


class _Recurrence(NamedTuple):
    """The inputs of the recurrence.

    Attributes:
        rows: [tokens, channels], queries, keys and values before the convolution.
        decay: float32 [tokens, value heads], the logarithm of the factor of the previous state.
        beta: float32 [tokens, value heads], the strength of the update.
    """

    rows: Tensor
    decay: Tensor
    beta: Tensor


def _recurrence(net: DeltaNet, rows: Tensor, gates: Tensor) -> _Recurrence:
    beta, step = gates.chunk(2, dim=-1)
    step = step + net.step_bias
    softplus = torch.where(step > 20, step, torch.log1p(torch.exp(step)))
    return _Recurrence(rows, net.rate * softplus, sigmoid(beta))


def _gated_norm(net: DeltaNet, x: Tensor, gate: Tensor) -> Tensor:
    """Normalize float32 x [tokens, value heads, value_dim], and multiply it by silu(gate) of the same shape."""
    normed = x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + net.eps) * net.norm
    return normed * gate.float() * sigmoid(gate)


def _rows(span: StateSpan) -> slice:
    return slice(span.first_token, span.first_token + span.num_tokens)


def _advance(net: DeltaNet, inputs: _Recurrence, pools: RecurrentStates, spans: Sequence[StateSpan]) -> Tensor:
    """Return float32 [tokens, value heads, value_dim], and write the new states."""
    spans = sorted(spans, key=lambda span: sum(span.chunks) - span.num_tokens)
    device = inputs.rows.device
    sources = torch.tensor([max(span.source, 0) for span in spans], device=device)
    targets = torch.tensor([span.target for span in spans], device=device)
    states = RecurrentStates(*(pool[sources] for pool in pools))
    for index, span in enumerate(spans):
        if span.source < 0:
            states.conv[index].zero_()
            states.delta[index].zero_()
    mixed = states.delta.new_empty(len(inputs.rows), net.spec.num_value_heads, net.spec.value_dim)
    for index, span in enumerate(spans):
        if span.chunks:
            rows = slice(span.first_token, span.first_token + sum(span.chunks))
            own = RecurrentStates(states.conv[index], states.delta[index])
            mixed[rows] = _mix_chunks(net, inputs, span, own, pools)
    _mix_tokens(net, inputs, spans, mixed, states)
    for pool, state in zip(pools, states, strict=True):
        pool[targets] = state
    return mixed


def _mix_chunks(
    net: DeltaNet, inputs: _Recurrence, span: StateSpan, state: RecurrentStates, pools: Sequence[Tensor]
) -> Tensor:
    """Compute the chunks of a span, change its state in place, and save it in the slots of `span.saved`; returns
    [tokens, value heads, value_dim]."""
    saved = dict(span.saved)
    mixed: list[Tensor] = []
    num_tokens = 0
    for count in span.chunks:
        start = span.first_token + num_tokens
        part = _Recurrence(*(part[start : start + count] for part in inputs))
        window = torch.cat([state.conv, part.rows])
        state.conv.copy_(window[count:])
        mixed.append(_mix_chunk(net, window, part, state.delta).transpose(0, 1))
        num_tokens += count
        if num_tokens in saved:
            for pool, one in zip(pools, state, strict=True):
                pool[saved[num_tokens]] = one
    return torch.cat(mixed)


def _mix_chunk(net: DeltaNet, window: Tensor, inputs: _Recurrence, state: Tensor) -> Tensor:
    """Compute a chunk from the inputs of its convolution; returns [value heads, tokens, value_dim].

    The tokens' updates of the state depend on each other linearly, by a triangular matrix.
    """
    count = len(inputs.rows)
    window = window.float()
    q, k, v = (part.transpose(0, 1) for part in _heads(net, [window[i : i + count] for i in range(len(net.conv))]))
    beta = inputs.beta.T[..., None]
    total = inputs.decay.T.cumsum(dim=1)
    decay = torch.exp((total[:, :, None] - total[:, None, :]).tril())  # of the update of column j until row i
    since_start = torch.exp(total)[..., None]
    matrix = (beta * (k @ k.mT) * decay).tril(-1)
    updates: Tensor = torch.linalg.solve_triangular(
        matrix, beta * (v - since_start * (k @ state)), upper=False, unitriangular=True
    )
    mixed = since_start * (q @ state) + (q @ k.mT * decay).tril() @ updates
    until_end = torch.exp(total[:, -1:] - total)[..., None]
    state.mul_(since_start[:, -1:]).add_((k * until_end).mT @ updates)
    return mixed


def _mix_tokens(
    net: DeltaNet, inputs: _Recurrence, spans: Sequence[StateSpan], mixed: Tensor, states: RecurrentStates
) -> None:
    """Compute the remaining tokens of all spans, which are sorted by their number, and change the states in place."""
    most = spans[0].num_tokens - sum(spans[0].chunks)
    for step in range(most):
        active = [span for span in spans if sum(span.chunks) + step < span.num_tokens]
        rows = torch.tensor([span.first_token + sum(span.chunks) + step for span in active], device=mixed.device)
        part = _Recurrence(*(part[rows] for part in inputs))
        window = torch.cat([states.conv[: len(rows)], part.rows[:, None]], dim=1)
        states.conv[: len(rows)] = window[:, 1:]
        mixed[rows] = _mix_token(net, window, part, states.delta[: len(rows)])


def _mix_token(net: DeltaNet, window: Tensor, inputs: _Recurrence, state: Tensor) -> Tensor:
    """Compute a token of each sequence from the inputs of its convolution; returns [tokens, value heads, value_dim]."""
    heads = state.shape[:2]
    q, k, v = (part.flatten(0, 1)[:, None] for part in _heads(net, window.float().unbind(1)))
    flat = state.flatten(0, 1).mul_(torch.exp(inputs.decay).view(-1, 1, 1))
    flat.baddbmm_(k.mT, inputs.beta.view(-1, 1, 1) * (v - k @ flat))
    return torch.unflatten((q @ flat)[:, 0], 0, heads)


def _heads(net: DeltaNet, taps: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the convolution to its inputs [tokens, channels], the oldest ones first; returns queries and keys
    [tokens, value heads, key_dim] and values [tokens, value heads, value_dim], all float32."""
    spec = net.spec
    x = taps[0] * net.conv[0]
    product = torch.empty_like(x)  # new memory would take longer than the multiplication
    for tap, weight in zip(taps[1:], net.conv[1:], strict=True):
        x += torch.mul(tap, weight, out=product)
    x *= sigmoid(x)
    keys = spec.num_key_heads * spec.key_dim
    q, k = torch.unflatten(x[:, : 2 * keys], 1, (2, spec.num_key_heads, spec.key_dim)).unbind(1)
    repeats = spec.num_value_heads // spec.num_key_heads
    q, k = (
        (part * torch.rsqrt((part * part).sum(dim=-1, keepdim=True) + EPSILON)).repeat_interleave(repeats, dim=1)
        for part in (q, k)
    )
    return q * spec.key_dim**-0.5, k, torch.unflatten(x[:, 2 * keys :], 1, (-1, spec.value_dim))
