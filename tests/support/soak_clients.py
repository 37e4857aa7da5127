"""Client apps of the soak test, in a process of their own, since they run in the network namespace of the hub.

`python -m support.soak_clients KEY ADDRESS` reads a `Load` from its input and writes the outcomes. Each client has its own
connection and uses the client library like any app.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from hearth.client.home import AsyncHome, connect_async
from hearth.errors import HearthError, InternalError
from tools.testbed import Testbed

Request = dict[str, Any]  # arguments of `hearth.client.AsyncHome.generate`

_CONNECT_SECONDS = 30.0  # most time to reach a coordinator that serves already
_ANSWER_SECONDS = 300.0  # timeout of a request: far above any answer, so that a loaded machine causes no error
_ALL_SECONDS = 900.0  # timeout of the whole pool alone, or of the last answers: a slow device needs seconds for each
_CANCEL_EVERY = 3  # each client cancels one request in this many: enough to test, and most still complete
_BEFORE_FIRST_TOKEN_SECONDS = 0.05  # after which to cancel a request before its first token: it is in prefill then
_PATHS = Path(__file__).parents[1], Path(__file__).parents[2]  # folders of `support`, and of `tools` and the packages


class Load(BaseModel):
    """What the clients do. Without clients, each request is sent once, one after the other."""

    requests: list[Request]
    clients: int = 0
    seconds: float = 0.0  # each client sends random requests one after the other for so long and cancels every third
    seed: int = 0


class Outcome(BaseModel):
    """The outcome of a request. `index`: of the request in the list."""

    index: int
    tokens: list[int]
    cancelled: bool = False
    error: str = ""
    first_token_seconds: float | None = None


_OUTCOMES = TypeAdapter(list[Outcome])


def run_clients(testbed: Testbed, load: Load) -> list[Outcome]:
    """Run the clients on the coordinator's device, until they have all their answers."""
    hub = testbed.scenario.coordinator_device
    process = testbed.popen(
        hub, sys.executable, "-m", "support.soak_clients", str(testbed.key), testbed.address(hub), limited=False,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, environment={"PYTHONPATH": os.pathsep.join(map(str, _PATHS))},
    )  # fmt: skip
    output, _ = process.communicate(load.model_dump_json().encode(), timeout=load.seconds + _ALL_SECONDS)
    assert process.returncode == 0, f"the clients ended with {process.returncode}"
    return _OUTCOMES.validate_json(output)


def wrong_answers(outcomes: Sequence[Outcome], alone: Sequence[Outcome]) -> list[Outcome]:
    """Those that differ from the answer to the same request alone; a cancelled one must be its beginning."""
    return [
        each
        for each in outcomes
        if each.tokens != alone[each.index].tokens[: len(each.tokens) if each.cancelled else None]
    ]


def serving_status(testbed: Testbed) -> dict[str, Any] | None:
    """What `hearth status` says, once the home serves."""
    try:
        status: dict[str, Any] = json.loads(testbed.hearth("status", "--json"))
    except InternalError:  # no coordinator answers yet
        return None
    return status if status["state"].startswith("serving") else None


async def outcomes_of(load: Load, key: Path, address: str) -> list[Outcome]:
    outcomes: list[Outcome] = []
    loop = asyncio.get_running_loop()

    async def client(number: int, home: AsyncHome) -> None:
        rng = random.Random(f"{load.seed} {number}")
        until = loop.time() + load.seconds
        sent = number  # so that clients do not cancel at the same time
        while loop.time() < until:
            index = rng.randrange(len(load.requests))
            request = load.requests[index]
            after = rng.randint(0, request["max_tokens"] * 3 // 4) if sent % _CANCEL_EVERY == 0 else None
            outcomes.append(await outcome_of(home, index, request, after))
            sent += 1

    async with AsyncExitStack() as stack:
        connections = [connect_async(address, key, _CONNECT_SECONDS) for _ in range(load.clients or 1)]
        homes = [await stack.enter_async_context(await connection) for connection in connections]
        if load.clients:
            await asyncio.gather(*(client(number, home) for number, home in enumerate(homes)))
        else:
            outcomes += [await outcome_of(homes[0], *each, None) for each in enumerate(load.requests)]
    return outcomes


async def outcome_of(home: AsyncHome, index: int, request: Request, cancel_after: int | None) -> Outcome:
    """Run one request. Cancel it after `cancel_after` tokens; 0: before the first token; None: never."""
    answer = home.generate(**request, timeout_seconds=_ANSWER_SECONDS)
    first, error = None, ""
    try:
        async with answer:
            if cancel_after == 0:
                waiting = asyncio.ensure_future(anext(answer))
                await asyncio.wait({waiting}, timeout=_BEFORE_FIRST_TOKEN_SECONDS)
                await answer.aclose()
                await asyncio.gather(waiting, return_exceptions=True)
            else:
                async for token in answer:
                    first = token.seconds if first is None else first
                    if len(answer.token_ids) == cancel_after:
                        break
    except HearthError as failure:
        error = str(failure)
    cancelled = cancel_after is not None and not error and answer.usage is None
    return Outcome(index=index, tokens=answer.token_ids, cancelled=cancelled, error=error, first_token_seconds=first)


if __name__ == "__main__":
    found = asyncio.run(outcomes_of(Load.model_validate_json(sys.stdin.buffer.read()), Path(sys.argv[1]), sys.argv[2]))
    sys.stdout.buffer.write(_OUTCOMES.dump_json(found))
