"""Generated requests, valid, mutated and hostile, over real sockets to the gateway in front of a scripted home."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

pytest.importorskip("uvicorn")

from support.http_requests import Answer, Requests, Sent, answers_in, exchange, fault_of, unknown_token
from support.http_servers import READY, ScriptedHome, ScriptedHomes, served

from coordinator.http.app import http_app
from tools.bench.http.clients import request_bytes

HOST = "127.0.0.1"
TOKEN = "hearth_secret"


class KeptHome(ScriptedHome):
    """Requests run at the same time, so that the end of one says nothing about the others."""

    async def keep_loaded(self, seconds: float, model: str) -> None:
        self.kept.append(seconds)


def test_requests_are_answered_as_they_may_be(caplog: pytest.LogCaptureFixture) -> None:
    """500 requests, with 50 idle connections at the same time."""
    homes = ScriptedHomes(KeptHome(), READY, tokens=[TOKEN])
    requests = Requests("tiny", TOKEN, [unknown_token()], Random(1))

    async def run() -> list[str]:
        async with served(http_app(homes)) as port:  # type: ignore[arg-type]
            idle = [await asyncio.open_connection(HOST, port) for _ in range(50)]
            limit = asyncio.Semaphore(8)

            async def fault(sent: Sent) -> str:
                async with limit:
                    received = await exchange(HOST, port, sent)
                found = fault_of(sent, received, TOKEN)
                return f"{found}: {sent} -> {received!r}" if found else ""

            faults = await asyncio.gather(*(fault(requests.next()) for _ in range(500)))
            health = await exchange(
                HOST, port, Sent("last", request_bytes("GET", "/health", headers={"Connection": "close"}))
            )
            for _, writer in idle:
                writer.close()
        assert answers_in(health)[0].status == 200
        return [each for each in faults if each]

    assert asyncio.run(run()) == []
    assert "Traceback" not in caplog.text


# ---- the requests, and what counts as a fault ---------------------------------------------------------------------------


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
