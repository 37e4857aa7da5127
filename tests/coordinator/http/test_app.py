"""The HTTP application over ASGI, in front of a home that answers from a script."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from support.http_servers import READY, ScriptedHome, ScriptedHomes

from coordinator.http import homes
from coordinator.http.app import MAX_HEADER_BYTES, http_app
from coordinator.http.request import MAX_BODY_BYTES
from hearth.errors import AppRevoked, QueueFull, StepFailed
from hearth.platform.curve import new_keypair
from hearth.platform.security import AppKey, format_credential
from hearth.wire.messages import ServedModel

POSTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/api/chat", "/api/generate", "/api/embed",
    "/api/embeddings", "/api/show", "/api/pull",
)  # fmt: skip


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    pieces: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def asked(
    homes: ScriptedHomes, method: str, path: str, body: bytes = b"", *, token: bool = True, host: str = "localhost:47880",
    leaves: bool = False, length: int | None = None,
) -> Answered:  # fmt: skip
    """One request. `leaves`: the client goes away when the first piece has come. `length`: what it says of its body."""
    headers = [(b"host", host.encode("latin-1")), *([(b"authorization", b"Bearer t")] if token else [])]
    headers += [(b"content-length", str(length).encode())] if length is not None else []
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
        "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http", "root_path": "",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 47880),
    }  # fmt: skip
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []
    gone = asyncio.Event()

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if leaves and message.get("body"):
            gone.set()

    app = http_app(homes)  # type: ignore[arg-type]
    await asyncio.wait_for(app(scope, receive, send), 10)
    start, *rest = sent
    headers_sent = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answered(start["status"], headers_sent, [each["body"] for each in rest if each.get("body")])


def ask(path: str, body: object = None, home: ScriptedHome | None = None, **options: Any) -> Answered:
    homes = ScriptedHomes(home or ScriptedHome(), options.pop("readiness", READY), options.pop("refusal", None))
    data = json.dumps(body).encode() if body is not None else b""
    method = options.pop("method", "POST" if body is not None else "GET")
    return asyncio.run(asked(homes, method, path, data, **options))


TOOL = {"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Light?"}]}


def test_chat_in_both_forms() -> None:
    home = ScriptedHome()
    parts = [{"type": "text", "text": "Li"}, {"type": "text", "text": "ght?"}]
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    answer = ask(
        "/v1/chat/completions", {**CHAT, "messages": messages, "max_completion_tokens": 9, "stop": "x"}, home
    ).json
    assert answer["choices"][0]["message"]["content"] == "It is on"
    assert answer["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    (given,) = home.asked
    assert [(each["role"], each["content"]) for each in given["messages"]] == [
        ("system", "Be kind."),
        ("user", "Light?"),
    ]
    assert (given["max_tokens"], given["stop"]) == (9, ("x",))

    streamed = ask("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    first, *middle, end, usage, done = [piece.removeprefix(b"data: ") for piece in streamed.pieces]
    assert json.loads(first)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [json.loads(piece)["choices"][0]["delta"]["content"] for piece in middle] == ["It ", "is ", "on"]
    assert json.loads(end)["choices"][0]["finish_reason"] == "stop"
    assert (json.loads(usage)["choices"], json.loads(usage)["usage"]["total_tokens"]) == ([], 10)
    assert done == b"[DONE]\n\n"


def test_forms_of_answers_are_constraints() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "function", "function": {"name": "turn_on"}}
    home = ScriptedHome()
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "type": "text", "schema": schema}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}, "tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": named, "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": "none"},
    ):
        ask("/v1/chat/completions", {**CHAT, **fields}, home)
    ask("/api/chat", {**CHAT, "format": schema}, home)
    ask("/api/generate", {"model": "tiny", "prompt": "Light?", "format": "json"}, home)
    assert [each["schema"] for each in home.asked] == [
        schema, {"type": "object"}, None, None, None, schema, {"type": "object"},
    ]  # fmt: skip
    assert [each["tool_choice"] for each in home.asked[:5]] == ["auto", "auto", "required", "turn_on", "auto"]
    assert [each["parallel_tool_calls"] for each in home.asked[2:4]] == [True, False]
    assert home.asked[4]["tools"] == ()


def test_log_probabilities_in_all_forms() -> None:
    home, asked = ScriptedHome(), {**CHAT, "logprobs": True, "top_logprobs": 1}
    first = {"token": "It ", "logprob": -0.5, "bytes": [73, 116, 32]}
    (choice,) = ask("/v1/chat/completions", asked, home).json["choices"]
    assert choice["logprobs"]["content"][0] == {**first, "top_logprobs": [first]}
    assert (home.asked[0]["logprobs"], home.asked[0]["top_logprobs"]) == (True, 1)
    pieces = [json.loads(piece[6:]) for piece in ask("/v1/chat/completions", {**asked, "stream": True}).pieces[:-1]]
    shown = [each["choices"][0]["logprobs"] for each in pieces]
    assert [each["content"][0]["token"] for each in shown if each] == ["It ", "is ", "on"]
    (choice,) = ask("/v1/completions", {"model": "tiny", "prompt": "x", "logprobs": 1}).json["choices"]
    assert choice["logprobs"] == {
        "tokens": ["It ", "is ", "on"], "token_logprobs": [-0.5] * 3, "text_offset": [0, 3, 6],
        "top_logprobs": [{"It ": -0.5}, {"is ": -0.5}, {"on": -0.5}],
    }  # fmt: skip
    assert ask("/api/chat", {**asked, "stream": False}).json["logprobs"][2]["token"] == "on"
    assert ask("/v1/chat/completions", {**CHAT, "top_logprobs": 1}).json["error"]["param"] == "top_logprobs"


def test_responses_whole_and_streamed() -> None:
    home, schema = ScriptedHome(), {"type": "object"}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Light?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "turn_on", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    asked = {
        "model": "tiny", "input": items, "instructions": "Short.", "max_output_tokens": 9, "store": False,
        "tools": [{"type": "function", "name": "turn_on", "parameters": {}, "strict": True}], "tool_choice": "required",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    whole = ask("/v1/responses", asked, home).json
    (given,) = home.asked
    assert [each["role"] for each in given["messages"]] == ["system", "system", "user", "assistant", "tool"]
    assert given["messages"][3]["tool_calls"] == [{"id": "c", "function": {"name": "turn_on", "arguments": "{}"}}]
    assert (given["schema"], given["tool_choice"], given["max_tokens"]) == (schema, "required", 9)
    assert given["tools"] == [{"type": "function", "function": {"name": "turn_on", "parameters": {}}}]
    (message,) = whole["output"]
    assert (whole["status"], message["content"][0]["text"], whole["usage"]["total_tokens"]) == (
        "completed",
        "It is on",
        10,
    )
    assert [each["token"] for each in message["content"][0]["logprobs"]] == ["It ", "is ", "on"]

    pieces = ask("/v1/responses", {"model": "tiny", "input": "Light?", "stream": True}).pieces
    events = [json.loads(piece.partition(b"data: ")[2]) for piece in pieces]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert [each["type"].removeprefix("response.") for each in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "It is on"
    failing = ScriptedHome(StepFailed(device="attic", reason="r"), words_before=1)
    broken = ask("/v1/responses", {"model": "tiny", "input": "Light?", "stream": True}, failing).pieces[-1]
    assert "Try again" in json.loads(broken.partition(b"data: ")[2])["error"]["message"]


def test_ollama_streams_lines_unless_told_otherwise() -> None:
    lines = [json.loads(piece) for piece in ask("/api/chat", {**CHAT, "keep_alive": -1.0}).pieces]
    assert "".join(line["message"]["content"] for line in lines) == "It is on"
    assert [line["done"] for line in lines] == [False, False, False, True]
    assert lines[-1]["prompt_eval_duration"] == 400_000_000
    home = ScriptedHome()
    options = {"num_ctx": 8192.0, "num_predict": -1.0, "temperature": 0.5}
    asked = {"model": "tiny:latest", "prompt": "Light?", "system": "Be kind.", "stream": False, "options": options}
    assert ask("/api/generate", asked, home).json["response"] == "It is on"
    assert home.asked[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert home.asked[0]["temperature"] == 0.5
    assert ask("/api/generate", {"model": "tiny"}).json["done_reason"] == "load"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0.0), (-1.0, -1.0), ("5m", 300.0), ("1h30m", 5400.0), ("-1m", -1.0), ("1.5s", 1.5), ("0", 0.0), ("30", 30.0)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/api/chat", CHAT),
        ("/api/chat", {**CHAT, "stream": False}),
        ("/api/generate", {"model": "tiny"}),
        ("/api/embed", {"model": "tiny", "input": "a"}),
        ("/api/embeddings", {"model": "tiny", "prompt": "a"}),
    ],
)
def test_ollamas_keep_alive_reaches_the_home_after_the_answer(
    path: str, asked: dict[str, Any], given: object, seconds: float
) -> None:
    home = ScriptedHome()
    answer = ask(path, {**asked, "keep_alive": given}, home)
    assert (answer.status, home.kept) == (200, [seconds])
    if path == "/api/generate":
        assert answer.json["done_reason"] == ("unload" if seconds == 0 else "load")


@pytest.mark.parametrize("given", ["soon", "5 minutes", True, [], "nan"])
def test_keep_alive_that_is_no_time_is_refused_by_its_name(given: object) -> None:
    answer = ask("/api/chat", {**CHAT, "keep_alive": given})
    assert (answer.status, "keep_alive" in answer.json["error"]) == (400, True)


def test_embeddings_in_both_encodings() -> None:
    asked = {"model": "tiny", "input": ["a", "b"]}
    floats = ask("/v1/embeddings", asked).json["data"]
    packed = ask("/v1/embeddings", {**asked, "encoding_format": "base64", "dimensions": 1}).json["data"]
    assert floats[1] == {"object": "embedding", "index": 1, "embedding": pytest.approx([0.6, 0.8, 0.0])}
    assert np.frombuffer(base64.b64decode(packed[0]["embedding"]), "<f4").tolist() == [1.0]
    assert ask("/v1/embeddings", {**asked, "dimensions": 4}).status == 400
    assert len(ask("/api/embed", asked).json["embeddings"]) == 2
    assert ask("/api/embeddings", {"model": "tiny", "prompt": "a"}).json["embedding"] == pytest.approx([0.6, 0.8, 0.0])


def test_long_text_and_many_texts_are_embedded_and_token_ids_are_refused() -> None:
    for texts, status in (("a" * 5000, 200), (["a"] * 4096, 200), (["a"] * 4097, 400), ([[1]], 400), ([1], 400)):
        assert ask("/v1/embeddings", {"model": "tiny", "input": texts}).status == status


def test_only_three_paths_need_no_token() -> None:
    for path in ("/", "/health", "/api/version"):
        assert ask(path, token=False).status == 200
    for path in ("/v1/models", "/api/tags", "/nothing"):
        answer = ask(path, token=False)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert ask("/v1/models", refusal=AppRevoked(app="x")).status == 401
    assert ask("/health", readiness=READY.model_copy(update={"ready": False})).status == 503


@pytest.mark.parametrize("ready", [True, False])
def test_health_of_a_home_that_serves_only_a_graph(ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = READY.model_copy(update={"deployment": "detector", "answers": "arrays", "ready": ready})

    class GraphHome:
        async def models(self, timeout_seconds: float) -> tuple[ServedModel, ...]:
            return (graph,)

    async def connect(*_: object) -> GraphHome:
        return GraphHome()

    monkeypatch.setattr(homes, "connect_async", connect)
    pair = new_keypair()
    key = format_credential(AppKey(name="http", secret=pair.secret, coordinator_public=new_keypair().public))
    served = homes.Homes(homes.HttpSettings(key=key))
    answered = asyncio.run(asked(served, "GET", "/health", token=False))  # type: ignore[arg-type]
    assert answered.status == (200 if ready else 503)


def test_unloaded_model_is_listed_and_not_running() -> None:
    unloaded = READY.model_copy(update={"phase": "unloaded"})
    for path, field, is_there in (
        ("/v1/models", "data", True),
        ("/api/tags", "models", True),
        ("/api/ps", "models", False),
    ):
        assert bool(ask(path, readiness=unloaded).json[field]) == is_there
    assert ask("/api/ps").json["models"]


def test_foreign_host_names_are_refused() -> None:
    assert ask("/v1/models", host="attacker.example").status == 403
    assert ask("/", host="attacker.example", token=False).status == 403
    assert ask("/v1/models", host="[fe80::1]:47880").status == 200


def test_errors_before_the_answer_have_a_status_and_later_ones_an_event() -> None:
    full = ask("/v1/chat/completions", {**CHAT, "stream": True}, ScriptedHome(QueueFull(limit=4)))
    assert (full.status, full.headers["retry-after"], full.json["error"]["type"]) == (429, "1", "rate_limit_error")
    failing = ScriptedHome(StepFailed(device="attic", reason="r"), words_before=1)
    broken = ask("/v1/chat/completions", {**CHAT, "stream": True}, failing)
    assert broken.status == 200
    assert "Try again" in json.loads(broken.pieces[-1].removeprefix(b"data: "))["error"]["message"]
    assert "Try again" in json.loads(ask("/api/chat", CHAT, failing).pieces[-1])["error"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_client_that_goes_away_ends_the_answer(path: str) -> None:
    home = ScriptedHome(silent=True)
    ask(path, {**CHAT, "stream": True}, home, leaves=True)
    assert home.ended == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools.0"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice"),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}},
         400, "tool_choice"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, 400, "response_format.type"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, 400,
         "response_format.json_schema.schema"),
        ("/v1/chat/completions", {**CHAT, "n": 99}, 400, "n"),
        ("/v1/chat/completions", {**CHAT, "top_logprob": 1}, 400, "top_logprob"),
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "model"),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
         "messages.0.content.0"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "echo": True}, 400, "echo"),
        ("/v1/embeddings", {"model": "tiny", "input": [[1, 2]]}, 400, "input"),
        ("/v1/embeddings", [1], 400, None),
        ("/v1/responses", {"model": "tiny", "input": "x", "previous_response_id": "r"}, 400, "previous_response_id"),
        ("/v1/responses", {"model": "tiny", "input": "x", "store": True}, 400, "store"),
        ("/v1/responses", {"model": "tiny", "input": [{"type": "item_reference"}]}, 400, "input.0.type"),
        ("/v1/responses", {"model": "tiny", "input": "x", "tools": [{"type": "web_search"}]}, 400, "tools.0"),
        ("/v1/responses", {"model": "tiny", "input": "x", "text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(path: str, body: object, status: int, field: str | None) -> None:
    answer = ask(path, body)
    assert (answer.status, answer.json["error"]["param"]) == (status, field)


def test_sizes_and_forms_of_bodies() -> None:
    homes = ScriptedHomes(ScriptedHome(), READY)
    for body, status in (
        (b"[" * 50_000, 400),
        (b'"\\ud800"', 400),
        (b"\xff", 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ):
        assert asyncio.run(asked(homes, "POST", "/v1/completions", body)).status == status
    unread = asyncio.run(asked(homes, "POST", "/v1/completions", length=MAX_BODY_BYTES + 1))
    assert (unread.status, unread.headers.get("connection")) == (413, "close")
    read = asyncio.run(asked(homes, "POST", "/v1/completions", b"{}"))
    assert (read.status, read.headers.get("connection")) == (400, None)
    assert asyncio.run(asked(homes, "PUT", "/v1/completions")).status == 405
    answered = asyncio.run(asked(homes, "GET", "/v1/models", host="localhost" + " " * MAX_HEADER_BYTES))
    assert answered.status == 431


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("tiny"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "input", "n", "stream", "options", "max_tokens", "stop", "seed", "temperature", "system",
     "role", "content", "dimensions", "stream_options", "tools", "tool_choice", "response_format", "format",
     "think", "raw", "name"]
)  # fmt: skip


@given(st.sampled_from(POSTS), st.dictionaries(_FIELDS, _VALUES, max_size=6), st.booleans())
def test_no_request_breaks_the_gateway(path: str, fields: dict[str, Any], plausible: bool) -> None:
    body = {**(CHAT if plausible else {}), **fields}
    answer = ask(path, body)
    assert answer.status in (200, 400, 404)
