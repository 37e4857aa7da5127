"""Log-probabilities of tokens, as OpenAI's chats and Ollama's API show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from hearth.client.answers import Token
from hearth.wire.messages import LogProb, TokenLogProbs

NumTop: TypeAlias = Annotated[int, Field(ge=0, le=20)]


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
