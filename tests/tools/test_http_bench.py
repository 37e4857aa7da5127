"""Experiments with the HTTP gateway: the recorded requests, and the summaries."""

from __future__ import annotations

import json

from tools.bench.experiment import make_experiment, read_settings
from tools.bench.http.experiments import RECORDED, FloodRow, Good, OverheadRow, TurnRow


def test_recorded_requests_begin_alike() -> None:
    command, result, following = json.loads(RECORDED.read_bytes())
    assert [message["role"] for message in result["messages"]] == ["system", "user", "assistant", "tool"]
    assert command["messages"] == result["messages"][:2]
    assert following["messages"][0] == command["messages"][0]
    assert command["messages"][0]["content"].count("domain: input_boolean") == 61


def test_summaries_say_what_is_missed() -> None:
    overhead = make_experiment(read_settings("http-overhead"))
    row = OverheadRow(
        http=(0.012,) * 200,
        direct=(0.008,) * 200,
        num_streams=32,
        tokens=(1000,),
        gateway_seconds=(0.4,),
        out_of_order=0,
    )
    assert not overhead.summary([row]).failure
    assert overhead.summary([row.model_copy(update={"http": (0.014,) * 200})]).failure
    assert overhead.summary([row.model_copy(update={"gateway_seconds": (0.6,)})]).failure
    assert overhead.summary([row.model_copy(update={"out_of_order": 1})]).failure

    turns = make_experiment(read_settings("http-turns"))
    turn = TurnRow(
        result_seconds=0.9, result_cold_seconds=8.1, prompt_tokens=(2000, 2100, 2000), new_tokens=(2000, 110, 20)
    )  # fmt: skip
    assert not turns.summary([turn]).failure
    assert turns.summary([turn.model_copy(update={"new_tokens": (2000, 170, 20)})]).failure


def test_flood_fails_where_the_hostile_app_takes_too_much() -> None:
    flood = make_experiment(read_settings("flood"))
    alone, beside = (
        Good(seconds=10, answers=answers, tokens=16 * answers, connect_seconds=0.01) for answers in (100, 85)
    )
    row = FloodRow(attack="long answers", alone=(alone,), beside=(beside,), done=9, errors={}, gateway_bytes=100 << 20)
    assert not flood.summary([row]).failure
    for worse in ({"answers": 79}, {"tokens": 79 * 16}, {"failed": ("QueueFull",)}, {"connect_seconds": 0.31}):
        assert flood.summary([row.model_copy(update={"beside": (beside.model_copy(update=worse),)})]).failure
    assert flood.summary([row.model_copy(update={"gateway_bytes": 129 << 20})]).failure
