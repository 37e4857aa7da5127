"""Turns of several keys."""

from __future__ import annotations

from coordinator.serve.requests.admission import Turns, greediest


def test_keys_take_turns_and_each_keeps_its_order() -> None:
    turns = Turns()
    waiting = [(turns.next("a"), f"a{i}") for i in range(4)] + [(turns.next("b"), f"b{i}") for i in range(2)]
    assert [name for _, name in sorted(waiting)] == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_newcomer_waits_for_one_request_of_a_key_that_sent_many() -> None:
    turns = Turns()
    many = [turns.next("greedy") for _ in range(64)]
    turns.serve(many[9])
    assert turns.next("other") == many[9]
    assert turns.latest == many[-1]


def test_key_that_was_idle_gains_nothing_for_it() -> None:
    turns = Turns()
    for _ in range(100):
        turns.serve(turns.next("a"))
    assert turns.next("b") == turns.next("a") - 1


def test_only_a_key_with_more_requests_gives_up_a_place() -> None:
    assert greediest(["a", "a", "b"], "b") == "a"
    assert greediest(["a", "a", "b", "b"], "b") == "b"
    assert greediest(["a"], "a") == "a"
