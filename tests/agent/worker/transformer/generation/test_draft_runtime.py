"""Worker runtimes load a plan's draft model on rank 0, keep it over a change of plan, and go on without it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_generation

from agent.daemon.store import ShardStore
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.families import read_spec
from hearth.plan.plan import DRAFT_RANK, draft_plan
from hearth.plan.transformer import GenerationLimits
from hearth.wire.messages import Sampling, ShardParts

pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.engines import store_chunks
from support.runtimes import RuntimeHome

PROMPT = np.random.default_rng(3).integers(3, 2000, 50).tolist()
SAMPLED = Sampling(temperature=0.9, top_k=40, seed=5)


def test_draft_model_follows_the_first_rank_and_may_be_missing(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", small_decoder("llama"), generates=True)
    spec, store = read_spec(model_dir), ShardStore(tmp_path / "store", 1 << 40, "all devices")
    chunks = tuple(store_chunks(model_dir, spec, store))

    def deploy(epoch: int, names: Sequence[str], has_draft: bool = True) -> None:
        draft = spec if has_draft else None  # the model itself, whose guesses are right
        limits = GenerationLimits(kv_tokens=512, max_sequences=16, prefill_rows=64, draft=draft)
        plan = with_generation(make_plan(spec, "hmp", (1,) * len(names), epoch=epoch), limits)
        alone = draft_plan(plan)
        parts = [
            ShardParts(
                chunks=chunks_for_rank(chunks, plan, rank),
                draft_chunks=chunks_for_rank(chunks, alone, 0) if alone is not None and rank == DRAFT_RANK else (),
            )
            for rank in range(plan.num_ranks)
        ]
        home.deploy(plan, names, parts)

    def generate(name: str, max_drafted: int) -> tuple[list[int], Any]:
        return home.generate(PROMPT, 60, name.encode(), sampling=SAMPLED, max_drafted=max_drafted)

    with closing(RuntimeHome(store.path)) as home:
        deploy(1, ("kitchen", "attic"))
        expected, _ = generate("none", 0)
        for number, names in ((2, ("kitchen", "attic")), (3, ("attic", "kitchen")), (4, ("kitchen",))):
            if number == 4:
                home.kill("attic")  # it had the draft model
            deploy(number, names)
            loaded = [process._runtime._draft for process in home.ranks]  # type: ignore[union-attr]
            assert [shard is not None for shard in loaded] == [rank == DRAFT_RANK for rank in range(len(names))]
            found, end = generate(f"plan {number}", 8)
            assert found == expected
            assert end.num_drafted == end.num_accepted > 0
        deploy(5, ("kitchen",), has_draft=False)
        assert home.ranks[0]._runtime._draft is None  # type: ignore[union-attr]
        assert generate("without", 8)[0] == expected
