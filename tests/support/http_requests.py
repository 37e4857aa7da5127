"""Generated requests for the gateway, valid, mutated and hostile, and what is wrong with the answers to them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from support.mutations import with_changed_bytes

from hearth.platform.curve import new_keypair
from hearth.platform.security import AppKey, format_token
from tools.bench.http.clients import request_bytes

_CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Light?"}]
_TOOL = {"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}
_SHORT = {"max_tokens": 2}
_OPEN_PATHS = ("/", "/health", "/api/version")
# What these paths may say: nothing of the home but whether it is ready.
_OPEN_BODIES = (b"", b"Hearth is running", b'{"status":"ok"}', b'{"status":"not ready"}')
_OPEN_VERSION = b'{"version":"'
# Statuses of server errors that an answer may have: the home is busy, or does not answer in time.
_MAY_FAIL = (503, 504)
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 62, 1 << 70, -0.5, 1e308, "", "x" * 300, [], {}, [[[[[]]]]], [None] * 500, {"type": "text"}, "\x00",
    "\ud800", "../../etc/passwd", [{"role": "user"}], {"a": {"b": {"c": [1]}}},
)  # fmt: skip
_CLOSE = {"Connection": "close"}
_WRITTEN_BYTES = 9 << 20  # of a body that is too large
_ANSWER_SECONDS = 60.0  # for a request that has to be answered
_SILENCE_SECONDS = 0.5  # after which a broken request may stay without an answer


class Sent(NamedTuple):
    """The bytes of one connection. `status`: that a valid request has to have; `whole`: there has to be an answer."""

    kind: str
    data: bytes
    whole: bool = True
    status: int | None = None


class Requests:
    """Makes requests. `token`: of an app; `strangers`: tokens that the home does not know; `tools`: the model takes them."""

    def __init__(
        self, model: str, token: str, strangers: Sequence[str], chance: random.Random, tools: bool = True
    ) -> None:
        self._token, self._strangers, self._chance = token, strangers, chance
        named = {"model": model}
        self._posts: Sequence[tuple[str, Mapping[str, Any]]] = (
            ("/v1/chat/completions", {**named, **_SHORT, "messages": _CHAT}),
            (
                "/v1/chat/completions",
                {**named, **_SHORT, "messages": _CHAT, "stream": True, "tools": [_TOOL] if tools else []},
            ),
            ("/v1/completions", {**named, **_SHORT, "prompt": ["he", "ll"], "n": 2, "seed": 7, "temperature": 1.0}),
            (
                "/api/chat",
                {**named, "messages": _CHAT, "options": {"num_predict": 2, "num_ctx": 8192.0}, "keep_alive": -1},
            ),
            ("/api/generate", {**named, "prompt": "Light?", "stream": False, "options": {"num_predict": 2}}),
            ("/api/show", named),
            ("/api/pull", named),
        )
        self._gets = ("/v1/models", f"/v1/models/{model}", "/api/tags", "/api/ps", *_OPEN_PATHS)
        self._hostile: Sequence[Callable[[], Sent]] = (
            self._noise, self._bad_line, self._bad_headers, self._bad_length, self._bad_chunks, self._bad_body, self._bad_path,
            self._foreign_host, self._pipelined, self._cut, self._upgrade,
        )  # fmt: skip

    def next(self) -> Sent:
        """One of all kinds."""
        draw = self._chance.random()
        if draw < 0.15:
            return self._valid()
        if draw < 0.30:
            return self._stranger()
        return self._mutated() if draw < 0.65 else self._chance.choice(self._hostile)()

    # ---- well-formed ----------------------------------------------------------------------------------------------

    def _valid(self) -> Sent:
        return Sent("valid", self._request(self._token), status=200)

    def _stranger(self) -> Sent:
        """A valid request without a valid token, or with a valid one elsewhere."""
        chance = self._chance
        path, body = self._any()
        changed = with_changed_bytes(self._token.encode(), chance).decode("latin-1")
        damaged = "".join(letter for letter in changed if letter.isprintable())  # others are no HTTP
        value = chance.choice((
            "", "Bearer", "Bearer ", f"Basic {damaged}", f"Bearer {damaged}", f"Bearer {chance.choice(self._strangers)}",
            "Bearer " + "x" * 9000, "Bearer \u00e9", "Digest a=b",
        ))  # fmt: skip
        headers = {**_CLOSE, **({"Authorization": value} if value else {})}
        data = request_bytes("GET" if body is None else "POST", path, None, body, headers)
        return Sent("stranger", data, status=200 if path in _OPEN_PATHS else None)

    def _mutated(self) -> Sent:
        """A request whose body has another field or value, or other bytes."""
        chance = self._chance
        path, body = chance.choice(self._posts)
        fields = dict(body)
        for _ in range(chance.randrange(1, 4)):
            names = [
                *fields,
                *chance.choice(self._posts)[1],
                "stop",
                "format",
                "response_format",
                "logit_bias",
                "tool_choice",
            ]
            fields[chance.choice(names)] = chance.choice(_ODD)
        if chance.random() < 0.3 and isinstance(fields.get("messages"), list) and fields["messages"]:
            message = dict(_CHAT[1])
            message[chance.choice(("role", "content", "tool_calls", "name", "extra"))] = chance.choice(_ODD)
            fields["messages"] = [message]
        content = json.dumps(fields).encode()
        if chance.random() < 0.3:
            content = with_changed_bytes(content, chance)
        return Sent("mutated", self._with_content(path, content))

    def _any(self) -> tuple[str, Mapping[str, Any] | None]:
        if self._chance.random() < 0.4:
            return self._chance.choice(self._gets), None
        return self._chance.choice(self._posts)

    def _request(self, token: str | None, headers: Mapping[str, str] = _CLOSE) -> bytes:
        path, body = self._any()
        return request_bytes("GET" if body is None else "POST", path, token, body, headers)

    def _with_content(self, path: str, content: bytes) -> bytes:
        headers = {**_CLOSE, "Content-Length": str(len(content))}
        return request_bytes("POST", path, self._token, None, headers) + content

    # ---- hostile --------------------------------------------------------------------------------------------------

    def _noise(self) -> Sent:
        chance = self._chance
        greetings = (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET /\r\n",
            b"\r\n\r\n",
        )
        return Sent("noise", chance.choice((chance.randbytes(chance.randrange(1, 400)), *greetings)), whole=False)

    def _bad_line(self) -> Sent:
        chance = self._chance
        data = self._request(chance.choice((self._token, None)))
        method = chance.choice(
            ("CONNECT", "TRACE", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "get", "G\u00c9T", "A" * 500)
        )
        version = chance.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/9.9", "", "HTTP/1.1 x"))
        _, _, rest = data.partition(b"\r\n")
        target = chance.choice(("*", "http://localhost/v1/models", "localhost:80", "/v1/models", "//", ""))
        return Sent("line", f"{method} {target} {version}\r\n".encode("latin-1") + rest, whole=False)

    def _bad_headers(self) -> Sent:
        chance = self._chance
        data = self._request(chance.choice((self._token, None)))
        line, _, rest = data.partition(b"\r\n")
        more = chance.choice((
            b"X: " + b"a" * 40_000, b"\r\n".join(b"X-%d: y" % number for number in range(300)), b"Host: other", b"Host: ",
            b"X\x00: y", b"X: y\x00", b": y", b"no colon", b" folded", b"X : y", b"Authorization: Bearer x",
            b"Content-Type: text/html; charset=\xff", b"Content-Encoding: gzip", b"Expect: 100-continue",
            b"Accept: " + b"\xe9" * 99,
            b"Range: bytes=0-", b"X-Forwarded-For: 127.0.0.1", b"Connection: " + b"x, " * 500,
            b"Cookie: " + chance.randbytes(50),
        ))  # fmt: skip
        return Sent("headers", line + b"\r\n" + more + b"\r\n" + rest, whole=False)

    def _bad_length(self) -> Sent:
        chance = self._chance
        value = chance.choice(
            ("-1", "0", "5", "99999999999999999999", "1e3", "0x10", "\u0661", "", "5, 6", " 7 ", "+4")
        )
        path, body = chance.choice(self._posts)
        data = request_bytes("POST", path, self._token, None, {**_CLOSE, "Content-Length": value})
        return Sent("length", data + json.dumps(body).encode(), whole=False)

    def _bad_chunks(self) -> Sent:
        chance = self._chance
        path, body = chance.choice(self._posts)
        content = json.dumps(body).encode()
        both = {"Content-Length": "5"} if chance.random() < 0.3 else {}
        coding = chance.choice(("chunked", "chunked", "gzip, chunked", "identity", "chunked, chunked", "CHUNKED"))
        head = request_bytes("POST", path, self._token, None, {**_CLOSE, "Transfer-Encoding": coding, **both})
        chunks = chance.choice((
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content),
            b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n",
            b"zz\r\n\r\n", b"ffffffffffffffff\r\n" + content, b"-5\r\nhello\r\n", b"5;" + b"x" * 70_000, b"0\r\nX: y\r\n\r\n",
        ))  # fmt: skip
        return Sent("chunks", head + chunks, whole=False)

    def _bad_body(self) -> Sent:
        chance = self._chance
        path, _ = chance.choice(self._posts)
        if chance.random() < 0.005:
            return Sent("large", self._with_content(path, b" " * _WRITTEN_BYTES))
        return Sent("body", self._with_content(path, chance.choice((
            b"", b"null", b"[]", b'"x"', b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b'"\\ud800"',
            b"NaN", b"1" * 5000,
            b'{"model": "tiny", "model": 1}', b'{"messages": ' + b"9" * 400 + b"}", b"\x00" * 100, chance.randbytes(200),
            json.dumps({"model": "tiny", "messages": [_CHAT[1]] * 5000}).encode(),
            json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "light " * 5000}]}).encode(),
        ))))  # fmt: skip

    def _bad_path(self) -> Sent:
        chance = self._chance
        path = chance.choice((
            "/v1/models/" + "x" * 5000, "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/../../etc/passwd",
            "/%2e%2e/%2e%2e/etc",
            "/health/", "//health", "/health?x=/v1/models", "/API/VERSION", "/api/version/..",
            "/v1/models?token=" + self._token,
            "/v1//models", "/./", "/%", "/%zz", "/v1/models;x", "/health%2f", "/docs", "/openapi.json",
            "/metrics", "/v1/events",
        ))  # fmt: skip
        token = chance.choice((self._token, None))
        return Sent(
            "path", request_bytes(chance.choice(("GET", "POST", "HEAD")), path, token, None, _CLOSE), whole=False
        )

    def _foreign_host(self) -> Sent:
        host = self._chance.choice(
            ("attacker.example", "localhost.attacker.example", "127.0.0.1.nip.io", "[::1", "a" * 300, "\u00e9")
        )
        return Sent("host", self._request(self._token, {**_CLOSE, "Host": host}), whole=False)

    def _pipelined(self) -> Sent:
        chance = self._chance
        several = [self._request(chance.choice((self._token, None)), {}) for _ in range(chance.randrange(2, 5))]
        return Sent("pipelined", b"".join(several) + self._request(self._token))

    def _cut(self) -> Sent:
        data = self._request(self._token)
        return Sent("cut", data[: self._chance.randrange(len(data))], whole=False)

    def _upgrade(self) -> Sent:
        headers = {"Connection": "Upgrade", "Upgrade": self._chance.choice(("websocket", "h2c", "TLS/1.0"))}
        headers |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}
        return Sent("upgrade", self._request(self._chance.choice((self._token, None)), headers), whole=False)


def unknown_token() -> str:
    """A well-formed token of a key that no home has admitted."""
    return format_token(AppKey(name="stranger", secret=new_keypair().secret, coordinator_public=new_keypair().public))


def fault_of(sent: Sent, received: bytes, token: str) -> str:
    """What is wrong with the answers to a request; empty if nothing is."""
    answers = answers_in(received)
    for answer in answers:
        if answer.status >= 500 and answer.status not in _MAY_FAIL:
            return f"status {answer.status}"
        says_nothing = answer.body in _OPEN_BODIES or answer.body.startswith(_OPEN_VERSION)
        if answer.status < 400 and not says_nothing and token.encode() not in sent.data:
            return f"status {answer.status} without a token"
    if sent.whole and not answers:
        return "no answer"
    if sent.status is not None and answers[0].status != sent.status:
        return f"status {answers[0].status} instead of {sent.status}"
    return ""


async def exchange(host: str, port: int, sent: Sent) -> bytes:
    """Send a request over a new connection, and receive until it is closed, or silent after a broken request."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return b""
    received = b""
    try:
        writer.write(sent.data)
        while True:
            piece = await asyncio.wait_for(reader.read(1 << 16), _ANSWER_SECONDS if sent.whole else _SILENCE_SECONDS)
            if not piece:
                return received
            received += piece
    except (OSError, asyncio.TimeoutError):
        return received
    finally:
        writer.transport.abort()


class Answer(NamedTuple):
    """One whole answer."""

    status: int
    body: bytes


def answers_in(received: bytes) -> list[Answer]:
    """The answers in what a connection has received; an unfinished one at the end is left out."""
    found = []
    while (answer := _first_answer(received)) is not None:
        found.append(answer[0])
        received = answer[1]
    return found


def _first_answer(received: bytes) -> tuple[Answer, bytes] | None:
    head, separator, rest = received.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    if not separator or not first.startswith(b"HTTP/1.1 "):
        return None
    status = int(first[9:12])
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if status < 200:
        return _first_answer(rest)
    if fields.get(b"transfer-encoding") == b"chunked":
        body = b""
        while True:
            size, separator, rest = rest.partition(b"\r\n")
            num = int(size, 16) if separator else 0
            if not separator or len(rest) < num + 2:
                return None
            body, rest = body + rest[:num], rest[num + 2 :]
            if not num:
                return Answer(status, body), rest
    length = int(fields.get(b"content-length", len(rest)))  # without a length, all until the end
    return (Answer(status, rest[:length]), rest[length:]) if len(rest) >= length else None
