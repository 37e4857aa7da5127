"""Answers as they arrive, with a sign of life while nothing does, and the log-probabilities of their tokens as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect

from hearth.client.answers import AsyncGeneration, Token, Usage
from hearth.platform.asyncio_tools import cancel_all
from hearth.wire.messages import LogProb, TokenLogProbs

SILENCE_SECONDS = 5.0  # after which a stream gets a sign of life: clients give up on silent ones after 30 s or more

_T = TypeVar("_T")
Receive = Callable[[], Awaitable[Any]]


class Part(NamedTuple):
    """A token of the answer with this number, or its end with the usage."""

    number: int
    token: Token | None
    usage: Usage | None = None


async def parts_of(
    generations: Sequence[AsyncGeneration], silence_seconds: float = SILENCE_SECONDS
) -> AsyncGenerator[Part | None, None]:
    """The parts of several answers in the order of arrival; None when nothing has arrived for a while.

    Closing it cancels all answers. Raises what they raise.
    """
    waiting: dict[asyncio.Future[Token], int] = {}
    try:
        for number, generation in enumerate(generations):
            waiting[asyncio.ensure_future(anext(generation))] = number
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=silence_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for future in done:
                number = waiting.pop(future)
                try:
                    token = future.result()
                except StopAsyncIteration:
                    yield Part(number, None, generations[number].usage)
                    continue
                waiting[asyncio.ensure_future(anext(generations[number]))] = number
                yield Part(number, token)
    finally:
        await cancel_all(list(waiting))
        for generation in generations:
            await generation.aclose()


async def whole(generations: Sequence[AsyncGeneration]) -> tuple[list[str], list[Usage]]:
    """The texts and usages of all answers, once they have ended."""
    texts = ["" for _ in generations]
    usages: dict[int, Usage] = {}
    async for part in parts_of(generations):
        if part is not None and part.token is not None:
            texts[part.number] += part.token.text
        elif part is not None and part.usage is not None:
            usages[part.number] = part.usage
    return texts, [usages[index] for index in range(len(texts))]


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled if the client goes away. Raises ClientDisconnect then.

    `receive`: of a request whose body has been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await cancel_all([working, watching])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- log-probabilities of tokens, as OpenAI's chats and Ollama's API show them ---------------------------------------------


def entries(log_probs: Sequence[TokenLogProbs]) -> list[dict[str, Any]]:
    """One object per token, with those of the most likely tokens in its place."""
    return [{**_entry(each.chosen), "top_logprobs": [_entry(top) for top in each.top]} for each in log_probs]


def of_token(token: Token) -> list[TokenLogProbs]:
    """The log-probabilities of a part of an answer; empty if it has none."""
    return [] if token.log_probs is None else [token.log_probs]


def token_text(log_prob: LogProb) -> str:
    """The text of a token; bytes that are no text by themselves become the replacement character."""
    return log_prob.piece.decode(errors="replace")


def _entry(log_prob: LogProb) -> dict[str, Any]:
    return {"token": token_text(log_prob), "logprob": log_prob.value, "bytes": list(log_prob.piece)}
