"""Compares tokens and logits of generation with `transformers`, at each family's real widths with fewer layers.

All ranks of a plan run in this process over the in-memory transport, on chunks of a checkpoint with random weights,
biases and norm gains. Everything is float32. The reference is the library's greedy `generate` on one prompt at a time;
Hearth runs all prompts of a case as one batch.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from agent.worker.transformer.comm.communicator import Communicator, link_codecs
from agent.worker.transformer.comm.staging import CpuStaging
from agent.worker.transformer.generation.leader import Leader
from agent.worker.transformer.generation.steps import Generation
from agent.worker.transformer.matrices import Matrix
from agent.worker.transformer.shard import load_shard
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from hearth.errors import HearthError, InternalError
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits as Promise
from hearth.plan.transformer import LayerMode
from hearth.wire.framing import pack_array
from hearth.wire.messages import Failed, GenerateTokens, Sampling, TokensGenerated
from tools.bench.cases import NEW_TOKENS, PROMPT_TOKENS, Case, ExactnessRow, Family
from tools.bench.drive import StoredModel
from tools.bench.shapes import save_random_model
from tools.bench.shares import shared_plan
from tools.testbed.memory import MemoryHub

_TOKEN = bytes(range(16))
_CHUNK_ROWS = 96  # of a prefill step in chunked cases: splits two of the four prompts, one of them into six chunks
_R = LayerMode(qkv="replicated", out="replicated", mlp="replicated")


@dataclass(frozen=True)
class Expected:
    """The reference answer to one prompt: tokens, and the logits they were chosen from."""

    prompt: list[int]
    tokens: list[int]
    logits: Tensor  # [T,V]


class ExactnessBench:
    """Runs the cases of one family at a time. `folder` holds its checkpoint and chunks while it runs."""

    def __init__(self, folder: Path, report: Callable[[str], None], num_tokens: int = NEW_TOKENS) -> None:
        self._folder, self._report, self._num_tokens = folder, report, num_tokens

    def measure(self, name: str, family: Family, cases: Sequence[Case]) -> Iterator[ExactnessRow]:
        """Yield a row for each case that needs no more layers than the family has."""
        self._report(f"{name}: making the model")
        layers = {"n_layer" if family.config["model_type"] == "gpt2" else "num_hidden_layers": family.num_layers}
        config = {**family.config, **layers, "bos_token_id": None, "eos_token_id": None}
        model = StoredModel(save_random_model(self._folder / name, config), self._folder / f"{name}-store")
        self._report(f"{name}: transformers")
        expected = self._expected(model)
        for case in cases:
            if case.strategy == "pipeline" and len(case.split) > family.num_layers:
                continue
            self._report(f"{name}: {case}")
            yield self._row(name, family, case, model, expected)
            gc.collect()

    def _expected(self, model: StoredModel) -> list[Expected]:
        from transformers import AutoModelForCausalLM

        reference: Any = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).eval()
        chance = np.random.default_rng(20240229)
        found = []
        for length in PROMPT_TOKENS:
            prompt: list[int] = chance.integers(3, model.spec.vocab_size, length).tolist()
            with torch.inference_mode():
                answer = reference.generate(
                    torch.tensor([prompt]), attention_mask=torch.ones(1, length, dtype=torch.int64), do_sample=False,
                    max_new_tokens=self._num_tokens, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
                )  # fmt: skip
            tokens = answer.sequences[0, length:].tolist()
            found.append(Expected(prompt, tokens, torch.cat(answer.logits).float()))
        return found

    def _row(
        self, name: str, family: Family, case: Case, model: StoredModel, expected: Sequence[Expected]
    ) -> ExactnessRow:
        began = time.perf_counter()
        equal, largest, where = 0, 0.0, ""
        with ranks(plan_of(model.spec, case, self._num_tokens), model) as cluster:
            found = cluster.answers([each.prompt for each in expected], self._num_tokens)
        for each, (tokens, logits_TV) in zip(expected, found, strict=True):
            same = next((i for i, pair in enumerate(zip(tokens, each.tokens, strict=True)) if pair[0] != pair[1]), None)
            upto = (
                len(tokens) if same is None else same + 1
            )  # answers cannot be compared after the first different token
            equal += len(tokens) if same is None else same
            largest = max(largest, float((logits_TV[:upto] - each.logits[:upto]).abs().max()))
            if same is not None and not where:
                best = each.logits[same].topk(2).values
                where = (
                    f"prompt {len(each.prompt)}, token {same}: the best two are {float(best[0] - best[1]):.1e} apart"
                )
        return ExactnessRow(
            family=name,
            what=family.what,
            num_layers=family.num_layers,
            case=str(case),
            devices=len(case.split),
            tokens=sum(len(each.tokens) for each in expected),
            equal_tokens=equal,
            largest_difference=largest,
            largest_logit=max(float(each.logits.abs().max()) for each in expected),
            different_at=where,
            seconds=time.perf_counter() - began,
        )


def plan_of(spec: ModelSpec, case: Case, num_tokens: int) -> TransformerPlan:
    """The case's plan with room for the whole batch. The number of rows per step decides whether prefill is chunked."""
    longest = max(PROMPT_TOKENS) + num_tokens
    rows = _CHUNK_ROWS if case.chunked else sum(PROMPT_TOKENS)
    promise = Promise(
        kv_tokens=longest * len(PROMPT_TOKENS), max_sequences=len(PROMPT_TOKENS), prefill_rows=rows,
        context=longest if case.chunked or case.strategy != "sp" else min(longest, rows),
    )  # fmt: skip
    modes = [_R] * spec.num_layers if case.replicated else []
    return shared_plan(spec, case.strategy, case.split, promise, modes=modes)


