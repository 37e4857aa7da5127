"""Records how each request to a model has ended: wraps its handler and reads its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from coordinator.serve.model.controller import Controller
from hearth.errors import HearthError
from hearth.platform.asyncio_tools import loop_time
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply, Response

_OPERATIONS: Mapping[type[wire.Message], wire.Operation] = {
    wire.Generate: "generate", wire.Embed: "embed", wire.GetHiddenStates: "hidden_states", wire.Infer: "infer",
}  # fmt: skip


@dataclass
class RequestRecorder:
    """Records how one request to a deployment ends, in one event."""

    message: wire.ModelRequest
    app: str  # that sent it; empty: an administrator
    controller: Controller  # of the deployment; its plan answers, or has answered last
    record: Callable[[wire.Event], None]
    began: float = field(default_factory=loop_time)

    async def watch(self, answer: Awaitable[Response]) -> Response:
        """Await the answer, and record its end. A request that runs no model has no event."""
        if type(self.message) not in _OPERATIONS:
            return await answer
        try:
            response = await answer
        except HearthError as error:
            self._failed(error)
            raise
        except asyncio.CancelledError:  # the client has gone, or has cancelled the request
            self._end("cancelled")
            raise
        if isinstance(response, AsyncGenerator):
            return self._watch_stream(response)
        self._served(response.message if isinstance(response, Reply) else response)
        return response

    async def _watch_stream(self, answers: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Pass a stream on, up to its end."""
        async with aclosing(answers):
            end: wire.TextEnded | None = None
            try:
                async for answer in answers:
                    if isinstance(answer, wire.TextEnded):
                        end = answer
                    yield answer
            except HearthError as error:
                self._failed(error)
                raise
            except (GeneratorExit, asyncio.CancelledError):
                if end is not None:
                    self._served(end)
                else:
                    self._end("cancelled")
                raise
            if end is not None:
                self._served(end)

    def _served(self, answer: wire.Message) -> None:
        """The last message of the answer has come."""
        seconds = loop_time() - self.began
        match answer:
            case wire.TextEnded():
                earlier = len(self.message.generated) if isinstance(self.message, wire.Generate) else 0
                self._end(
                    "served",
                    queued_seconds=answer.queued_seconds,
                    first_token_seconds=answer.first_token_seconds,
                    decode_seconds=answer.decode_seconds,
                    num_prompt_tokens=answer.num_prompt_tokens,
                    num_cached_tokens=answer.num_cached_tokens,
                    num_tokens=max(answer.num_tokens - earlier, 0),
                    tokens_per_second=_rate(answer.num_tokens - earlier - 1, answer.decode_seconds),
                    finish_reason=answer.reason,
                )
            case wire.Vectors():
                self._end(
                    "served",
                    queued_seconds=max(seconds - answer.latency_seconds, 0.0),
                    num_prompt_tokens=answer.num_tokens,
                    tokens_per_second=_rate(answer.num_tokens, answer.latency_seconds),
                )
            case wire.Inferred():
                self._end("served", queued_seconds=max(seconds - answer.latency_seconds, 0.0))

    def _failed(self, error: HearthError) -> None:
        """The client gets this error."""
        self._end(
            "refused" if error.scope == "request" else "failed",
            error=error.code, message=error.explanation(), advice=error.next_step(),
        )  # fmt: skip

    def _end(self, outcome: wire.RequestOutcome, **facts: Any) -> None:
        used = self.controller.plan if outcome != "refused" else None
        self.record(
            wire.RequestEnded(
                request_id=self.message.request_id,
                app=self.app,
                deployment=self.controller.name,
                model=PurePath(self.controller.goal.path).name[-256:],
                operation=_OPERATIONS[type(self.message)],
                outcome=outcome,
                devices=tuple(device.name for device in used.devices) if used is not None else (),
                seconds=loop_time() - self.began,
                **facts,
            )
        )


def _rate(num_tokens: int, seconds: float) -> float | None:
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None
