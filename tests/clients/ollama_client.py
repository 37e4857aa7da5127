"""Run by `test_clients.py` in an environment of its own: ollama's client, unmodified, against the gateway.

Arguments: the kind of the served model, the address, a token. It raises if something is not as it must be.
"""

from __future__ import annotations

import sys
from typing import Any

import ollama

TOOL: Any = {"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}


def check_text(client: ollama.Client) -> None:
    """The library, chat with tools, streams and generate."""
    (model,) = [each.model or "" for each in client.list().models]
    assert client.show(model).capabilities == ["completion", "tools"]
    assert [each.model for each in client.ps().models] == [model]
    assert client.pull(model).status == "success"
    chat: Any = [{"role": "user", "content": "hello"}]
    assert client.chat(model=model, messages=chat).message.content == "hello"
    parts = list(client.chat(model=model, messages=chat, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "hello"
    assert parts[-1].done_reason == "stop"
    called = client.chat(model=model, messages=chat, tools=[TOOL]).message
    (call,) = called.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("turn_on", {"name": "kitchen"})
    result: Any = {"role": "tool", "tool_name": "turn_on", "content": "done"}
    assert (
        client.chat(model=model, messages=[*chat, called, result], tools=[TOOL]).message.content == "The light is on."
    )
    assert client.generate(model=model, prompt="hello").response == "hello"
    try:
        client.chat(model="other", messages=chat)
    except ollama.ResponseError as error:
        assert error.status_code == 404
    else:
        raise AssertionError("no error for another model")


def check_vectors(client: ollama.Client) -> None:
    """Embeddings of several texts."""
    (model,) = [each.model or "" for each in client.list().models]
    assert client.show(model).capabilities == ["embedding"]
    vectors = client.embed(model=model, input=["the kitchen", "the attic"]).embeddings
    assert [len(vector) for vector in vectors] == [384, 384]


if __name__ == "__main__":
    kind, address, token = sys.argv[1:]
    client = ollama.Client(host=address, headers={"Authorization": f"Bearer {token}"})
    {"text": check_text, "vectors": check_vectors}[kind](client)
