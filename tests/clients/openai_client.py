"""Run by `test_clients.py` in an environment of its own: openai's client, unmodified, against the gateway.

Arguments: the kind of the served model, the address, a token. It raises if something is not as it must be.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from pydantic import BaseModel, ConfigDict

TOOL: Any = {"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}


SWITCH: Any = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {
            "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False,
        },
    },
}  # fmt: skip


class Light(BaseModel):
    """State of a light."""

    model_config = ConfigDict(extra="forbid")
    on: bool


def raises(kind: type[Exception], call: Any) -> Any:
    """Check the class of the error of a call, and return the error."""
    try:
        call()
    except kind as error:
        assert type(error) is kind, repr(error)
        return error
    raise AssertionError(f"no {kind.__name__}")


def check_text(client: openai.OpenAI, address: str) -> None:
    """Chat, stream with usage, tools, a schema, choices, stop texts, seeds, and error classes."""
    (model,) = [each.id for each in client.models.list()]
    chat: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model=model, messages=chat)
    assert answer.choices[0].message.content == "hello", answer
    assert answer.choices[0].finish_reason == "stop"
    texts, usage = "", None
    stream = client.chat.completions.create(
        model=model, messages=chat, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        texts += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert texts == "hello"
    assert usage == answer.usage

    called = client.chat.completions.create(model=model, messages=chat, tools=[TOOL])
    (call,) = called.choices[0].message.tool_calls or ()
    assert called.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("turn_on", {"name": "kitchen"})
    names, arguments = "", ""
    for chunk in client.chat.completions.create(model=model, messages=chat, tools=[TOOL], stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            names += (part.function and part.function.name) or ""
            arguments += (part.function and part.function.arguments) or ""
    assert (names, json.loads(arguments)) == ("turn_on", {"name": "kitchen"})
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    said = client.chat.completions.create(
        model=model, messages=[*chat, called.choices[0].message, result], tools=[TOOL]
    )
    assert said.choices[0].message.content == "The light is on."

    # Forms that the weights do not spell: the mask does.
    for tool_choice in ("required", {"type": "function", "function": {"name": "switch"}}):
        demanded = client.chat.completions.create(model=model, messages=chat, tools=[SWITCH], tool_choice=tool_choice)
        (call,) = demanded.choices[0].message.tool_calls or ()
        assert call.function.name == "switch"
        assert list(json.loads(call.function.arguments)) == ["on"]
    parsed = client.chat.completions.parse(model=model, messages=chat, response_format=Light)
    assert isinstance(parsed.choices[0].message.parsed, Light), parsed

    stopped = client.chat.completions.create(model=model, messages=chat, stop=["ll", "never"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("he", "stop")
    three = client.chat.completions.create(model=model, messages=chat, n=3)
    assert [(each.index, each.message.content) for each in three.choices] == [(n, "hello") for n in range(3)]

    drawn = [
        client.completions.create(model=model, prompt="he", n=3, max_tokens=6, temperature=2.0, seed=seed).choices
        for seed in (5, 5, 6)
    ]
    assert [each.text for each in drawn[0]] == [each.text for each in drawn[1]] != [each.text for each in drawn[2]]

    create = client.chat.completions.create
    raises(openai.NotFoundError, lambda: create(model="other", messages=chat))
    raises(openai.BadRequestError, lambda: create(model=model, messages=chat, logit_bias={"5": 1}))
    stranger = openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0)
    raises(openai.AuthenticationError, stranger.models.list)


def print_log_probs(client: openai.OpenAI, address: str) -> None:
    """Print the log-probability of each token of a greedy answer, and those of the three most likely ones."""
    (model,) = [each.id for each in client.models.list()]
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=12, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    log_probs = answer.choices[0].logprobs
    tokens = log_probs.content or ()
    print(json.dumps([[each.logprob, [top.logprob for top in each.top_logprobs]] for each in tokens]))


def check_busy(client: openai.OpenAI, address: str) -> None:
    """The home runs one request, and none may wait: the second one is refused, and the first goes on."""
    (model,) = [each.id for each in client.models.list()]
    body: Any = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 280}
    stream = client.chat.completions.create(**body, stream=True)
    next(stream)
    error = raises(openai.RateLimitError, lambda: client.chat.completions.create(**body))
    assert error.response.headers["retry-after"] == "1"
    *_, last = stream
    assert last.choices[0].finish_reason == "length"


def check_broken_stream(client: openai.OpenAI, address: str) -> None:
    """An error after the stream has begun: the test revokes the token once it reads that it has."""
    (model,) = [each.id for each in client.models.list()]
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=280, stream=True
    )
    next(stream)
    print("began", flush=True)
    error = raises(openai.APIError, lambda: list(stream))
    assert "revoked" in error.message or "token" in error.message, error


def check_not_ready(client: openai.OpenAI, address: str) -> None:
    """The home has no device left."""
    body: Any = {"model": sys.argv[4], "messages": [{"role": "user", "content": "hello"}]}
    error = raises(openai.InternalServerError, lambda: client.chat.completions.create(**body))
    assert (error.status_code, error.response.headers["retry-after"]) == (503, "1")


def check_vectors(client: openai.OpenAI, address: str) -> None:
    """Embeddings: base64, which the client asks for by itself, equals float."""
    (model,) = [each.id for each in client.models.list()]
    texts = ["the kitchen", "the attic"]
    packed = client.embeddings.create(model=model, input=texts)
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    assert [each.embedding for each in packed.data] == [each.embedding for each in plain.data]
    assert packed.usage.prompt_tokens > 0
    (short,) = client.embeddings.create(model=model, input=texts[0], dimensions=64).data
    assert len(short.embedding) == 64
    print(json.dumps([each.embedding for each in packed.data]))


CHECKS = {
    "text": check_text, "vectors": check_vectors, "log_probs": print_log_probs, "busy": check_busy,
    "broken_stream": check_broken_stream, "not_ready": check_not_ready,
}  # fmt: skip

if __name__ == "__main__":
    kind, address, token = sys.argv[1:4]
    check = CHECKS[kind]
    check(openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0), address)