# ---- a plan's ranks in one process ----------------------------------------------------------------------------------


class _Recorded:
    """An output head that records its logits, one row per chosen token."""

    def __init__(self, head: Matrix) -> None:
        self._head = head
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def times(self, x_sk: Tensor, bias_n: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y_sn = self._head.times(x_sk, bias_n, out)
        self.logits.extend(y_sn.clone())
        return y_sn


class Ranks:
    """Runs rank 0 in the caller's thread and every other rank in its own thread."""

    def __init__(self, plan: TransformerPlan, model: StoredModel, stack: ExitStack) -> None:
        hub = MemoryHub(plan.num_ranks)
        stack.callback(hub.close)
        self._heads: list[_Recorded] = []
        generations: list[Generation] = []
        staging = CpuStaging()
        for rank in range(plan.num_ranks):
            chunks = chunks_for_rank(model.refs, plan, rank)
            shard = load_shard(plan, rank, chunks, lambda name: model.store_dir / name[:2] / name, staging.device)
            if shard.embedding.head is not None and shard.embedding.vocabulary.size:
                recorded = _Recorded(shard.embedding.head)
                self._heads.append(recorded)
                shard.embedding.head = cast(Matrix, recorded)
            codecs = link_codecs(plan, rank, {peer: 1e9 for peer in range(plan.num_ranks) if peer != rank})
            communicator = Communicator(hub.transport(rank), plan.epoch, _TOKEN, codecs)
            communicator.start()
            stack.callback(communicator.close)
            generations.append(Generation(plan, rank, shard, communicator, staging))
        self._leader = Leader(plan, generations[0])
        for generation in generations[1:]:
            threading.Thread(target=_follow, args=(generation,), daemon=True).start()

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[list[int], Tensor]]:
        """Greedy tokens of each prompt, and the logits [T,V], concatenated over the owners of the vocabulary."""
        tokens: dict[bytes, list[int]] = {}
        at: dict[bytes, list[int]] = {}  # indices of the recorded rows from which tokens were chosen
        for index, prompt in enumerate(prompts):
            name = index.to_bytes(8, "little")
            tokens[name], at[name] = [], []
            request = GenerateTokens(holder="bench", epoch=1, max_tokens=num_tokens, sampling=Sampling())
            payload = [bytes(frame) for frame in pack_array(np.asarray(prompt, dtype=np.int32))]
            self._leader.submit(name, request, payload)
        chosen = 0
        while not self._leader.idle:
            for name, message in self._leader.step():
                if isinstance(message, Failed):
                    raise message.error()
                if isinstance(message, TokensGenerated):
                    tokens[name] += message.token_ids
                    at[name].append(chosen)
                    chosen += 1
        if any(len(head.logits) != chosen for head in self._heads):
            raise InternalError(
                where="the bench", reason="the number of recorded logit rows differs from the number of chosen tokens"
            )
        return [
            (tokens[name], torch.stack([torch.cat([head.logits[row] for head in self._heads]) for row in at[name]]))
            for name in tokens
        ]


@contextmanager
def ranks(plan: TransformerPlan, model: StoredModel) -> Iterator[Ranks]:
    """Start the ranks; with several, torch uses one thread per rank, as on single-core devices."""
    threads = torch.get_num_threads()
    if plan.num_ranks > 1:
        torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            yield Ranks(plan, model, stack)
    finally:
        torch.set_num_threads(threads)


def _follow(generation: Generation) -> None:
    try:
        while True:
            generation.follow()
    except HearthError:
        return
