"""The HTTP gateway in front of a home of real processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
from support.cancel_log import read_cancel_log
from support.chat_models import TEMPLATE, save_byte_level, save_scripted_chat, write_config
from support.home import LOOPBACK, TestHome
from support.http_requests import unknown_token
from support.models import endless_decoder, save_random_model
from support.profiles import MeasuredProfiles
from support.tokens import new_token
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("uvicorn")

from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

from hearth.platform.curve import fingerprint
from hearth.platform.discovery import HTTP_SERVICE, Browser, DiscoveredService
from hearth.platform.security import coordinator_access, resolve_credential
from hearth.protocol import PROTOCOL_VERSION

pytestmark = pytest.mark.processes

COMPLETIONS = "/v1/chat/completions"
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    model_dir = save_random_model(
        tmp_path_factory.mktemp("models") / "tiny", endless_decoder(vocab_size=512), generates=True
    )
    write_config(save_byte_level(model_dir), chat_template=TEMPLATE, bos_token="<s>", eos_token="</s>")
    with TestHome(tmp_path_factory.mktemp("home"), model_dir, profiles) as home:
        home.start_agent("a", "--log-level", "debug")
        home.start_coordinator("--context", "320", "--http", f"{LOOPBACK}:0")
        home.ready().close()
        home.start_gateway()
        wait_for("the gateway", lambda: ask(home, "/health").status == 200)
        yield home


@pytest.fixture(scope="module")
def token(home: TestHome) -> str:
    return new_token(home, "kitchen")


@contextmanager
def asked(
    home: TestHome, path: str, token: str | None = None, body: object = None, of: str = "gateway"
) -> Iterator[HTTPResponse]:
    """The response to a GET request, or to a POST request with a body. `of`: the program that answers."""
    connection = HTTPConnection(LOOPBACK, home.port(of, http=True), timeout=60)
    headers = {"authorization": f"Bearer {token}"} if token is not None else {}
    data = json.dumps(body) if body is not None else None
    try:
        connection.request("POST" if data else "GET", path, data, headers)
        yield connection.getresponse()
    finally:
        connection.close()


class Answer:
    def __init__(self, response: HTTPResponse) -> None:
        self.status, self.headers, self.text = response.status, response.headers, response.read().decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def ask(home: TestHome, path: str, token: str | None = None, body: object = None, of: str = "gateway") -> Answer:
    with asked(home, path, token, body, of) as response:
        return Answer(response)


def events(text: str) -> list[Any]:
    """The data of the events of a stream, without the end mark."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_chat_is_answered_as_by_the_library(home: TestHome, token: str) -> None:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 12}
    answer = ask(home, COMPLETIONS, token, body).json
    with home.connect() as client:
        generation = client.generate(messages=CHAT, max_tokens=12)
        text, usage = generation.text(), generation.usage
    assert usage is not None
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "length")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (usage.num_prompt_tokens, 12)

    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    streamed = events(ask(home, COMPLETIONS, token, streaming).text)
    pieces = [choice["delta"].get("content", "") for chunk in streamed for choice in chunk["choices"]]
    assert "".join(pieces) == text
    assert streamed[-1]["usage"]["completion_tokens"] == 12

    ollama = {"model": "tiny:latest", "messages": CHAT, "options": {"num_predict": 12}}
    said = [json.loads(line) for line in ask(home, "/api/chat", token, ollama).text.splitlines()]
    assert "".join(line["message"]["content"] for line in said) == text
    assert (said[-1]["done"], said[-1]["eval_count"], said[-1]["done_reason"]) == (True, 12, "length")


def test_several_choices_and_prompts(home: TestHome, token: str) -> None:
    body = {"model": "tiny", "prompt": ["he", "ll"], "max_tokens": 20, "n": 2, "seed": 7, "temperature": 1.0}
    first, second = (ask(home, "/v1/completions", token, body).json for _ in range(2))
    assert [choice["text"] for choice in first["choices"]] == [choice["text"] for choice in second["choices"]]
    assert len({choice["text"] for choice in first["choices"]}) == 4
    assert first["usage"]["completion_tokens"] == 80


def test_tokens_are_checked_at_every_request(home: TestHome) -> None:
    for path in ("/v1/models", "/api/tags", "/nothing"):
        assert ask(home, path).status == 401
        assert ask(home, path, "hearth_wrong").status == 401
    assert ask(home, "/v1/models", unknown_token()).status == 401
    passing = new_token(home, "guest")
    assert ask(home, "/v1/models", passing).json["data"][0]["id"] == "tiny"
    assert ask(home, "/nothing", passing).status == 404
    with home.connect() as client:
        client.revoke_app("guest")
    answer = ask(home, "/v1/models", passing)
    assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")


