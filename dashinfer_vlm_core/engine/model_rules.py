"""The rules by which models are loaded and unloaded, without I/O: events go in, actions come out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

ModelState = Literal["unloaded", "loading", "ready", "unloading"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPolicy:
    """When models are loaded and unloaded; times in seconds.

    Attributes:
        memory_limit: maximum number of bytes of all loaded models together; None for no limit.
        idle_unload: how long a model without requests stays loaded; None for ever.
        max_wait: how long a request waits for its model before it is rejected.
        min_serve: how long a model serves its queue before another model takes its memory.
        cool_down: how long a model that could not be loaded is not loaded again.
    """

    memory_limit: int | None = None
    idle_unload: float | None = None
    max_wait: float = 120.0
    min_serve: float = 5.0
    cool_down: float = 30.0


@dataclass(frozen=True, slots=True)
class Admit:
    """Run this request: its model is loaded, and stays so until the request ends."""

    request: int


@dataclass(frozen=True, slots=True)
class RejectBusy:
    """Reject this request: it has waited for the maximum time. It may be sent again after `retry_after` seconds."""

    request: int
    retry_after: float


@dataclass(frozen=True, slots=True)
class RejectFailed:
    """Reject this request: its model could not be loaded."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Load:
    """Load this model, then call `loaded` or `load_failed`."""

    model: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload this model, which has no running requests, then call `unloaded`."""

    model: str


Action = Admit | RejectBusy | RejectFailed | Load | Unload


@dataclass(kw_only=True, slots=True)
class RuledModel:
    """A model as the rules see it.

    Attributes:
        name: its name.
        estimate: its memory in bytes, before it was loaded.
        num_bytes: its memory in bytes: the estimate, or what was measured.
        pinned: whether it is never unloaded.
        state: `unloading` includes the time in which running requests end.
        failure: why it could not be loaded; empty if it could, or was not loaded yet.
        retry_at: when it may be loaded again after a failure.
        loaded_at: when it was loaded.
        used_at: when its last request began to run.
        idle_since: when its last running request ended.
        running: its running requests.
        must_unload: whether it accepts no requests, and is unloaded when the running ones have ended.
    """

    name: str
    estimate: int
    pinned: bool = False
    state: ModelState = "unloaded"
    failure: str = ""
    num_bytes: int = field(init=False)
    retry_at: float = -math.inf
    loaded_at: float = -math.inf
    used_at: float = -math.inf
    idle_since: float = math.inf
    running: set[int] = field(default_factory=set)
    must_unload: bool = False

    def __post_init__(self) -> None:
        self.num_bytes = self.estimate


@dataclass(frozen=True, slots=True)
class _Waiting:
    model: RuledModel
    deadline: float


class ModelScheduler:
    """Decides which models are loaded. One is loaded at a time, for the request that has waited longest.

    If the memory does not suffice, models without requests are unloaded, then models that have served theirs for
    `min_serve` seconds; in each case those first that were requested least recently. They accept no requests from then
    on, and end the running ones. `now` is a time in seconds that never decreases. Not safe to use from several threads.

    Args:
        models: the models, all unloaded.
        policy: limits and times.
    """

    def __init__(self, models: Iterable[RuledModel], policy: ModelPolicy) -> None:
        self.models: dict[str, RuledModel] = {model.name: model for model in models}
        self._policy = policy
        self._waiting: dict[int, _Waiting] = {}  # in order of arrival
        self._running: dict[int, RuledModel] = {}

    # Events

    def request(self, request: int, model: str, now: float, *, max_wait: float | None = None) -> list[Action]:
        """A request for a model arrived. `max_wait` replaces that of the policy."""
        ruled = self.models[model]
        if ruled.state == "unloaded" and now < ruled.retry_at:
            return [RejectFailed(request, ruled.failure)]
        deadline = now + (self._policy.max_wait if max_wait is None else max_wait)
        self._waiting[request] = _Waiting(ruled, deadline)
        return self.tick(now)

    def end(self, request: int, now: float) -> list[Action]:
        """A request ended, or was canceled while it ran or waited; nothing happens if it was rejected."""
        self._waiting.pop(request, None)
        if model := self._running.pop(request, None):
            model.running.discard(request)
            if not model.running:
                model.idle_since = now
        return self.tick(now)

    def loaded(self, model: str, now: float, *, num_bytes: int = 0) -> list[Action]:
        """A model is loaded. `num_bytes` is by how much memory has grown; if that is more than was estimated, it counts
        until the model is loaded again, unless other requests run, whose memory grows too."""
        ruled = self.models[model]
        ruled.state = "ready"
        ruled.failure = ""
        ruled.num_bytes = max(ruled.estimate, 0 if self._running else num_bytes)
        ruled.loaded_at = ruled.used_at = ruled.idle_since = now
        return self.tick(now)

    def load_failed(self, model: str, reason: str, now: float) -> list[Action]:
        """A model could not be loaded: all requests that wait for it are rejected."""
        ruled = self.models[model]
        ruled.state = "unloaded"
        ruled.failure = reason
        ruled.retry_at = now + self._policy.cool_down
        waiting = [request for request, waiting in self._waiting.items() if waiting.model is ruled]
        for request in waiting:
            del self._waiting[request]
        return [*(RejectFailed(request, reason) for request in waiting), *self.tick(now)]

    def unload(self, model: str, now: float) -> list[Action]:
        """Unload a model, because it is asked for or cannot serve anymore, when its running requests have ended.

        Nothing happens if it is not loaded.
        """
        ruled = self.models[model]
        if ruled.state == "ready":
            ruled.must_unload = True
        return self.tick(now)

    def unloaded(self, model: str, now: float) -> list[Action]:
        """A model's memory is free."""
        ruled = self.models[model]
        ruled.state = "unloaded"
        ruled.must_unload = False
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed. Call it at `next_event`."""
        actions = self._reject_late(now)
        wanted = self._wanted()
        chosen = self._find_leaving(wanted, now)
        leaving = {model.name for model in chosen} | {name for name, model in self.models.items() if model.must_unload}
        actions += self._admit(leaving, now)
        for name, model in self.models.items():
            leaves = name in leaving or self.idle_end(name, now) <= now
            if model.state == "ready" and not model.running and leaves:
                model.state = "unloading"
                actions.append(Unload(name))
        if wanted and not self._excess(wanted.num_bytes):
            wanted.state = "loading"
            actions.append(Load(wanted.name))
        return actions

    def next_event(self, now: float) -> float:
        """Return when `tick` should be called next; infinity if only other events matter."""
        times = [waiting.deadline for waiting in self._waiting.values()]
        ready = [model for model in self.models.values() if model.state == "ready"]
        times += [self.idle_end(model.name, now) for model in ready if not model.running]
        if self._wanted():
            times += [end for model in ready if (end := model.loaded_at + self._policy.min_serve) > now]
        return min(times, default=math.inf)

    # Rules

    def num_waiting(self, model: str) -> int:
        """Return how many requests wait for a model."""
        return sum(waiting.model.name == model for waiting in self._waiting.values())

    def _reject_late(self, now: float) -> list[Action]:
        late = [request for request, waiting in self._waiting.items() if waiting.deadline <= now]
        for request in late:
            del self._waiting[request]
        return [RejectBusy(request, self._policy.min_serve) for request in late]

    def _wanted(self) -> RuledModel | None:
        """Return the model to load next: that of the request that has waited longest; None while one is loaded."""
        if any(model.state == "loading" for model in self.models.values()):
            return None
        return next((each.model for each in self._waiting.values() if each.model.state == "unloaded"), None)

    def _admit(self, leaving: set[str], now: float) -> list[Action]:
        actions: list[Action] = []
        for request, waiting in list(self._waiting.items()):
            model = waiting.model
            if model.state == "ready" and model.name not in leaving:
                del self._waiting[request]
                self._running[request] = model
                model.running.add(request)
                model.used_at = now
                actions.append(Admit(request))
        return actions

    def _find_leaving(self, wanted: RuledModel | None, now: float) -> Sequence[RuledModel]:
        """Return the models to unload for another one, or because measured memory exceeds the limit.

        None of them is unloaded before all can be. A model that leaves accepts no requests, so it stays the first of
        those in use until the memory is free.
        """
        excess = self._excess(wanted.num_bytes if wanted else 0)
        excess -= sum(model.num_bytes for model in self.models.values() if model.state == "unloading")
        ready = [model for model in self.models.values() if model.state == "ready"]
        ready.sort(key=lambda model: (self._in_use(model), model.used_at))
        if wanted is None:
            ready = ready[:-1]  # the only one left may be larger than the limit
        chosen: list[RuledModel] = []
        for model in ready:
            if excess <= 0:
                break
            if model.pinned:
                continue
            if not self._may_leave(model, now):
                return []
            chosen.append(model)
            excess -= model.num_bytes
        return chosen

    def _in_use(self, model: RuledModel) -> bool:
        return bool(model.running or self.num_waiting(model.name))

    def _may_leave(self, model: RuledModel, now: float) -> bool:
        return not self._in_use(model) or now >= model.loaded_at + self._policy.min_serve

    def _excess(self, num_bytes: int) -> int:
        """Return by how many bytes the limit would be exceeded with so many more; 0 if not, or if none can be freed."""
        limit = self._policy.memory_limit
        loaded = [model for model in self.models.values() if model.state != "unloaded"]
        if limit is None or all(model.pinned and model.state == "ready" for model in loaded):
            return 0  # a model that turned out to be larger than it was estimated is loaded alone
        return max(0, sum(model.num_bytes for model in loaded) + num_bytes - limit)

    def idle_end(self, name: str, now: float) -> float:
        """Return when a model is unloaded if no further request comes and its running ones end now."""
        model = self.models[name]
        limit = self._policy.idle_unload
        if limit is None or model.pinned:
            return math.inf
        return (now if model.running else model.idle_since) + limit
