"""Run by `test_clients.py` in an environment of its own: openai's client, unmodified, against the gateway.

Arguments: the kind of the served model, the address, a token. It raises if something is not as it must be.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

TOOL: Any = {"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}


def raises(kind: type[Exception], call: Any) -> None:
    """Check the class of the error of a call."""
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def check_text(client: openai.OpenAI, address: str) -> None:
    """Chat, stream with usage, tools, choices, seeds, and error classes."""
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


if __name__ == "__main__":
    kind, address, token = sys.argv[1:]
    check = {"text": check_text, "vectors": check_vectors}[kind]
    check(openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0), address)
