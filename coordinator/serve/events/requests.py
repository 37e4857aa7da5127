"""Records how each request to a model has ended: wraps its handler and reads its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
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


async def recorded(
    message: wire.ModelRequest,
    controller: Controller,
    app: str,
    answer: Awaitable[Response],
    record: Callable[[wire.Event], None],
) -> Response:
    """Await the answer to a request of this app (empty: an administrator), and record how the request ends."""
    operation = _OPERATIONS.get(type(message))
    if operation is None:  # it runs no model
        return await answer
    ending = _Ending(message, operation, controller, app, record)
    try:
        response = await answer
    except HearthError as error:
        ending.failed(error)
        raise
    except asyncio.CancelledError:
        ending.cancelled()
        raise
    if isinstance(response, AsyncGenerator):
        return ending.watch(response)
    ending.served(response.message if isinstance(response, Reply) else response)
    return response


class _Ending:
    """One request, up to its one event."""

    def __init__(
        self,
        message: wire.ModelRequest,
        operation: wire.Operation,
        controller: Controller,
        app: str,
        record: Callable[[wire.Event], None],
    ) -> None:
        self._message = message
        self._operation = operation
        self._controller = controller
        self._app = app
        self._record = record
        self._began = loop_time()

    async def watch(self, answers: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Pass a stream on, up to its end."""
        async with aclosing(answers):
            end: wire.TextEnded | None = None
            try:
                async for answer in answers:
                    if isinstance(answer, wire.TextEnded):
                        end = answer
                    yield answer
            except HearthError as error:
                self.failed(error)
                raise
            except (GeneratorExit, asyncio.CancelledError):
                if end is not None:
                    self.served(end)
                else:
                    self.cancelled()
                raise
            if end is not None:
                self.served(end)

    def served(self, answer: wire.Message) -> None:
        """The last message of the answer has come."""
        seconds = loop_time() - self._began
        match answer:
            case wire.TextEnded():
                earlier = len(self._message.generated) if isinstance(self._message, wire.Generate) else 0
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
            case _:
                self._end("served")

    def cancelled(self) -> None:
        """The client has gone, or has cancelled the request."""
        self._end("cancelled")

    def failed(self, error: HearthError) -> None:
        """The client gets this error."""
        self._end(
            "refused" if error.scope == "request" else "failed",
            error=error.code, message=error.explanation(), advice=error.next_step(),
        )  # fmt: skip

    def _end(self, outcome: wire.RequestOutcome, **facts: Any) -> None:
        controller = self._controller
        used = controller.plan if outcome != "refused" else None
        self._record(
            wire.RequestEnded(
                request_id=self._message.request_id,
                app=self._app,
                deployment=controller.name,
                model=PurePath(controller.goal.path).name[-256:],
                operation=self._operation,
                outcome=outcome,
                devices=tuple(device.name for device in used.devices) if used is not None else (),
                seconds=loop_time() - self._began,
                **facts,
            )
        )


def _rate(num_tokens: int, seconds: float) -> float | None:
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None
