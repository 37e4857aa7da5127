"""Experiments with the HTTP gateway: generated requests, what counts as a fault, and the summaries."""

from __future__ import annotations

import json
from random import Random

import pytest

pytest.importorskip("starlette")

from tools.bench.experiment import make_experiment, read_settings
from tools.bench.http.fuzz import HttpFuzzRow
from tools.bench.http.overhead import OverheadRow
from tools.bench.http.requests import Requests, Sent, fault_of
from tools.bench.http.turns import RECORDED, TurnRow
from tools.bench.http.wire import Answer, answers_in, request_bytes

TOKEN = "hearth_secret"


def test_answers_of_a_connection_are_split() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    chunked = b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answers_in(early + whole + chunked + whole[:-1]) == [Answer(200, b"ok"), Answer(400, b"abcd")]
    assert answers_in(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall") == [Answer(200, b"all")]
    assert answers_in(b"noise") == []


def answered(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    ("has_token", "status", "body", "fault"),
    [
        (True, 200, b"models", ""),
        (False, 200, b"models", "status 200 without a token"),
        (False, 200, b'{"status":"ok"}', ""),
        (False, 401, b"no", ""),
        (True, 503, b"busy", ""),
        (True, 500, b"broken", "status 500"),
    ],
)
def test_faults_of_answers(has_token: bool, status: int, body: bytes, fault: str) -> None:
    sent = Sent("any", request_bytes("GET", "/v1/models", TOKEN if has_token else None))
    assert fault_of(sent, answered(status, body), TOKEN) == fault
    assert fault_of(sent._replace(status=200), answered(404, b""), TOKEN) == "status 404 instead of 200"
    assert fault_of(sent, b"", TOKEN) == "no answer"
    assert fault_of(sent._replace(whole=False), b"", TOKEN) == ""


def test_requests_are_of_all_kinds_and_repeat() -> None:
    def some() -> list[Sent]:
        requests = Requests("tiny", TOKEN, ["hearth_other"], Random(3))
        return [requests.next() for _ in range(2000)]

    made = some()
    assert made == some()
    assert {sent.kind for sent in made} >= {
        "valid",
        "stranger",
        "mutated",
        "noise",
        "chunks",
        "body",
        "path",
        "cut",
        "pipelined",
    }
    assert all(TOKEN.encode() in sent.data for sent in made if sent.kind in ("valid", "mutated"))
    assert not any(f"Bearer {TOKEN}".encode() in sent.data for sent in made if sent.kind == "stranger")


def test_recorded_requests_begin_alike() -> None:
    command, result, following = json.loads(RECORDED.read_bytes())
    assert [message["role"] for message in result["messages"]] == ["system", "user", "assistant", "tool"]
    assert command["messages"] == result["messages"][:2]
    assert following["messages"][0] == command["messages"][0]
    assert command["messages"][0]["content"].count("domain: input_boolean") == 61


def test_summaries_say_what_is_missed() -> None:
    overhead = make_experiment(read_settings("http-overhead"))
    row = OverheadRow(
        http=(0.012,) * 200, direct=(0.008,) * 200, num_streams=32, tokens=(1000,), gateway_seconds=(0.4,),
        wall_seconds=(2.0,), out_of_order=0,
    )  # fmt: skip
    assert not overhead.summary([row]).failure
    assert overhead.summary([row.model_copy(update={"http": (0.014,) * 200})]).failure
    assert overhead.summary([row.model_copy(update={"out_of_order": 1})]).failure

    turns = make_experiment(read_settings("http-turns"))
    turn = TurnRow(
        command_seconds=8.0, result_seconds=0.9, next_seconds=0.9, result_cold_seconds=8.1,
        prompt_tokens=(2000, 2100, 2000), new_tokens=(2000, 110, 20), added_tokens=100,
    )  # fmt: skip
    assert not turns.summary([turn]).failure
    assert turns.summary([turn.model_copy(update={"new_tokens": (2000, 117, 20)})]).failure

    fuzz = make_experiment(read_settings("http-fuzz"))
    quiet = HttpFuzzRow(
        beside="nothing", chats=(0.01,), resident_bytes=50_000_000, peak_bytes=60_000_000, descriptors=9
    )
    batch = quiet.model_copy(update={"beside": "attack", "kinds": {"valid": 50_000}, "statuses": {"200": 50_000}})
    assert not fuzz.summary([quiet, batch, batch]).failure
    larger = batch.model_copy(update={"resident_bytes": 52_000_000})
    assert fuzz.summary([quiet, batch, batch, batch, larger]).failure
    assert fuzz.summary([quiet, batch, batch.model_copy(update={"num_faults": 1})]).failure
