"""The store of responses: its limits, and what conversations share."""

from __future__ import annotations

import json

import pytest

from dashinfer_vlm_server.endpoints.responses.response_store import ResponseStore, StoredResponse

KIB = 1024


def turn(name, previous=None, *, size=KIB):
    answer = {"id": f"answer {name}", "type": "message", "content": f"Answer of {name}"}
    body = json.dumps({"id": name, "output": [answer]})
    item = {"id": f"item {name}", "role": "user", "content": f"{name} ".ljust(size, "x")}
    return StoredResponse(id=name, body=body.encode(), input=(item,), output_ids=(answer["id"],), previous=previous)


def stored(store, client, *names):
    return [name for name in names if store.get(client, name)]


def test_responses_belong_to_a_client():
    store = ResponseStore(max_responses=9, max_bytes=99 * KIB)
    store.add("a", turn("one"))
    assert store.get("a", "one").id == "one"
    assert store.get("b", "one") is None
    assert not store.delete("b", "one")
    assert store.delete("a", "one")
    assert not store.delete("a", "one")
    assert (store.num_bytes, store.num_responses) == (0, 0)


def test_conversation_has_inputs_and_outputs_in_order():
    first = turn("one", size=0)
    contents = [item["content"] for item in turn("two", first, size=0).conversation()]
    assert contents == ["one ", "Answer of one", "two ", "Answer of two"]


def test_least_recently_used_response_is_removed():
    store = ResponseStore(max_responses=3, max_bytes=99 * KIB)
    for name in ("one", "two", "three"):
        store.add("a", turn(name))
    store.get("a", "one")
    store.add("a", turn("four"))
    assert stored(store, "a", "one", "two", "three", "four") == ["one", "three", "four"]


def test_memory_is_limited():
    store = ResponseStore(max_responses=99, max_bytes=10 * KIB)
    for index in range(50):
        store.add("a", turn(str(index)))
        assert store.num_bytes <= 10 * KIB
    kept = stored(store, "a", *map(str, range(50)))
    assert kept == [str(index) for index in range(50 - len(kept), 50)]
    assert len(kept) >= 4
    store.add("a", turn("huge", size=11 * KIB))
    assert store.num_responses == 0


def test_values_count_by_their_memory_rather_than_text():
    store = ResponseStore(max_responses=99, max_bytes=99 * KIB)
    content = [{} for _ in range(1000)]
    store.add("a", StoredResponse(id="a", body=b"{}", input=({"id": "b", "content": content},), output_ids=()))
    assert store.num_bytes > 60 * KIB


def test_security_28_keys_of_objects_count():
    store = ResponseStore(max_responses=99, max_bytes=99 * KIB)
    item = {"id": "b", "image_url": {"x" * 100 * KIB: 1}}
    store.add("a", StoredResponse(id="a", body=b"{}", input=(item,), output_ids=()))
    assert store.num_responses == 0


class Reader:
    discarded = False

    def discard(self):
        self.discarded = True


REMOVALS = {
    "deleted": lambda store: store.delete("a", "one"),
    "replaced": lambda store: store.add("a", turn("three", size=9 * KIB)),
    "key removed": lambda store: store.discard_except(["b"]),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_security_28_readers_release_removed_items(remove):
    store = ResponseStore(max_responses=99, max_bytes=10 * KIB)
    store.add("a", turn("one"))
    store.add("b", turn("two"))
    reader, other = Reader(), Reader()
    assert store.add_reader("a", "one", reader)
    assert store.add_reader("b", "two", other)
    remove(store)
    assert (reader.discarded, other.discarded) == (True, False)
    assert not store.add_reader("a", "one", reader)


def test_readers_keep_items_of_a_deleted_response_that_another_continues():
    store = ResponseStore(max_responses=99, max_bytes=99 * KIB)
    store.add("a", first := turn("one"))
    store.add("a", turn("two", first))
    reader = Reader()
    assert store.add_reader("a", "one", reader)
    store.delete("a", "one")
    assert not reader.discarded
    store.delete("a", "two")
    assert reader.discarded


def test_items_are_found_as_long_as_a_response_has_them():
    store = ResponseStore(max_responses=3, max_bytes=99 * KIB)
    store.add("a", first := turn("one"))
    (item,) = first.input
    store.add("a", StoredResponse(id="two", body=b'{"output": []}', input=(item,), output_ids=()))
    found = store.find_items("a", ["item one", "answer one", "item two"])
    assert {name: found[name]["content"] for name in found} == {
        "item one": item["content"], "answer one": "Answer of one"
    }  # fmt: skip
    assert store.find_items("b", ["item one"]) == {}
    assert store.delete("a", "one")
    assert store.find_items("a", ["item one", "answer one"]).keys() == {"item one"}
    assert store.delete("a", "two")
    assert store.find_items("a", ["item one"]) == {}


def test_responses_whose_items_are_found_are_used():
    store = ResponseStore(max_responses=2, max_bytes=99 * KIB)
    store.add("a", turn("one"))
    store.add("a", turn("two"))
    store.find_items("a", ["answer one"])
    store.add("a", turn("three"))
    assert stored(store, "a", "one", "two", "three") == ["one", "three"]


def test_turns_of_a_conversation_count_once():
    store = ResponseStore(max_responses=99, max_bytes=99 * KIB)
    store.add("a", first := turn("one", size=20 * KIB))
    before = store.num_bytes
    for index in range(5):
        store.add("a", turn(f"next {index}", first))
    assert before < store.num_bytes < before + 15 * KIB
    store.delete("a", "one")
    assert store.num_bytes > 20 * KIB  # the others continue it
    assert store.num_responses == 6
    for index in range(5):
        store.delete("a", f"next {index}")
    assert (store.num_bytes, store.num_responses) == (0, 0)


def test_deleted_turn_that_is_continued_later_counts_again():
    store = ResponseStore(max_responses=99, max_bytes=99 * KIB)
    store.add("a", first := turn("one", size=20 * KIB))
    before = store.num_bytes
    store.delete("a", "one")  # while a request that continues it runs
    store.add("a", turn("two", first))
    assert store.num_bytes > before
    store.delete("a", "two")
    assert store.num_bytes == 0


def test_client_with_many_responses_does_not_remove_those_of_others():
    store = ResponseStore(max_responses=10, max_bytes=20 * KIB)
    store.add("small", turn("mine"))
    for index in range(100):
        store.add("large", turn(str(index)))
    store.add("large", turn("huge", size=19 * KIB))
    assert store.get("small", "mine")
    assert store.num_responses <= 10


def test_long_conversation_is_removed_without_recursion():
    store = ResponseStore(max_responses=99_999, max_bytes=999_999 * KIB)
    last = None
    for index in range(5000):
        last = turn(str(index), last, size=0)
    store.add("a", last)
    assert store.num_responses == 5000
    assert len(last.conversation()) == 10_000
    del last
    store.delete("a", "4999")
    assert (store.num_bytes, store.num_responses) == (0, 0)


def test_responses_of_removed_keys_are_discarded():
    store = ResponseStore(max_responses=9, max_bytes=99 * KIB)
    store.add("a", turn("one"))
    store.add("b", turn("two"))
    store.discard_except({"b", "c"})
    assert (store.get("a", "one"), store.num_responses) == (None, 1)
    assert store.get("b", "two")
