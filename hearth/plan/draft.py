"""The draft model of a decoder's plan: a small decoder that the first rank runs alone, to guess tokens. Pure."""

from __future__ import annotations

from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import Prediction
from hearth.plan.plan import Plan, TransformerPlan
from hearth.plan.transformer import GenerationLimits, TensorParallel

DRAFT_RANK = 0  # it schedules the steps, so guesses need no message


def draft_body(draft: ModelSpec, limits: GenerationLimits) -> TensorParallel:
    """The whole draft model on one device, with room for the tokens of the plan's sequences."""
    return TensorParallel(
        strategy="local",
        seq_len=limits.prefill_rows,
        heads=(draft.num_heads,),
        columns=(draft.ffn_size,),
        row_weights=(1.0,),
        vocabulary=(draft.vocab_size,),
        generation=limits.model_copy(update={"draft": None, "kv_copies": False}),
    )


def draft_plan(plan: TransformerPlan) -> TransformerPlan | None:
    """The plan of the draft model, for its one device; None if the plan has no draft model."""
    limits = plan.body.generation
    if limits is None or limits.draft is None:
        return None
    nothing = Prediction(latency_seconds=0, compute_seconds=0, transfer_seconds=0, bottleneck_seconds=0)
    return Plan(
        epoch=plan.epoch,
        model=limits.draft,
        planner="draft",
        devices=(plan.devices[DRAFT_RANK],),
        predicted=nothing,
        body=draft_body(limits.draft, limits),
    )
