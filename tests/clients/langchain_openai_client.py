"""Run by `test_clients.py` in an environment of its own: langchain-openai, unmodified, against the gateway.

Arguments: the kind of the served model, the address, a token. It raises if something is not as it must be.
"""

from __future__ import annotations

import sys
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict


class Light(BaseModel):
    """State of a light."""

    model_config = ConfigDict(extra="forbid")
    on: bool


class Lamp(BaseModel):
    """As `Light`, with a schema that permits further properties."""

    on: bool


@tool
def turn_on(name: str) -> str:
    """Turn on a light."""
    return "done"


def check_text(address: str, token: str, model: str) -> None:
    """Chat, streams, a round with a tool, and answers of a given form."""
    chat = ChatOpenAI(model=model, base_url=address, api_key=token, max_retries=0)
    answer = chat.invoke("hello")
    assert answer.content == "hello", answer
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream("hello")) == "hello"

    with_tools = chat.bind_tools([turn_on])
    messages: list[Any] = [HumanMessage("Light, please.")]
    called = with_tools.invoke(messages)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("turn_on", {"name": "kitchen"})
    streamed = None
    for chunk in with_tools.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [("turn_on", {"name": "kitchen"})]
    result = turn_on.invoke(call)
    assert isinstance(result, ToolMessage)
    assert with_tools.invoke([*messages, called, result]).content == "The light is on."
    for method in ("json_schema", "function_calling"):  # the weights do not spell it: the mask does
        assert isinstance(chat.with_structured_output(Light, method=method).invoke("Is it on?"), Light)
        lamp = chat.with_structured_output(Lamp, method=method, include_raw=True).invoke("Is it on?")
        assert isinstance(lamp["parsed"], Lamp), lamp


def check_vectors(address: str, token: str, model: str) -> None:
    """Embeddings; without the option, the client splits texts by OpenAI's own tokenizer, which it downloads."""
    embeddings = OpenAIEmbeddings(model=model, base_url=address, api_key=token, check_embedding_ctx_length=False)
    assert [len(vector) for vector in embeddings.embed_documents(["the kitchen", "the attic"])] == [384, 384]
    assert len(embeddings.embed_query("the kitchen")) == 384


if __name__ == "__main__":
    kind, address, token = sys.argv[1:]
    (model,) = [each.id for each in openai.OpenAI(base_url=f"{address}/v1", api_key=token).models.list()]
    {"text": check_text, "vectors": check_vectors}[kind](f"{address}/v1", token, model)
