"""The rules by which models are loaded and unloaded: single cases, and random sequences against a simple model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from dashinfer_vlm_core.engine.model_rules import (
    Action,
    Admit,
    Load,
    ModelPolicy,
    ModelScheduler,
    RejectBusy,
    RejectFailed,
    RuledModel,
    Unload,
)

POLICY = ModelPolicy(memory_limit=10, idle_unload=100, max_wait=60, min_serve=5, cool_down=30)


def scheduler(*, policy=POLICY, pinned=(), **sizes) -> ModelScheduler:
    return ModelScheduler(
        [RuledModel(name=name, estimate=size, pinned=name in pinned) for name, size in sizes.items()], policy
    )


def test_first_request_loads_its_model_and_others_wait_for_it():
    rules = scheduler(a=6)
    assert rules.request(1, "a", 0) == [Load("a")]
    assert rules.request(2, "a", 1) == []
    assert rules.loaded("a", 3) == [Admit(1), Admit(2)]
    assert rules.request(3, "a", 4) == [Admit(3)]


def test_idle_model_leaves_at_once_for_another():
    rules = scheduler(a=6, b=6)
    rules.request(1, "a", 0)
    rules.loaded("a", 1)
    rules.end(1, 1.5)
    assert rules.request(2, "b", 2) == [Unload("a")]
    assert rules.unloaded("a", 3) == [Load("b")]
    assert rules.loaded("b", 4) == [Admit(2)]


def test_model_in_use_serves_for_a_set_time_then_accepts_no_requests_and_ends_the_running_ones():
    rules = scheduler(a=6, b=6)
    rules.request(1, "a", 0)
    rules.loaded("a", 1)
    assert rules.request(2, "b", 2) == []
    assert rules.request(3, "a", 3) == [Admit(3)]
    assert rules.next_event(3) == 6
    assert rules.tick(6) == []
    assert rules.request(4, "a", 7) == []
    assert rules.end(1, 8) == []
    assert rules.end(3, 9) == [Unload("a")]
    assert rules.unloaded("a", 10) == [Load("b")]
    assert rules.loaded("b", 11) == [Admit(2)]
    assert rules.end(2, 12) == [Unload("b")]  # request 4 still waits


def test_canceled_request_needs_no_memory():
    rules = scheduler(a=6, b=6)
    rules.request(1, "a", 0)
    rules.loaded("a", 1)
    rules.request(2, "b", 7)
    assert rules.request(3, "a", 8) == []
    assert rules.end(2, 9) == [Admit(3)]


@pytest.mark.parametrize(
    ("sizes", "pinned", "unloaded"),
    [
        ({"a": 3, "b": 3, "c": 3, "d": 3}, (), ["b"]),
        ({"a": 3, "b": 3, "c": 3, "d": 3}, ("b",), ["c"]),
        ({"a": 3, "b": 3, "c": 3, "d": 6}, (), ["b", "c"]),
        ({"a": 1, "b": 3, "c": 3, "d": 3}, (), []),
    ],
)
def test_least_recently_used_models_leave_first(sizes, pinned, unloaded):
    rules = scheduler(**sizes, pinned=pinned)
    for request, name in enumerate("bca"):
        rules.request(request, name, request)
        rules.loaded(name, request)
        rules.end(request, request)
    assert rules.request(9, "d", 10) == ([Unload(name) for name in unloaded] or [Load("d")])


def test_nobody_waits_longer_than_a_set_time():
    rules = scheduler(a=6)
    rules.request(1, "a", 0)
    assert rules.next_event(0) == 60
    assert rules.tick(59.9) == []
    assert rules.tick(60) == [RejectBusy(1, retry_after=5)]
    assert rules.loaded("a", 61) == []


def test_failed_load_rejects_all_that_wait_and_is_not_repeated_at_once():
    rules = scheduler(a=6)
    rules.request(1, "a", 0)
    rules.request(2, "a", 0)
    assert rules.load_failed("a", "no file", 1) == [RejectFailed(1, "no file"), RejectFailed(2, "no file")]
    assert rules.request(3, "a", 30) == [RejectFailed(3, "no file")]
    assert rules.request(4, "a", 31) == [Load("a")]
    assert rules.loaded("a", 32) == [Admit(4)]
    assert not rules.models["a"].failure


def test_idle_model_is_unloaded_unless_it_is_pinned():
    rules = scheduler(a=3, b=3, pinned=("b",))
    for request, name in enumerate("ab"):
        rules.request(request, name, 0)
        rules.loaded(name, 0)
    assert rules.tick(1000) == []  # both are in use
    rules.end(0, 1000)
    rules.end(1, 1000)
    assert rules.next_event(1000) == 1100
    assert rules.tick(1100) == [Unload("a")]
    assert rules.tick(9999) == []


def test_model_that_died_is_loaded_again():
    rules = scheduler(a=6)
    rules.request(1, "a", 0)
    rules.loaded("a", 1)
    assert rules.unload("a", 2) == []
    assert rules.request(2, "a", 3) == []
    assert rules.end(1, 4) == [Unload("a")]
    assert rules.unloaded("a", 5) == [Load("a")]


def test_measured_memory_above_the_limit_unloads_others_but_not_the_last():
    rules = scheduler(a=4, b=4)
    for request, name in enumerate("ab"):
        rules.request(request, name, request)
        actions = rules.loaded(name, request, num_bytes=4 if name == "a" else 11)
        rules.end(request, request)
    assert actions == [Admit(1), Unload("a")]
    assert rules.unloaded("a", 2) == []
    assert rules.models["b"].state == "ready"


# Random sequences


@dataclass
class Observed:
    """What the actions of a scheduler mean, and whether they follow the rules. It knows only what happened."""

    sizes: dict[str, int]
    pinned: set[str]
    now: float = 0.0
    state: dict[str, str] = field(default_factory=dict)
    waiting: dict[int, tuple[str, float]] = field(default_factory=dict)
    running: dict[int, str] = field(default_factory=dict)
    loaded_at: dict[str, float] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    failed_at: dict[str, float] = field(default_factory=dict)
    asked_to_leave: set[str] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)

    def see(self, actions: list[Action]) -> None:
        for action in actions:
            self._seen[type(action)](self, action)
            used = sum(size for name, size in self.sizes.items() if self.state.get(name))
            assert used <= POLICY.memory_limit
            assert list(self.state.values()).count("loading") <= 1

    def users(self, model: str) -> int:
        return list(self.running.values()).count(model)

    def _finish(self, request: int, outcome: str) -> tuple[str, float]:
        assert request not in self.outcomes, "each request has one outcome"
        self.outcomes[request] = outcome
        return self.waiting.pop(request)

    def _admit(self, action: Admit) -> None:
        model, _ = self._finish(action.request, "admitted")
        assert self.state[model] == "ready"
        assert model not in self.asked_to_leave
        self.running[action.request] = model

    def _reject_busy(self, action: RejectBusy) -> None:
        _, arrival = self._finish(action.request, "busy")
        assert self.now >= arrival + POLICY.max_wait

    def _reject_failed(self, action: RejectFailed) -> None:
        model, _ = self._finish(action.request, "failed")
        assert action.reason == f"failure of {model}"
        assert self.now < self.failed_at[model] + POLICY.cool_down

    def _load(self, action: Load) -> None:
        assert action.model not in self.state
        oldest = next(model for model, _ in self.waiting.values() if self.state.get(model) is None)
        assert action.model == oldest
        assert self.now >= self.failed_at.get(action.model, -99) + POLICY.cool_down
        self.state[action.model] = "loading"

    def _unload(self, action: Unload) -> None:
        model = action.model
        assert self.state[model] == "ready"
        assert not self.users(model)
        asked = model in self.asked_to_leave
        assert asked or model not in self.pinned
        idle = self.now >= self.ended_at[model] + POLICY.idle_unload
        others_wait = any(self.state.get(name) is None for name, _ in self.waiting.values())
        own_wait = any(name == model for name, _ in self.waiting.values())
        served = self.now >= self.loaded_at[model] + POLICY.min_serve
        assert asked or idle or (others_wait and (served or not own_wait))
        self.state[model] = "unloading"

    _seen: ClassVar = {
        Admit: _admit,
        RejectBusy: _reject_busy,
        RejectFailed: _reject_failed,
        Load: _load,
        Unload: _unload,
    }


class Sequence:
    """Random events, which a scheduler and `Observed` see."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sizes = {name: self.random.randint(1, 8) for name in "abcde"}
        pinned = {name for name in "abcde" if self.sizes[name] == 1 and self.random.random() < 0.5}
        pinned = set(sorted(pinned)[:2])  # every model fits next to them
        self.observed = Observed(self.sizes, pinned)
        self.rules = scheduler(pinned=pinned, **self.sizes)
        self.next_request = 0

    def run(self, steps: int) -> None:
        events = [self.request] * 6 + [self.end] * 5 + [self.loaded] * 4 + [self.unloaded] * 4
        events += [self.cancel, self.fail, self.unload, self.wait, self.wait, self.skip]
        for _ in range(steps):
            self.random.choice(events)()
            self.observed.now += self.random.choice([0, 0.1, 1])
        while self.observed.waiting or set(self.observed.state) - self.observed.pinned:
            for event in (self.loaded, self.unloaded, self.end, self.wait):
                event()

    def pick(self, items) -> object:
        return self.random.choice(sorted(items)) if items else None

    def in_state(self, state: str) -> str | None:
        return self.pick([name for name, found in self.observed.state.items() if found == state])

    def request(self) -> None:
        model = self.random.choice("abcde")
        self.next_request += 1
        self.observed.waiting[self.next_request] = (model, self.observed.now)
        self.observed.see(self.rules.request(self.next_request, model, self.observed.now))

    def end(self) -> None:
        if request := self.pick(self.observed.running):
            model = self.observed.running.pop(request)
            self.observed.ended_at[model] = self.observed.now
            self.observed.see(self.rules.end(request, self.observed.now))

    def cancel(self) -> None:
        if request := self.pick(self.observed.waiting):
            self.observed.waiting.pop(request)
            self.observed.outcomes[request] = "canceled"
            self.observed.see(self.rules.end(request, self.observed.now))

    def loaded(self) -> None:
        if model := self.in_state("loading"):
            self.observed.state[model] = "ready"
            self.observed.loaded_at[model] = self.observed.ended_at[model] = self.observed.now
            self.observed.see(self.rules.loaded(model, self.observed.now))

    def fail(self) -> None:
        if model := self.in_state("loading"):
            del self.observed.state[model]
            self.observed.failed_at[model] = self.observed.now
            self.observed.see(self.rules.load_failed(model, f"failure of {model}", self.observed.now))

    def unload(self) -> None:
        """An operator unloads a model, or its process is killed."""
        if model := self.in_state("ready"):
            self.observed.asked_to_leave.add(model)
            self.observed.see(self.rules.unload(model, self.observed.now))

    def unloaded(self) -> None:
        if model := self.in_state("unloading"):
            del self.observed.state[model]
            self.observed.asked_to_leave.discard(model)
            self.observed.see(self.rules.unloaded(model, self.observed.now))

    def wait(self) -> None:
        """Nothing happens until a time that matters."""
        event = self.rules.next_event(self.observed.now)
        if event < 1e9:
            self.observed.now = max(self.observed.now, event)
        self.observed.see(self.rules.tick(self.observed.now))
        late = [request for request, (_, at) in self.observed.waiting.items() if at + 60 < self.observed.now]
        assert not late

    def skip(self) -> None:
        """Time passes, but not beyond the next event."""
        event = self.rules.next_event(self.observed.now)
        self.observed.now = min(event, self.observed.now + self.random.uniform(0, 50))
        self.observed.see(self.rules.tick(self.observed.now))


def test_random_sequences_follow_the_rules():
    outcomes = []
    for seed in range(50):
        sequence = Sequence(seed)
        sequence.run(400)
        assert len(sequence.observed.outcomes) == sequence.next_request, "every request has an outcome"
        outcomes += sequence.observed.outcomes.values()
    assert min(map(outcomes.count, ("admitted", "busy", "failed", "canceled"))) > 100
