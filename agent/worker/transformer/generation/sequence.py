"""The state of one request to a generation, on rank 0. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.worker.transformer.generation.block_pool import PrefixKey, prefix_keys
from agent.worker.transformer.generation.drafting import Drafter
from hearth.plan.transformer import KV_BLOCK_TOKENS
from hearth.wire.messages import GenerateTokens, TokenLogProbs


@dataclass(eq=False)
class SequenceState:
    """One request. `pending` are the tokens that are not in the KV cache yet: of the prompt, later the newest one.

    `cache` is the number of its KV cache on the ranks, a new one whenever it is computed from the start; 0: it has none.
    """

    number: int
    request: GenerateTokens
    pending: list[int]
    num_prompt_tokens: int
    generated: list[int] = field(default_factory=list)
    log_probs: list[TokenLogProbs] = field(default_factory=list)  # of the generated tokens, if they are asked for
    num_kept_rows: int = 0  # rows that were not computed, when it started first
    cache: int = 0
    blocks: list[int] = field(default_factory=list)  # of the KV cache
    keys: list[PrefixKey] = field(default_factory=list)  # of its tokens' full blocks, as far as needed
    num_published: int = 0  # of its blocks, which others may share if they are full
    drafter: Drafter | None = None  # None: no tokens are drafted
    drafts: tuple[int, ...] = ()  # in the step in flight
    num_rejected: int = 0  # newest rows of its KV cache that are no longer its own
    num_drafted: int = 0  # in all steps
    num_accepted: int = 0
    last_order: int = 0  # number of the last order that contained it
    prompt: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = list(self.pending)

    @property
    def capacity(self) -> int:
        """Maximum tokens in its KV cache; the last generated token is never fed to the model."""
        return self.num_prompt_tokens + self.request.max_tokens - 1

    @property
    def prefilled(self) -> bool:
        return bool(self.generated) and self.cache > 0 and len(self.pending) <= 1

    @property
    def ended(self) -> bool:
        if not self.generated:
            return False
        return self.generated[-1] in self.request.stop_ids or len(self.generated) >= self.request.max_tokens

    @property
    def num_computed_rows(self) -> int:
        """Rows of its KV cache that have been ordered."""
        return len(self.prompt) + len(self.generated) - len(self.pending)

    def prefix_keys(self) -> list[PrefixKey]:
        """The keys of all full blocks of its tokens."""
        tokens = [*self.prompt, *self.generated][len(self.keys) * KV_BLOCK_TOKENS :]
        self.keys += prefix_keys(self.request.prefix_scope, tokens, self.keys[-1] if self.keys else None)
        return self.keys

    def is_continued_by(self, request: GenerateTokens, prompt: list[int]) -> bool:
        """Whether `request` asks for the rest of this answer, with all or some of its tokens so far in the prompt."""
        own, count = self.request, len(prompt) - len(self.prompt)
        return (
            own.stream == request.stream != ""
            and 0 <= count <= len(self.generated) - self.ended
            and (request.first_index, request.max_tokens) == (own.first_index + count, own.max_tokens - count)
            and (request.sampling, request.stop_ids) == (own.sampling, own.stop_ids)
            and (request.grammar, request.top_log_probs) == (own.grammar, own.top_log_probs)
            and prompt == [*self.prompt, *self.generated[:count]]
        )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal tokens at the beginning."""
    return next((n for n, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), min(len(a), len(b)))
