"""Record what Home Assistant's integration `llama_cpp` sends for a house with 61 lights: three requests, as JSON.

Run by hand with the pytest of Home Assistant's environment (docs/contributing.md); it writes `turn.json` next to this file. The
server is a stand-in that calls intent__HassTurnOn once and then answers, because only the requests matter here.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from homeassistant.components import conversation
from homeassistant.components.homeassistant.exposed_entities import async_expose_entity
from homeassistant.core import Context, HomeAssistant
from homeassistant.setup import async_setup_component

LIGHTS = {f"lamp_{number}": {"name": f"Lamp number {number}"} for number in range(60)}
CALL = {"name": "intent__HassTurnOn", "arguments": '{"name": "Kitchen Light"}'}


@pytest.fixture(autouse=True)
def _sockets(socket_enabled: None) -> None:
    """Allow connections, which Home Assistant's test environment blocks."""


class StandIn:
    """Answers as a gateway would, and keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "model", "object": "model", "created": 0, "owned_by": "x"}]}
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        calls = body["messages"][-1]["role"] == "user" and "turn on" in body["messages"][-1]["content"]
        message: dict[str, Any] = {"role": "assistant", "content": "The light is on."}
        if calls:
            message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": CALL}],
            }
        head = {"id": "1", "created": 1, "model": "model"}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice]})
        if body["max_tokens"] > 3:  # not a question of the set-up, whether the server can stream
            self.bodies.append(body)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for delta, reason in ((message, None), ({}, "tool_calls" if calls else "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
            await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


async def test_record(hass: HomeAssistant) -> None:
    stand_in = StandIn()
    app = web.Application()
    app.add_routes([web.get("/v1/models", stand_in.models), web.post("/v1/chat/completions", stand_in.chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (port,) = (address[1] for address in runner.addresses)

    lights = {"input_boolean": {**LIGHTS, "kitchen": {"name": "Kitchen Light"}}}
    for component, config in (("homeassistant", {}), ("conversation", {}), ("input_boolean", lights)):
        assert await async_setup_component(hass, component, config)
    await hass.async_block_till_done()
    for state in hass.states.async_all("input_boolean"):
        async_expose_entity(hass, "conversation", state.entity_id, True)
    flows = hass.config_entries.flow
    shown = await flows.async_init("llama_cpp", context={"source": "user"})
    shown = await flows.async_configure(shown["flow_id"], {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "x"})
    await flows.async_configure(shown["flow_id"], {"chat_model": "model"})
    await hass.async_block_till_done()
    (agent,) = (s.entity_id for s in hass.states.async_all("conversation") if "home_assistant" not in s.entity_id)
    for text in ("Please turn on the kitchen light.", "What is on?"):  # the second one begins a new conversation
        await conversation.async_converse(hass, text, None, Context(), agent_id=agent, language="en")
        await asyncio.sleep(2.1)
    await runner.cleanup()

    assert [len(body["messages"]) for body in stand_in.bodies] == [2, 4, 2]
    bodies = [{**body, "user": "conversation"} for body in stand_in.bodies]
    Path(__file__).with_name("turn.json").write_text(json.dumps(bodies, indent=1) + "\n")
