"""Training steps: losses, gradient all-reduce, AdamW on fp32 weights, and a running average of the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from training import labels
from training.network import Architecture, Batch, Network, initialize

CELL_WEIGHT, PLACE_WEIGHT = 0.2, 0.1
"""Weights of the auxiliary labels in the loss, relative to 1 for the answers."""
CLIP_NORM = 1.0
MEMORY = 0.999
"""Decay of the running average, which spans about a thousand steps."""


class Tally:
    """Statistics since the last report: losses, and the number of answers per task with all tokens correct.

    No scene occurs twice in training, so this is the accuracy on unseen scenes with teacher forcing.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.right: dict[str, int] = defaultdict(int)
        self.asked: dict[str, int] = defaultdict(int)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] += value
        self.sums["steps"] += 1

    def grade(self, batch: Batch, kept: Tensor, correct: Tensor) -> None:
        whole = torch.ones(len(batch.tasks), dtype=torch.int64)
        whole.scatter_reduce_(0, batch.owners[kept], correct.long(), "amin")
        for task, good in zip(batch.tasks, whole.tolist(), strict=True):
            self.asked[task] += 1
            self.right[task] += good

    def mean(self, name: str) -> float:
        return self.sums[name] / max(self.sums["steps"], 1)

    def exact(self) -> dict[str, float]:
        return {task: self.right[task] / self.asked[task] for task in sorted(self.asked)}


class Learner:
    """A network that computes in `dtype`, with an fp32 master copy of its weights."""

    def __init__(
        self,
        sizes: Architecture,
        seed: int,
        *,
        averaging: bool = True,
        memory: float = MEMORY,
        dtype: torch.dtype = torch.bfloat16,
        cells: tuple[int, ...] = labels.CELLS,
        places: tuple[int, ...] = labels.PLACES,
    ) -> None:
        torch.manual_seed(seed)
        self.averaging = averaging
        self.memory = memory
        """Decay of the running average."""
        self.pointing = 0.0
        """Weight of the loss for attending to the object of the question."""
        self.network = Network(sizes, cells, places)
        initialize(self.network)
        self.weights = {name: value.detach().clone() for name, value in self.network.named_parameters()}
        self.average: dict[str, Tensor] = {}
        self.trained: list[str] = []
        self.network.to(dtype)
        self.network.model.embed_tokens.float()  # see Network.read

    def begin(self, prefixes: tuple[str, ...]) -> None:
        """Select the weights to train from now on by the prefixes of their names, with a new optimizer."""
        self.trained = [name for name in self.weights if name.startswith(prefixes)]
        matrices = [self.weights[name] for name in self.trained if self.weights[name].ndim > 1]
        vectors = [self.weights[name] for name in self.trained if self.weights[name].ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)
        averaged = self.averaging and self._trains("model.")
        self.average = {name: value.clone() for name, value in self.weights.items()} if averaged else {}

    def _trains(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.trained)

    def learn(self, own: Sequence[Batch], total: int, rate: float, tally: Tally | None = None) -> None:
        """Run one step on `total` batches; `own` is this process's share of them."""
        lengths = [self.weights[name].numel() for name in self.trained]
        flat = torch.zeros(sum(lengths))
        for batch in own:
            self._loss(batch, tally or Tally()).backward()  # type: ignore[no-untyped-call]
            flat += self._take_gradients()
        if distributed.is_initialized():
            distributed.all_reduce(flat)
        parts = torch.split(flat.div_(total), lengths)
        for name, part in zip(self.trained, parts, strict=True):
            self.weights[name].grad = part.view_as(self.weights[name])
        nn.utils.clip_grad_norm_([self.weights[name] for name in self.trained], CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._copy_weights()

    def _loss(self, batch: Batch, tally: Tally) -> Tensor:
        with torch.set_grad_enabled(self._trains("visual.")):
            seen = self.network.see(batch)
        loss = torch.zeros(())
        if len(seen) and self._trains("heads."):
            cells = self._label_loss("cells", seen, batch.cells)
            loss = CELL_WEIGHT * cells
            tally.sums["cells"] += float(cells.detach())
        if batch.tasks:
            loss = loss + self._answer_loss(batch, seen, tally)
        tally.add(loss=float(loss.detach()))
        return loss

    def _answer_loss(self, batch: Batch, seen: Tensor, tally: Tally) -> Tensor:
        reading = self.network.read(batch, seen)
        kept = batch.targets != -100
        logits, targets = self.network.logits(reading.last), batch.targets[kept]
        answers = F.cross_entropy(logits, targets)
        tally.sums["answers"] += float(answers.detach())
        tally.grade(batch, kept, logits.argmax(-1) == targets)
        places = torch.zeros(())
        if self._trains("heads."):
            looked = reading.halfway[batch.places[:, 0], batch.places[:, 1]]
            looked = looked * torch.rsqrt(looked.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(looked.dtype)
            places = PLACE_WEIGHT * self._label_loss("places", looked, batch.places[:, 2:])
        return answers + places + self.pointing * _pointing_loss(batch, reading.pointing, tally)

    def _label_loss(self, head: str, vectors: Tensor, wanted: Tensor) -> Tensor:
        """Return the sum of the losses of a head's labels; a label that is unknown in the whole batch counts zero."""
        outputs = torch.split(
            getattr(self.network.heads, head)(vectors).float(), list(self.network.heads.sizes[head]), dim=-1
        )
        total = torch.zeros(())
        for output, target in zip(outputs, wanted.unbind(-1), strict=True):
            known = (target != labels.UNKNOWN).sum().clamp(min=1)
            total = total + F.cross_entropy(output, target, ignore_index=labels.UNKNOWN, reduction="sum") / known
        return total

    def _take_gradients(self) -> Tensor:
        """Return all gradients as one fp32 vector, and clear them."""
        parameters = dict(self.network.named_parameters())
        parts = []
        for name in self.trained:
            gradient = parameters[name].grad
            parts.append(torch.zeros(parameters[name].numel()) if gradient is None else gradient.float().flatten())
            parameters[name].grad = None
        return torch.cat(parts)

    @torch.no_grad()
    def _copy_weights(self) -> None:
        trained = [self.weights[name] for name in self.trained]
        parameters = dict(self.network.named_parameters())
        torch._foreach_copy_([parameters[name] for name in self.trained], trained)
        if self.average:
            torch._foreach_lerp_([self.average[name] for name in self.trained], trained, 1 - self.memory)

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "average": self.average, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a saved state; `begin` must have been called as before saving."""
        self.set_weights(state["weights"])
        if self.averaging:
            self.average = {name: value.clone() for name, value in state["average"].items()}
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights; those that are not given, such as the heads of a published checkpoint, stay."""
        for name, value in weights.items():
            self.weights[name].copy_(value)
        for name, parameter in self.network.named_parameters():
            parameter.copy_(self.weights[name])


def _pointing_loss(batch: Batch, attended: Tensor, tally: Tally) -> Tensor:
    """Return the loss for attention outside of the objects that the questions are about."""
    if not len(batch.pointers):
        return torch.zeros(())
    shares = (attended[batch.pointers[:, 0], batch.pointers[:, 1]].float() * batch.spots).sum(-1)
    tally.sums["pointed"] += float(shares.detach().mean())
    return -(shares + 1e-4).log().mean()
