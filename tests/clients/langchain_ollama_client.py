"""Run by `test_clients.py` in an environment of its own: langchain-ollama, unmodified, against the gateway.

Arguments: the kind of the served model, the address, a token. It raises if something is not as it must be.
"""

from __future__ import annotations

import sys
from typing import Any

import ollama
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from pydantic import BaseModel, ConfigDict


class Light(BaseModel):
    """State of a light."""

    model_config = ConfigDict(extra="forbid")
    on: bool


@tool
def turn_on(name: str) -> str:
    """Turn on a light."""
    return "done"


def check_text(where: dict[str, Any]) -> None:
    """Chat, streams, a round with a tool, and an answer of a given form."""
    chat = ChatOllama(**where, validate_model_on_init=True)
    answer = chat.invoke("hello")
    assert answer.content == "hello", answer
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream("hello")) == "hello"

    with_tools = chat.bind_tools([turn_on])
    messages: list[Any] = [HumanMessage("Light, please.")]
    called = with_tools.invoke(messages)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("turn_on", {"name": "kitchen"})
    assert with_tools.invoke([*messages, called, turn_on.invoke(call)]).content == "The light is on."
    assert isinstance(chat.with_structured_output(Light).invoke("Is it on?"), Light)


def check_vectors(where: dict[str, Any]) -> None:
    """Embeddings of several texts and of one."""
    embeddings = OllamaEmbeddings(**where)
    assert [len(vector) for vector in embeddings.embed_documents(["the kitchen", "the attic"])] == [384, 384]
    assert len(embeddings.embed_query("the kitchen")) == 384


if __name__ == "__main__":
    kind, address, token = sys.argv[1:]
    headers = {"Authorization": f"Bearer {token}"}
    (model,) = [each.model for each in ollama.Client(host=address, headers=headers).list().models]
    where = {"model": model, "base_url": address, "client_kwargs": {"headers": headers}}
    {"text": check_text, "vectors": check_vectors}[kind](where)
