"""Home Assistant's integrations `llama_cpp` and `ollama`, unmodified, against the gateway.

Run by `test_home_assistant.py` with the pytest of Home Assistant's environment. HEARTH_ADDRESS and HEARTH_TOKEN say where the
gateway is. The served model calls intent__HassTurnOn for the kitchen light, and then says that the light is on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from homeassistant.components import ai_task, conversation
from homeassistant.components.homeassistant.exposed_entities import async_expose_entity
from homeassistant.core import Context, HomeAssistant
from homeassistant.data_entry_flow import FlowResultType
from homeassistant.helpers import llm
from homeassistant.setup import async_setup_component

ADDRESS, TOKEN = os.environ["HEARTH_ADDRESS"], os.environ["HEARTH_TOKEN"]
LIGHT = "input_boolean.kitchen"
KILLED = Path(__file__).with_name("killed")  # there once a device has been killed
COMMANDS_AFTER = 12  # commands that have to succeed after it
LIMIT_SECONDS = 240.0

Command = Callable[[], Awaitable[str]]


@pytest.fixture(autouse=True)
def _sockets(socket_enabled: None) -> None:
    """Allow connections, which Home Assistant's test environment blocks."""


async def set_up(hass: HomeAssistant) -> None:
    """A house with a light that voice assistants may switch."""
    kitchen = {"input_boolean": {"kitchen": {"name": "Kitchen Light"}}}
    for component, config in (("homeassistant", {}), ("conversation", {}), ("ai_task", {}), ("input_boolean", kitchen)):
        assert await async_setup_component(hass, component, config)
    await hass.async_block_till_done()
    for assistant in ("conversation", "ai_task"):  # Home Assistant's own pages show the first one only
        async_expose_entity(hass, assistant, LIGHT, True)


async def add_llama_cpp(hass: HomeAssistant) -> str:
    """Add the integration as a user does, first with a wrong key; the id of its conversation entity."""
    flows = hass.config_entries.flow
    shown = await flows.async_init("llama_cpp", context={"source": "user"})
    where = {"base_url": f"{ADDRESS}/v1", "api_key": "hearth_wrong"}
    shown = await flows.async_configure(shown["flow_id"], where)
    assert shown["errors"] == {"base": "invalid_auth"}
    shown = await flows.async_configure(shown["flow_id"], {**where, "api_key": TOKEN})
    assert shown["step_id"] == "model", shown
    (model,) = shown["data_schema"].schema["chat_model"].config["options"]
    shown = await flows.async_configure(shown["flow_id"], {"chat_model": model})
    assert shown["type"] is FlowResultType.CREATE_ENTRY, shown
    await hass.async_block_till_done()
    return newest(hass, "conversation")


async def add_ollama(hass: HomeAssistant) -> tuple[str, str]:
    """Add the integration with a conversation and a task; the ids of both entities."""
    flows = hass.config_entries.flow
    shown = await flows.async_init("ollama", context={"source": "user"})
    shown = await flows.async_configure(shown["flow_id"], {"url": ADDRESS, "api_key": "hearth_wrong"})
    assert shown["errors"] == {"base": "invalid_auth"}
    shown = await flows.async_configure(shown["flow_id"], {"url": ADDRESS, "api_key": TOKEN})
    assert shown["type"] is FlowResultType.CREATE_ENTRY, shown
    await hass.async_block_till_done()
    parts = hass.config_entries.subentries
    for kind, more in (("conversation", {"llm_hass_api": ["assist"]}), ("ai_task_data", {})):
        added = await parts.async_init((shown["result"].entry_id, kind), context={"source": "user"})
        added = await parts.async_configure(added["flow_id"], {**OLLAMA, **more})
        assert added["type"] is FlowResultType.CREATE_ENTRY, added
        await hass.async_block_till_done()
    return newest(hass, "conversation"), newest(hass, "ai_task")


OLLAMA: dict[str, Any] = {
    "name": "Hearth",
    "model": "model:latest",
    "num_ctx": 8192,
    "max_history": 20,
    "keep_alive": -1,
    "think": False,
}


def newest(hass: HomeAssistant, domain: str) -> str:
    """The entity of the integration that was added."""
    return next(state.entity_id for state in hass.states.async_all(domain) if "home_assistant" not in state.entity_id)


def said(hass: HomeAssistant, agent: str) -> Command:
    """A command to a conversation agent."""

    async def command() -> str:
        text = "Please turn on the kitchen light."
        result = await conversation.async_converse(hass, text, None, Context(), agent_id=agent, language="en")
        return str(result.response.speech["plain"]["speech"])

    return command


def task(hass: HomeAssistant, entity: str) -> Command:
    """A task that may control the house."""

    async def command() -> str:
        (assist,) = (api for api in llm.async_get_apis(hass) if api.id == llm.LLM_API_ASSIST)
        result = await ai_task.async_generate_data(
            hass, task_name="light", entity_id=entity, instructions="Please turn on the kitchen light.", llm_api=assist
        )
        return str(result.data)

    return command


async def state_of_light(hass: HomeAssistant, entity: str) -> Any:
    """A task whose answer has a given form, as automations ask it."""
    structure = {"on": {"selector": {"boolean": {}}, "required": True}}
    asked = {"task_name": "light", "instructions": "Is it on?", "entity_id": entity, "structure": structure}
    answer = await hass.services.async_call("ai_task", "generate_data", asked, blocking=True, return_response=True)
    return answer["data"]


async def check_light(hass: HomeAssistant, command: Command) -> None:
    """Switch the light off by hand, and on by a command."""
    await hass.services.async_call("input_boolean", "turn_off", {"entity_id": LIGHT}, blocking=True)
    assert hass.states.get(LIGHT).state == "off"
    answer = await command()
    assert hass.states.get(LIGHT).state == "on", answer
    assert answer == "The light is on."


async def test_llama_cpp_conversation(hass: HomeAssistant) -> None:
    await set_up(hass)
    await check_light(hass, said(hass, await add_llama_cpp(hass)))


async def test_ollama_conversation_and_task(hass: HomeAssistant) -> None:
    await set_up(hass)
    agent, entity = await add_ollama(hass)
    await check_light(hass, said(hass, agent))
    await check_light(hass, task(hass, entity))
    assert (await state_of_light(hass, entity))["on"] in (True, False)  # the weights do not spell it: the mask does


@pytest.mark.parametrize("integration", ["llama_cpp", "ollama"])
async def test_while_a_device_is_lost(hass: HomeAssistant, integration: str) -> None:
    """Give one command after the other, until enough have succeeded after the loss of a device; the parent kills one."""
    await set_up(hass)
    if integration == "llama_cpp":
        commands = [said(hass, await add_llama_cpp(hass))]
    else:
        agent, entity = await add_ollama(hass)
        commands = [said(hass, agent), task(hass, entity)]
    number, after, began = 0, 0, time.monotonic()
    longest = 0.0
    while after < COMMANDS_AFTER:
        assert time.monotonic() - began < LIMIT_SECONDS
        after += KILLED.exists()
        print(f"command {number}", flush=True)
        since = time.monotonic()
        await check_light(hass, commands[number % len(commands)])
        longest = max(longest, time.monotonic() - since)
        number += 1
    print(
        f"{integration}: {number} commands, {after} of them after the loss; the longest took {longest:.2f} s",
        flush=True,
    )
