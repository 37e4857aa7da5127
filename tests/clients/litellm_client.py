"""Run by `test_clients.py` in an environment of its own: litellm, unmodified, against the gateway.

Arguments: the kind of the served model, the address, a token. It raises if something is not as it must be.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # the list of prices that it has, instead of one from the Internet

import litellm
import openai
from pydantic import BaseModel, ConfigDict

TOOL: Any = {
    "type": "function",
    "function": {"name": "turn_on", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}},
}


class Light(BaseModel):
    """State of a light."""

    model_config = ConfigDict(extra="forbid")
    on: bool


def check_text(where: dict[str, Any]) -> None:
    """Chat, a stream, a round with a tool, and an answer of a given form."""
    chat: Any = [{"role": "user", "content": "hello"}]
    answer = litellm.completion(messages=chat, **where)
    assert answer.choices[0].message.content == "hello", answer
    chunks = litellm.completion(messages=chat, stream=True, **where)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    called = litellm.completion(messages=chat, tools=[TOOL], **where).choices[0].message
    (call,) = called.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("turn_on", {"name": "kitchen"})
    result = {"role": "tool", "tool_call_id": call.id, "name": "turn_on", "content": "done"}
    said = litellm.completion(messages=[*chat, called.model_dump(), result], tools=[TOOL], **where)
    assert said.choices[0].message.content == "The light is on."
    formed = litellm.completion(messages=chat, response_format=Light, **where)
    Light.model_validate_json(formed.choices[0].message.content)


def check_vectors(where: dict[str, Any]) -> None:
    """Embeddings of several texts."""
    result = litellm.embedding(input=["the kitchen", "the attic"], **where)
    assert [len(each["embedding"]) for each in result.data] == [384, 384]


if __name__ == "__main__":
    kind, address, token = sys.argv[1:]
    (model,) = [each.id for each in openai.OpenAI(base_url=f"{address}/v1", api_key=token).models.list()]
    as_openai = {"model": f"openai/{model}", "api_base": f"{address}/v1", "api_key": token, "num_retries": 0}
    as_ollama = {"model": f"ollama_chat/{model}", "api_base": address, "api_key": token, "num_retries": 0}
    if kind == "text":
        check_text(as_openai)
        check_text(as_ollama)
    else:
        check_vectors(as_openai)
        check_vectors({**as_ollama, "model": f"ollama/{model}"})
