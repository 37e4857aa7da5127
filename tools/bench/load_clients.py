"""Client apps that ask and check every answer: `python -m tools.bench.load_clients ipc://PATH KEY ADDRESS`, on the hub.

Under faults they ask without pause. The references are the answers of the undisturbed home, which the same process asks for
first. `measure` times requests to a graph.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from coordinator.cli.load_generator import random_inputs
from hearth.client.home import AsyncHome, connect_async
from hearth.errors import HearthError
from hearth.platform.curve import new_keypair
from tools.bench.fault_rows import Happened
from tools.bench.processes import HomeClients, serve
from tools.bench.stats import largest_difference

# Largest accepted difference from the reference, relative to its largest value: other plans sum in another order.
_TOLERANCE = 1e-5
_LOOK_SECONDS = 2.0  # timeout of a question for the state; longer than a busy coordinator takes
_FAILURE_PAUSE_SECONDS = 0.1  # after an error, so that a client does not flood a home that refuses at once
POOL_SIZE = 8  # different requests
_PROMPT_TOKENS = 12  # of the shortest prompt
_MAX_TOKENS = 100  # of a streamed answer
_TOKEN_IDS = 1000  # of which prompts are made; the model has more

Seen = Callable[[], None]  # reports a token


class Work(ABC):
    """One kind of request: a pool of different ones, and how an answer is compared with the reference."""

    deadline_seconds: ClassVar[float] = 60.0  # far above any pause that is measured, so that a pause is no failure

    def __init__(self, model: str | None) -> None:
        self.model = model  # None: the home serves no other

    async def prepare(self, home: AsyncHome) -> None:  # noqa: B027 (most kinds need nothing)
        """Read what the requests need to know about the served model."""

    @abstractmethod
    async def answer(self, home: AsyncHome, item: int, seen: Seen) -> Any:
        """Send request `item` of the pool and return its answer. Raises HearthError."""

    @abstractmethod
    def difference(self, answer: Any, reference: Any) -> str:
        """What is wrong with an answer; empty if nothing is."""


class Embedding(Work):
    """Two sentences per request."""

    async def answer(self, home: AsyncHome, item: int, seen: Seen) -> Any:
        texts = [f"switch on lamp {item} in the kitchen", f"how warm will room {item} be tomorrow? " * (1 + item % 3)]
        return await home.embed(texts, self.deadline_seconds, model=self.model)

    def difference(self, answer: Any, reference: Any) -> str:
        return _far(answer, reference)


class Inference(Work):
    """Random arrays of the graph's inputs, the same in every request."""

    _inputs: dict[str, np.ndarray[Any, Any]]

    async def prepare(self, home: AsyncHome) -> None:
        self._inputs = random_inputs((await home.model_info(model=self.model)).inputs)

    async def answer(self, home: AsyncHome, item: int, seen: Seen) -> Any:
        return await home.infer(self._inputs, self.deadline_seconds, model=self.model)

    def difference(self, answer: Any, reference: Any) -> str:
        return next((far for name, values in reference.items() if (far := _far(answer[name], values))), "")


class Streaming(Work):
    """Streamed answers to prompts of a dozen tokens and more; every other one is sampled, with its own seed."""

    deadline_seconds = 300.0

    async def answer(self, home: AsyncHome, item: int, seen: Seen) -> Any:
        prompt = [3 + (7919 * i + 101 * item) % (_TOKEN_IDS - 3) for i in range(_PROMPT_TOKENS + item)]
        sampled = item % 2 == 1
        stream = home.generate(
            token_ids=prompt, max_tokens=_MAX_TOKENS, timeout_seconds=self.deadline_seconds,
            temperature=0.8 if sampled else 0.0, seed=item if sampled else None, model=self.model,
        )  # fmt: skip
        async with stream:
            async for _ in stream:
                seen()
        return stream.token_ids

    def difference(self, answer: Any, reference: Any) -> str:
        return "" if answer == reference else "other tokens than before the faults"


_WORKS: dict[str, type[Work]] = {"embed": Embedding, "infer": Inference, "generate": Streaming}  # by load


def _far(answer: Any, reference: Any) -> str:
    """How far an array is from its reference, if that is too far."""
    if answer.shape != reference.shape:
        return f"shape {answer.shape} instead of {reference.shape}"
    far = largest_difference(answer, reference)
    return "" if far <= _TOLERANCE else f"off by {far:.1e}"


