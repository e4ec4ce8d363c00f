"""The stored responses of the Responses API: in memory, bounded, and separate for each client."""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .json_stream import JsonStream


class StoredEvents(Protocol):
    """The events of a response that is or was created in the background."""

    def body(self) -> str:
        """Return the response so far as JSON text, while it is created."""

    def read(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after a sequence number, and those to come; a large one in several parts."""

    async def cancel(self) -> None:
        """End the creation."""

    def discard(self) -> None:
        """End the creation, and release the events. Safe to call in any thread."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredResponse:
    """A response, with what it takes to continue its conversation.

    Attributes:
        id: its id.
        body: the response as JSON text.
        input: the items of its request, without those of `previous`; each has an `id`.
        output_ids: the ids of the items of its output.
        previous: the response that its request continued.
        model: the name of the model that generated it, if there are several.
        status: its status; for one that is created in the background, `queued` until it has ended.
        background: its events, if it is created in the background.
        connection: the WebSocket that alone can refer to it, until it is closed; empty for all requests of its client.
    """

    id: str
    body: bytes = field(repr=False)
    input: tuple[Mapping[str, Any], ...] = field(repr=False)
    output_ids: tuple[str, ...] = field(repr=False)
    previous: StoredResponse | None = field(default=None, repr=False)
    model: str = ""
    status: str = "completed"
    background: StoredEvents | None = field(default=None, repr=False)
    connection: str = ""

    def current_body(self) -> bytes:
        """Return the response as JSON text; one that is being created, as far as it is."""
        is_running = self.background is not None and self.status == "queued"
        return self.background.body().encode() if self.background is not None and is_running else self.body

    def items(self) -> tuple[Mapping[str, Any], ...]:
        """Return the items of its request and of its output."""
        return (*self.input, *json.loads(self.body)["output"])

    def context(self) -> tuple[Mapping[str, Any], ...]:
        """Return the items that it was generated from: those of the conversation before it, and of its request."""
        return (*(self.previous.conversation() if self.previous else ()), *self.input)

    def conversation(self) -> tuple[Mapping[str, Any], ...]:
        """Return the items of the conversation up to this response, including its output."""
        turns: list[StoredResponse] = []
        turn: StoredResponse | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return tuple(item for turn in reversed(turns) for item in turn.items())


class ResponseStore:
    """Stored responses by client and id. Safe to use from several threads.

    A response that continues another one keeps that one's items, so these count until the last of them is removed. If
    a limit is exceeded, the response that was not used for the longest time is removed, of the client that has most.

    Args:
        max_responses: maximum number of responses, including those that others continue; 0 stores none.
        max_bytes: maximum memory of their items and texts.
    """

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._clients: dict[str, _Client] = {}
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        return self._max_responses > 0

    @property
    def num_bytes(self) -> int:
        """The memory of all responses."""
        return sum(client.num_bytes for client in self._clients.values())

    @property
    def num_responses(self) -> int:
        """The number of all responses, including those that only others refer to."""
        return sum(len(client.held) for client in self._clients.values())

    def add(self, client_id: str, response: StoredResponse) -> None:
        """Store a response, and remove others if a limit is exceeded."""
        held = _hold(response)
        with self._lock:
            self._clients.setdefault(client_id, _Client()).add(held)
            self._apply_limits()

    def update(self, client_id: str, response: StoredResponse) -> bool:
        """Replace a response by a later state of it; return whether it still is stored."""
        held = _hold(response)
        with self._lock:
            client = self._clients.get(client_id)
            if client is None or response.id not in client.responses:
                return False
            client.replace(held)
            self._apply_limits()
            return True

    def add_bytes(self, client_id: str, response_id: str, num_bytes: int) -> None:
        """Count memory that a response has in addition, such as that of its events, until it is removed."""
        with self._lock:
            client = self._clients.get(client_id)
            if client is not None and response_id in client.held:
                client.add_bytes(response_id, num_bytes)
                self._apply_limits()

    def get(self, client_id: str, response_id: str, *, connection: str = "") -> StoredResponse | None:
        """Return a response of a client that a connection can refer to, and record that it is used."""
        with self._lock:
            found = self._clients.get(client_id, _Client()).use(response_id)
        return found if found is not None and found.connection in {"", connection} else None

    def add_reader(self, client_id: str, response_id: str, reader: JsonStream) -> bool:
        """Let a reader hold the items of a response until these are removed; return whether they still are stored."""
        with self._lock:
            client = self._clients.get(client_id)
            if client is None or response_id not in client.held:
                return False
            client.held[response_id].readers.add(reader)
            return True

    def find_items(
        self, client_id: str, item_ids: Collection[str], *, model: str = "", connection: str = ""
    ) -> dict[str, Mapping[str, Any]]:
        """Return items of a client's responses of a model by id, without those that are unknown; record that these are
        used."""
        with self._lock:
            found = self._clients.get(client_id, _Client()).use_items(item_ids, model, {"", connection})
        return {item["id"]: item for response, ids in found for item in response.items() if item["id"] in ids}

    def delete(self, client_id: str, response_id: str) -> bool:
        """Remove a response; return whether the client had it."""
        with self._lock:
            client = self._clients.get(client_id)
            if client is None or response_id not in client.responses:
                return False
            self._remove(client_id, response_id)
            return True

    def discard_except(self, client_ids: Collection[str]) -> None:
        """Remove the responses of other clients, such as API keys that are not valid anymore."""
        with self._lock:
            for name in self._clients.keys() - set(client_ids):
                self._clients.pop(name).discard()

    def _apply_limits(self) -> None:
        while self.num_bytes > self._max_bytes:
            self._remove_oldest(max(self._clients, key=lambda name: self._clients[name].num_bytes))
        while self.num_responses > self._max_responses:
            self._remove_oldest(max(self._clients, key=lambda name: len(self._clients[name].held)))

    def _remove_oldest(self, client_id: str) -> None:
        self._remove(client_id, next(iter(self._clients[client_id].responses)))

    def _remove(self, client_id: str, response_id: str) -> None:
        client = self._clients[client_id]
        client.remove(response_id)
        if not client.responses:
            del self._clients[client_id]


@dataclass(slots=True)
class _Held:
    """A response in memory.

    Attributes:
        response: the response.
        item_ids: the ids of its items.
        size: its memory in bytes, without the responses before it.
        added: memory that was counted in addition.
        uses: how often it is referred to, by its id and by the responses that continue it.
        readers: hold its items, which do not count after its removal.
    """

    response: StoredResponse
    item_ids: frozenset[str]
    size: int
    added: int = 0
    uses: int = 0
    readers: weakref.WeakSet[JsonStream] = field(default_factory=weakref.WeakSet)

    def discard(self) -> None:
        for reader in self.readers:
            reader.discard()
        if self.response.background:
            self.response.background.discard()


class _Client:
    """The responses of one client.

    Attributes:
        responses: those that can be retrieved; the one that was used last is the last.
        held: those in memory, by id.
        num_bytes: the memory of `held`.
    """

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.held: dict[str, _Held] = {}
        self.num_bytes = 0

    def add(self, new: _Held) -> None:
        self.responses[new.response.id] = new.response
        turn: StoredResponse | None = new.response
        while turn is not None:  # until a response that is in memory already
            held = self.held.setdefault(turn.id, new if turn is new.response else _hold(turn))
            held.uses += 1
            if held.uses > 1:
                break
            self.num_bytes += held.size + held.added
            turn = turn.previous

    def replace(self, new: _Held) -> None:
        old = self.held[new.response.id]
        new.added = old.added
        new.uses = old.uses
        new.readers = old.readers
        self.held[new.response.id] = new
        self.responses[new.response.id] = new.response
        self.num_bytes += new.size - old.size

    def add_bytes(self, response_id: str, num_bytes: int) -> None:
        self.held[response_id].added += num_bytes
        self.num_bytes += num_bytes

    def use(self, response_id: str) -> StoredResponse | None:
        if response_id not in self.responses:
            return None
        self.responses.move_to_end(response_id)
        return self.responses[response_id]

    def use_items(
        self, item_ids: Collection[str], model: str, connections: Collection[str]
    ) -> list[tuple[StoredResponse, frozenset[str]]]:
        """Return the responses that have these items, and which of them. The newest has most of its conversation."""
        found = []
        missing = frozenset(item_ids)
        for held in reversed(self.held.values()):
            response = held.response
            is_known = response.model == model and response.connection in connections
            if is_known and (ids := missing & held.item_ids):
                found.append((response, ids))
                missing -= ids
            if not missing:
                break
        for used, _ in found:
            self.use(used.id)
        return found

    def remove(self, response_id: str) -> None:
        turn: StoredResponse | None = self.responses.pop(response_id)
        while turn is not None:
            held = self.held[turn.id]
            held.uses -= 1
            if held.uses:
                break
            self.held.pop(turn.id).discard()
            self.num_bytes -= held.size + held.added
            turn = turn.previous

    def discard(self) -> None:
        for held in self.held.values():
            held.discard()


def _hold(response: StoredResponse) -> _Held:
    item_ids = frozenset((*response.output_ids, *(item["id"] for item in response.input)))
    return _Held(response, item_ids, size=_num_bytes((response.body, response.input, item_ids)))


def _num_bytes(value: object) -> int:
    """Return the memory of a JSON value and of what it contains; of objects that it shares, more than that."""
    total = 0
    values = [value]
    while values:
        part = values.pop()
        total += sys.getsizeof(part)
        children: Iterable[object] = ()
        if isinstance(part, Mapping):
            children = (*part.keys(), *part.values())
        elif isinstance(part, (list, tuple, frozenset)):
            children = part
        values.extend(children)
    return total