def test_client_that_goes_away_ends_its_answer(home: TestHome, token: str) -> None:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 290, "stream": True, "n": 2}
    with home.connect() as client:
        before = client.status().served_requests
    with asked(home, COMPLETIONS, token, body) as response:
        response.read(200)
    with home.connect() as client:
        wait_for("the end of the requests", lambda: client.status().queued_requests == 0)
        assert client.status().served_requests <= before + 2
    # the home answers the next one at once
    assert ask(home, COMPLETIONS, token, {**body, "max_tokens": 1, "stream": False, "n": 1}).status == 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "other", "messages": CHAT}, 404, "model"),
        ({"model": "tiny", "messages": CHAT, "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"model": "tiny", "messages": [{"role": "judge", "content": "x"}]}, 400, "messages.0.role"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "hello " * 500}]}, 400, None),
    ],
)
def test_refusals_name_the_field(home: TestHome, token: str, body: object, status: int, param: str | None) -> None:
    answer = ask(home, COMPLETIONS, token, body)
    assert (answer.status, answer.json["error"]["param"]) == (status, param)


def test_model_of_another_kind_is_refused(home: TestHome, token: str) -> None:
    answer = ask(home, "/v1/embeddings", token, {"model": "tiny", "input": "text"})
    assert answer.status == 400
    show = ask(home, "/api/show", token, {"model": "tiny"}).json
    assert (show["capabilities"], show["model_info"]["hearth.context_length"]) == (["completion"], 320)


# ---- events and metrics -----------------------------------------------------------------------------------------------


def test_metrics_count_requests_and_need_a_token_of_their_role(home: TestHome, token: str) -> None:
    scraper = new_token(home, "prometheus", "metrics")
    labels = 'api="generate",model="tiny",outcome="served"'
    before = value_of(ask(home, "/metrics", scraper).text, f"hearth_requests_total{{{labels}}}")
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 2}
    for _ in range(3):
        assert ask(home, COMPLETIONS, token, body).status == 200
    answer = ask(home, "/metrics", scraper)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert value_of(answer.text, f"hearth_requests_total{{{labels}}}") == before + 3
    assert value_of(answer.text, 'hearth_device_up{device="a"}') == 1
    assert ask(home, "/metrics").status == 401
    assert ask(home, "/metrics", token).status == 403
    assert ask(home, COMPLETIONS, scraper, body).status == 403
    assert ask(home, "/v1/events", scraper).status == 403