class LoadClients(HomeClients):
    """Clients with a connection each, and a further one that asks for the home's state."""

    def __init__(self, key: Path, address: str) -> None:
        super().__init__(key, address)
        self._loads: list[tuple[Work, list[Any]]] = []  # and the references of each
        self._happened: list[Happened] = []
        self._clients: list[asyncio.Task[None]] = []
        self._observer: AsyncHome | None = None
        self._outputs: dict[str, Any] = {}  # of the first answer that `measure` got

    async def prepare(self, loads: Sequence[str]) -> None:
        """Ask for the references of each load: embed, infer or generate. Of several, each has a model of its name."""
        async with await self.connected() as home:
            for load in loads:
                work = _WORKS[load](load if len(loads) > 1 else None)
                await work.prepare(home)
                self._loads.append((work, [await work.answer(home, item, lambda: None) for item in range(POOL_SIZE)]))

    async def measure(self, at_once: int, warm_up: int, seconds: float = 0.0, count: int = 1) -> dict[str, Any]:
        """Keep `at_once` equal requests to a graph running for `seconds`, and until `count` answers after `warm_up` ones.

        Of these answers, `seconds`: the median latency of requests one by one, or the interval between answers of several at
        once; `difference`: the largest of all from the first answer ever. Raises the errors of the client library.
        """
        loop, graph = asyncio.get_running_loop(), Inference(None)
        done: list[float] = []
        latencies: list[float] = []
        differences: list[float] = []

        async def ask(home: AsyncHome) -> None:
            while len(done) < warm_up + count or loop.time() < done[warm_up] + seconds:
                sent = loop.time()
                outputs = await graph.answer(home, 0, lambda: None)
                done.append(loop.time())
                latencies.append(done[-1] - sent)
                self._outputs = self._outputs or outputs
                differences.extend(largest_difference(outputs[name], each) for name, each in self._outputs.items())

        async with await self.connected() as home:
            await graph.prepare(home)
            await asyncio.gather(*(ask(home) for _ in range(at_once)))
        answers = len(done) - warm_up
        interval = (done[-1] - done[warm_up]) / max(answers - 1, 1)
        return {
            "seconds": statistics.median(latencies[warm_up:]) if at_once == 1 else interval,
            "answers": answers,
            "difference": max(differences),
        }

    def use(self, addresses: str) -> None:
        """Connect to these coordinators from now on: hosts separated by commas."""
        self._address = addresses

    async def begin(self, num_clients: int) -> None:
        """Start so many clients of each load. Raises the errors of connecting."""
        loads = [load for load in self._loads for _ in range(num_clients)]
        homes = [await self.connected() for _ in loads]
        self._clients = [
            asyncio.create_task(self._ask(home, number, *load))
            for number, (home, load) in enumerate(zip(homes, loads, strict=True))
        ]

    def take(self) -> dict[str, Any]:
        """What has happened since the last call."""
        taken, self._happened = self._happened, []
        return {"happened": taken}

    async def change_keys(self, app: str) -> None:
        """Admit an app, and revoke it. Raises the errors of the client library."""
        async with await self.connected() as home:
            await home.add_app(app, new_keypair().public)
            await home.revoke_app(app)

    async def state_of(self, address: str) -> dict[str, Any]:
        """The state of the coordinator at this address as a sentence; empty if it does not answer."""
        try:
            async with await connect_async(address, self._key, _LOOK_SECONDS) as home:
                return {"state": (await home.readiness(_LOOK_SECONDS)).state}
        except HearthError:
            return {"state": ""}

    async def look(self, devices: bool) -> dict[str, Any]:
        """The coordinator's status for each load, and its devices if wanted; {} if it does not answer."""
        try:
            if self._observer is None:
                self._observer = await self.connected(_LOOK_SECONDS)
            models = [work.model for work, _ in self._loads] or [None]
            found_statuses = [await self._observer.status(_LOOK_SECONDS, model=model) for model in models]
            found = await self._observer.devices(_LOOK_SECONDS) if devices else None
        except HearthError:
            return {}
        statuses = [status.model_dump(mode="json") for status in found_statuses]
        return {"statuses": statuses, "devices": found.model_dump(mode="json")["devices"] if found else []}

    async def _ask(self, home: AsyncHome, number: int, work: Work, references: list[Any]) -> None:
        """Send the requests of the pool in turn, until cancelled."""
        loop, item = asyncio.get_running_loop(), number

        def note(kind: str, detail: str = "") -> None:
            self._happened.append((loop.time(), number, kind, detail))

        async with home:
            while True:
                item = (item + 1) % POOL_SIZE
                try:
                    answer = await work.answer(home, item, lambda: note("token"))
                except HearthError as error:
                    note("failed", f"{type(error).__name__}: {error}"[:300])
                    await asyncio.sleep(_FAILURE_PAUSE_SECONDS)
                    continue
                wrong = work.difference(answer, references[item])
                note("wrong" if wrong else "answer", wrong)


if __name__ == "__main__":
    serve(sys.argv[1], LoadClients(Path(sys.argv[2]), sys.argv[3]))
