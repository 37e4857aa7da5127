"""`POST /v1/completions`: prompts that no chat template wraps."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from coordinator.http.answer_stream import of_token, parts_of, token_text, while_connected, whole
from coordinator.http.failures import Failure
from coordinator.http.openai import common
from coordinator.http.request import Answer, Call, EventStream, Many, NumTop
from hearth.client.answers import AsyncGeneration, Usage
from hearth.wire.messages import TokenLogProbs


class Completion(common.TextRequest):
    """The body of the request."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **common.TextRequest.neutral, "echo": (False,), "suffix": ("",), "best_of": (1,),
    }  # fmt: skip

    logprobs: NumTop | None = None
    prompt: str | Many[str] | Many[int] | Many[Many[int]]

    def prompts(self) -> list[dict[str, Any]]:
        """The prompts, each as an argument of `generate`. Raises Failure."""
        given = self.prompt
        single = isinstance(given, str) or not given or isinstance(given[0], int)
        prompts = [
            {"prompt": each} if isinstance(each, str) else {"token_ids": list(each)}  # type: ignore[arg-type]
            for each in ([given] if single else given)
        ]
        if len(prompts) * (self.n or 1) > common.MAX_CHOICES:
            raise Failure(400, f"At most {common.MAX_CHOICES} answers can be asked for at once.", param="prompt")
        return prompts


async def completion(call: Call) -> Answer:
    """Continue prompts, as a whole or as a stream of chunks."""
    asked = Completion.read(call.body)
    prompts, shows_usage, num_choices = asked.prompts(), asked.shows_usage, asked.n or 1
    served = await call.ready(asked.model)
    asked_for = {
        "logprobs": asked.logprobs is not None,
        "top_logprobs": asked.logprobs or 0,
        "model": served.deployment,
    }
    generations = [
        asked.generate(served.home, asked.max_tokens, number, **asked_for, **prompt)
        for prompt in prompts
        for number in range(num_choices)
    ]
    head = {"id": common.new_id("cmpl"), "object": "text_completion", "created": common.now(), "model": served.model}
    if asked.stream:
        return EventStream(
            "text/event-stream", _chunks(head, generations, num_choices, shows_usage), common.failed_event
        )
    return await while_connected(call.receive, _whole(head, generations, num_choices))


async def _whole(head: dict[str, Any], generations: Sequence[AsyncGeneration], num_choices: int) -> dict[str, Any]:
    texts, usages = await whole(generations)
    of_answers = enumerate(zip(texts, usages, generations, strict=True))
    choices = [
        {"index": index, "text": text, "logprobs": _shown(each.log_probs, 0), "finish_reason": usage.finish_reason}
        for index, (text, usage, each) in of_answers
    ]
    return {**head, "choices": choices, "usage": common.usage_fields(usages, num_choices)}


def _shown(log_probs: Sequence[TokenLogProbs], offset: int) -> dict[str, Any] | None:
    """In the form of this path, from this character of the answer on."""
    if not log_probs:
        return None
    texts = [token_text(each.chosen) for each in log_probs]
    return {
        "tokens": texts,
        "token_logprobs": [each.chosen.value for each in log_probs],
        "top_logprobs": [{token_text(top): top.value for top in each.top} for each in log_probs],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
    }


async def _chunks(
    head: dict[str, Any], generations: Sequence[AsyncGeneration], num_choices: int, shows_usage: bool
) -> AsyncGenerator[bytes, None]:
    ends: dict[int, Usage] = {}
    num_characters = [0 for _ in generations]

    def chunk(index: int, text: str, reason: str | None = None, log_probs: Sequence[TokenLogProbs] = ()) -> bytes:
        shown = _shown(log_probs, num_characters[index])
        num_characters[index] += sum(len(token_text(each.chosen)) for each in log_probs)
        choice = {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}
        return common.event({**head, "choices": [choice], **({"usage": None} if shows_usage else {})})

    async for part in parts_of(generations):
        if part is None:
            yield common.SIGN_OF_LIFE
            continue
        if part.token is not None and (part.token.text or part.token.log_probs is not None):
            yield chunk(part.number, part.token.text, log_probs=of_token(part.token))
        if part.usage is not None:
            ends[part.number] = part.usage
            yield chunk(part.number, "", part.usage.finish_reason)
    if shows_usage:
        yield common.event(
            {**head, "choices": [], "usage": common.usage_fields([ends[index] for index in sorted(ends)], num_choices)}
        )
    yield common.DONE
