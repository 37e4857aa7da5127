"""Worker runtimes in threads of one process, over encrypted loopback sockets, which go from plan to plan."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agent.worker.main import create_runtime
from agent.worker.runtime import Runtime
from coordinator.deploy.kept_caches import kept_caches, kept_prefixes
from hearth.errors import HearthError
from hearth.plan.plan import Plan, is_transformer_plan
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array

LOOPBACK = "127.0.0.1"
ANSWER_SECONDS = 60.0

Answer = tuple[wire.Message, list[bytes]]


class RuntimeProcess:
    """What a worker process does: load a plan, connect, run, and the same again with the next plan."""

    def __init__(self, store_path: Path, compute_device: wire.ComputeDevice = "cpu") -> None:
        self.bound: wire.WorkerBound | None = None
        self._store_path = store_path
        self._compute_device: wire.ComputeDevice = compute_device
        self._runtime: Runtime | None = None
        self._thread: threading.Thread | None = None
        self._answers: dict[bytes, queue.SimpleQueue[Answer]] = {}

    def load(
        self,
        plan: Plan,
        rank: int,
        parts: wire.ShardParts | wire.SegmentParts,
        token: bytes,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> wire.WorkerBound:
        load = wire.Load(holder="test", plan=plan, rank=rank, parts=parts, plan_token=token)
        (scratch := self._store_path / "scratch").mkdir(exist_ok=True)
        start = wire.Start(
            load=load, store_path=str(self._store_path), scratch_path=str(scratch), bind_host=LOOPBACK,
            ports=(0, 0), num_threads=1, compute_device=self._compute_device,
        )  # fmt: skip
        self.end()
        previous, self._runtime = self._runtime, None
        runtime = create_runtime(start, self._answer, previous)
        try:
            self.bound = runtime.load(is_given_up)
        finally:
            self._runtime = runtime
        return self.bound

    def connect(self, request: wire.ConnectPeers) -> None:
        self._runtime.connect(request)
        self._thread = threading.Thread(target=self._runtime.run, daemon=True)
        self._thread.start()

    def begin(self, request_id: bytes, message: wire.Message, payload: Sequence[bytes]) -> Callable[[], Answer]:
        """Pass a request to the runtime; the returned function waits for its next answer and raises its error."""
        assert self._runtime is not None
        answers = self._answers.setdefault(request_id, queue.SimpleQueue())
        self._runtime.handle(request_id, message, [bytes(frame) for frame in payload])

        def answer() -> Answer:
            message, frames = answers.get(timeout=ANSWER_SECONDS)
            if isinstance(message, wire.Failed):
                raise message.error()
            return message, frames

        return answer

    def end(self) -> None:
        """End the running plan, if there is one."""
        if self._thread is not None and self._runtime is not None:
            self._runtime.end()
            self._thread.join(10)
            assert not self._thread.is_alive()
            self._thread = None

    def close(self) -> None:
        """End for good. The transport of a worker process ends with the process, which runtimes do not have here."""
        self.end()
        data_plane = getattr(self._runtime, "_communicator", None) or getattr(self._runtime, "_engine", None)
        if data_plane is not None:
            data_plane.close()  # its threads: a socket that another thread still uses must not be closed
        transport = getattr(self._runtime, "_transport", None)
        if transport is not None:
            transport.close()
            transport.release()

    def _answer(self, request_id: bytes, message: wire.Message, payload: Sequence[Any]) -> None:
        self._answers[request_id].put((message, [bytes(frame) for frame in payload]))


class RuntimeHome:
    """Deploys plan after plan on named processes, which live from plan to plan until `kill`."""

    def __init__(self, store_path: Path, compute_device: wire.ComputeDevice = "cpu") -> None:
        self.processes: dict[str, RuntimeProcess] = {}
        self.ranks: list[RuntimeProcess] = []
        self.plan: Plan | None = None
        self.kept: tuple[wire.KeptCache, ...] = ()  # of the plan before
        self.prefixes: wire.KeptPrefixes | None = None  # the same
        self._store_path = store_path
        self._compute_device: wire.ComputeDevice = compute_device
        self._requests = 0

    def deploy(self, plan: Plan, names: Sequence[str], parts: Sequence[wire.ShardParts | wire.SegmentParts]) -> None:
        """Load the plan on these processes, by rank, and connect them."""
        self.plan = plan
        token = plan.epoch.to_bytes(16, "little")
        for name in names:
            if name not in self.processes:
                self.processes[name] = RuntimeProcess(self._store_path, self._compute_device)
        self.ranks = [self.processes[name] for name in names]
        bound = [process.load(plan, rank, parts[rank], token) for rank, process in enumerate(self.ranks)]
        if is_transformer_plan(plan):
            self.kept = kept_caches(plan, [each.caches for each in bound], lambda source, target: 1e9)
            self.prefixes = kept_prefixes(plan, [each.prefixes for each in bound], lambda source, target: 1e9)
        for rank, process in enumerate(self.ranks):
            peers = tuple(
                wire.Peer(rank=other, host=LOOPBACK, port=each.port, public_key=each.public_key, bytes_per_second=1e9)
                for other, each in enumerate(bound)
                if other != rank
            )
            kept = {"caches": self.kept, "prefixes": self.prefixes}
            process.connect(wire.ConnectPeers(holder="test", epoch=plan.epoch, peers=peers, **kept))

    def begin(self, prompt: Sequence[int], max_tokens: int, request_id: bytes, **fields: Any) -> Callable[[], Answer]:
        """Ask rank 0 to generate; the returned function waits for the next message of the answer."""
        request = wire.GenerateTokens(holder="test", epoch=self.plan.epoch, max_tokens=max_tokens, **fields)
        return self.ranks[0].begin(request_id, request, list(pack_array(np.asarray(prompt, np.int32))))

    def generate(
        self, prompt: Sequence[int], max_tokens: int, request_id: bytes, stop_after: int | None = None, **fields: Any
    ) -> tuple[list[int], wire.GenerationEnded | None]:
        """The tokens of an answer, and how it ended. After `stop_after` tokens, it is left alone."""
        answer = self.begin(prompt, max_tokens, request_id, **fields)
        tokens: list[int] = []
        while stop_after is None or len(tokens) < stop_after:
            message, _ = answer()
            if isinstance(message, wire.GenerationEnded):
                return tokens, message
            assert isinstance(message, wire.TokensGenerated)
            tokens += message.token_ids
        return tokens, None

    def ask(self, requests: Sequence[tuple[wire.Message, Sequence[bytes]]]) -> list[Answer]:
        """Send one request to each rank and wait for all answers. Raises the first error."""
        self._requests += 1
        request_id = self._requests.to_bytes(8, "little")
        waits = [
            process.begin(request_id, message, payload)
            for process, (message, payload) in zip(self.ranks, requests, strict=True)
        ]
        answers: list[Answer] = []
        errors: list[HearthError] = []
        for wait in waits:
            try:
                answers.append(wait())
            except HearthError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def kill(self, name: str) -> None:
        """End a process for good."""
        self.processes.pop(name).close()

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)