def test_events_are_streamed_and_resumed(home: TestHome, token: str) -> None:
    observer = new_token(home, "screen", "observer")
    assert ask(home, "/v1/events", token).status == 403
    assert ask(home, "/v1/events?kinds=weather", observer).status == 400
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 2}
    with asked(home, "/v1/events?since=now&kinds=request_ended", observer) as response:
        assert (response.status, response.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        assert response.readline() == b": events follow\n"
        assert ask(home, COMPLETIONS, observer, body).status == 200
        first = next_event(response)
    assert ask(home, COMPLETIONS, token, body).status == 200
    with asked(home, f"/v1/events?since={first['id']}&kinds=request_ended", observer) as response:
        second = next_event(response)
    told = [json.loads(each["data"])["event"] for each in (first, second)]
    assert [(each["app"], each["outcome"], each["num_tokens"], each["devices"]) for each in told] == [
        ("screen", "served", 2, ["a"]), ("kitchen", "served", 2, ["a"]),
    ]  # fmt: skip


def next_event(response: HTTPResponse) -> dict[str, str]:
    """The fields of the next event of a stream, without comments."""
    fields: dict[str, str] = {}
    while "data" not in fields:
        line = response.readline().decode()
        assert line, "the stream has ended"
        name, _, value = line.rstrip("\n").partition(": ")
        if name:
            fields[name] = value
    return fields


def value_of(metrics: str, series: str) -> float:
    return next((float(line.split(" ")[-1]) for line in metrics.splitlines() if line.startswith(series)), 0.0)


# ---- tools ------------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}
TOOL_CALL = '{"name": "turn_on", "arguments": {"name": "kitchen"}}'


def test_tools_are_called_and_their_results_used(home: TestHome) -> None:
    """By a second model, over the gateway that `hearth serve` starts."""
    save_scripted_chat(home.folder / "caller", TOOL_CALL, "The light is on.")
    home.add_profiles(home.folder / "caller", "--context", "320")
    with home.connect() as client:
        goal = {"kind": "transformer", "model_dir": str(home.folder / "caller"), "context": 320}
        client.serve_model(json.dumps(goal), "caller")
        wait_for("the second model", lambda: all(each.ready for each in client.models()))
    caller = partial(ask, home, token=new_token(home, "assistant"), of="coordinator")
    wait_for("the gateway", lambda: caller("/health").status == 200)
    chat: list[Any] = [{"role": "user", "content": "Light, please."}]
    body = {"model": "caller", "messages": chat, "tools": [TOOL]}
    (choice,) = caller(COMPLETIONS, body=body).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("turn_on", {"name": "kitchen"})

    streamed = events(caller(COMPLETIONS, body={**body, "stream": True}).text)
    deltas = [each for chunk in streamed for each in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [each["index"] for each in deltas] == [0, 0]
    assert deltas[0]["function"]["name"] == "turn_on"
    assert json.loads("".join(each["function"]["arguments"] for each in deltas)) == {"name": "kitchen"}
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"

    done = [*chat, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
    (choice,) = caller(COMPLETIONS, body={**body, "messages": done}).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("The light is on.", "stop")

    said = caller("/api/chat", body={**body, "stream": False}).json["message"]
    assert said["tool_calls"][0]["function"] == {"name": "turn_on", "arguments": {"name": "kitchen"}}
    done = [*chat, said, {"role": "tool", "tool_name": "turn_on", "content": "done"}]
    answer = caller("/api/chat", body={**body, "messages": done, "stream": False}).json
    assert answer["message"]["content"] == "The light is on."

    without = caller(COMPLETIONS, body={**body, "tool_choice": "none"}).json
    assert without["choices"][0]["message"]["content"] == "hello"
    assert caller("/api/show", body={"model": "caller"}).json["capabilities"] == ["completion", "tools"]


def test_gateway_on_the_network_is_found_over_mdns_with_the_fingerprint_of_the_home(home: TestHome) -> None:
    home.start_gateway("--listen", "0.0.0.0", "--mdns-interfaces", LOOPBACK, name="on the network")
    port = wait_for("the gateway", lambda: home.port("on the network", http=True))
    expected = fingerprint(coordinator_access(resolve_credential(home.key)).server_public)

    async def search() -> DiscoveredService:
        found: asyncio.Queue[DiscoveredService] = asyncio.Queue()
        browser = Browser(HTTP_SERVICE, found.put_nowait, [LOOPBACK])
        await browser.start()
        try:
            while (service := await asyncio.wait_for(found.get(), 20)).port != port:  # others may run on this machine
                pass
            return service
        finally:
            await browser.stop()

    try:
        service = asyncio.run(search())
        assert (service.hosts, service.protocol, service.fingerprint) == ((LOOPBACK,), PROTOCOL_VERSION, expected)
    finally:
        home.stop("on the network")


@pytest.mark.parametrize(
    "by_serve", [pytest.param(False, id="gateway"), pytest.param(True, id="serve", marks=pytest.mark.thorough)]
)
def test_self_made_certificate_is_accepted_by_a_client_that_trusts_its_authority(
    by_serve: bool, home: TestHome, token: str, tmp_path: Path
) -> None:
    """The advertised and the printed fingerprint are those of the file that the client is given."""
    pytest.importorskip("cryptography")
    interfaces = ("--mdns-interfaces", LOOPBACK)
    if by_serve:
        home.start_coordinator("--state-dir", str(tmp_path), "--http", "0.0.0.0:0", "--http-tls", name="with TLS")
    else:
        home.start_gateway("--tls", "--state-dir", str(tmp_path), "--listen", "0.0.0.0", *interfaces, name="with TLS")
    try:
        port = home.port("with TLS", http=True)
        authority = tmp_path / "tls" / "authority.pem"
        made = hashlib.sha256(ssl.PEM_cert_to_DER_cert(authority.read_text())).hexdigest()
        assert made in home.log_of_run("with TLS")
        assert f"listening on https://0.0.0.0:{port}" in home.log_of_run("with TLS")

        trusting = ssl.create_default_context(cafile=str(authority))
        connection = HTTPSConnection(LOOPBACK, port, timeout=60, context=trusting)
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {token}"})
        knows_token = not by_serve  # otherwise the gateway is that of another coordinator
        assert connection.getresponse().status == (200 if knows_token else 401)
        connection.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            HTTPSConnection(LOOPBACK, port, timeout=60, context=ssl.create_default_context()).request("GET", "/health")
        assert asyncio.run(advertised_fields(port)) == {"scheme": "https", "tls": made}
    finally:
        home.stop("with TLS")


async def advertised_fields(port: int) -> dict[str, str]:
    """What the record of a gateway says of its encryption."""
    names: asyncio.Queue[str] = asyncio.Queue()

    def note(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        names.put_nowait(name)

    zeroconf = AsyncZeroconf(interfaces=[LOOPBACK])
    browser = AsyncServiceBrowser(zeroconf.zeroconf, HTTP_SERVICE, handlers=[note])
    try:
        async with asyncio.timeout(20):
            while True:
                info = await zeroconf.async_get_service_info(HTTP_SERVICE, await names.get())
                if info is not None and info.port == port:  # others may run on this machine
                    fields = info.decoded_properties
                    return {name: value or "" for name, value in fields.items() if name in ("scheme", "tls")}
    finally:
        await browser.async_cancel()
        await zeroconf.async_close()


def test_closing_a_stream_frees_its_blocks_within_a_second(home: TestHome, token: str) -> None:
    """Rank 0 logs which sequence is cancelled, and which ones each step frees."""
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 280, "stream": True}
    with asked(home, COMPLETIONS, token, body) as response:
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        before = set(read_cancel_log(home.log("a").splitlines()).cancelled)
    began = time.monotonic()

    def freed() -> bool:
        log = read_cancel_log(home.log("a").splitlines())
        return bool(cancelled := log.cancelled.keys() - before) and cancelled <= log.freed

    wait_for("free blocks", freed)
    assert time.monotonic() - began < 1.0
