"""Execution of an encoder's steps on one rank of a plan. Independent of sockets and processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent.worker.tracing import Recorder
from agent.worker.transformer import blocks, strategies
from agent.worker.transformer.comm.collectives import Collectives
from agent.worker.transformer.comm.communicator import Communicator, link_formats
from agent.worker.transformer.comm.staging import Staging
from agent.worker.transformer.shard import Shard
from agent.worker.transformer.strategies.step import Step
from hearth.errors import BadRequest
from hearth.plan.geometry import rows_per_rank, spans
from hearth.plan.plan import TransformerPlan
from hearth.wire.messages import Run, RunDone


@dataclass(frozen=True)
class EncoderEngine:
    """Runs one step at a time. The caller owns `communicator` and has started it."""

    plan: TransformerPlan
    rank: int
    shard: Shard
    communicator: Communicator
    staging: Staging
    collectives: type[Collectives] = Collectives

    def run(
        self, request: Run, token_ids: np.ndarray[Any, Any], cumulative_lengths: np.ndarray[Any, Any]
    ) -> tuple[RunDone, np.ndarray[Any, Any]]:
        """Run one step; see `Run` and `RunDone` for the payloads.

        Raises BadRequest for invalid token ids or lengths, StepFailed if a tile of a peer does not arrive in time.
        """
        began = time.monotonic()
        recorder = Recorder(request.trace)
        formats = link_formats(self.plan, self.rank, request.values)
        self.communicator.begin_step(request.step, request.timeout_seconds, recorder, formats)
        rows = self._pack(token_ids, cumulative_lengths)
        tiles = spans(rows_per_rank(self.plan.body.row_weights, rows.num_rows))
        collectives = self.collectives(self.communicator, self.staging, tiles, self.plan.body.overlap)
        step = Step(self.shard, self.plan, self.rank, rows, collectives, recorder)
        hidden_sH = strategies.run(step)
        own = tiles[self.rank]
        output = hidden_sH if request.output == "hidden" else _sum_per_sequence(hidden_sH, rows.sequences, own.start)
        array = output.cpu().numpy()  # waits for the GPU
        self.communicator.finish_sends()
        ended = time.monotonic()
        done = RunDone(
            names=(request.output,),
            began_seconds=began,
            ended_seconds=ended,
            compute_seconds=(max(ended - began - self.communicator.waited_seconds, 0.0),),
            wire=self.communicator.wire_stats(),
            dropped_messages=self.communicator.dropped,
            trace=recorder.events(),
        )
        return done, array

    def _pack(self, token_ids: np.ndarray[Any, Any], cumulative_lengths: np.ndarray[Any, Any]) -> blocks.PackedRows:
        spec = self.plan.model
        lengths = np.diff(cumulative_lengths) if cumulative_lengths.ndim == 1 else np.empty(0)
        if (
            token_ids.ndim != 1
            or len(lengths) == 0
            or cumulative_lengths[0] != 0
            or cumulative_lengths[-1] != len(token_ids)
            or lengths.min() < 1
        ):
            raise BadRequest(reason="the sequence lengths do not add up to the tokens, or a sequence is empty")
        if lengths.max() > spec.max_positions:
            raise BadRequest(reason=f"{lengths.max()} tokens; the model takes at most {spec.max_positions}")
        if token_ids.min() < 0 or token_ids.max() >= spec.vocab_size:
            raise BadRequest(reason=f"token ids must lie between 0 and {spec.vocab_size - 1}")
        sequences = spans(lengths.tolist())
        ids = torch.from_numpy(token_ids.astype(np.int64))
        return blocks.pack_rows(spec, ids, sequences, [None] * len(sequences), self.staging.device)


def _sum_per_sequence(hidden_sH: Tensor, sequences: Sequence[tuple[int, int]], first_row: int) -> Tensor:
    """Sums of this rank's rows of each sequence [N,H]. The coordinator adds the ranks' sums and divides by the lengths."""
    sums_NH = hidden_sH.new_zeros(len(sequences), hidden_sH.shape[1])
    last_row = first_row + hidden_sH.shape[0]
    for n, (start, stop) in enumerate(sequences):
        start, stop = max(start, first_row), min(stop, last_row)
        if start < stop:
            sums_NH[n] = hidden_sH[start - first_row : stop - first_row].sum(dim=0)
    return sums_NH
