"""The price of prompts that are longer than a step: every step attends to the rows of the steps before it."""

from __future__ import annotations

import pytest
from support.plans import LLAMA_1B, cluster, device_profile

from coordinator.plan.transformer.choose import plan_strategy
from coordinator.plan.transformer.cost.layout import PlanLayout, attention_ratio
from coordinator.plan.transformer.cost.predict import prompt_seconds
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest
from coordinator.plan.transformer.strategies import strategy_of_body
from hearth.plan.geometry import Span

STEP_ROWS = 256
SPEC = LLAMA_1B.model_copy(update={"num_layers": 12})


def request(num_devices: int) -> PlanRequest:
    devices = [device_profile(index, 1.0, SPEC, STEP_ROWS) for index in range(num_devices)]
    generation = GenerationRequest(2048, 1, prompt_tokens=4 * STEP_ROWS)
    return PlanRequest(SPEC, cluster(devices, 500), STEP_ROWS, generation=generation)


@pytest.mark.parametrize(
    ("window", "rows", "ratio"),
    [
        (None, Span(0, 8), 1), (None, Span(4, 8), 0.75), (None, Span(8, 16), 3),
        (8, Span(8, 16), 2), (4, Span(0, 8), 1), (4, Span(8, 12), 2 / 3),
    ],
)  # fmt: skip
def test_attention_is_priced_by_the_rows_that_are_seen(window: int | None, rows: Span, ratio: float) -> None:
    spec = SPEC.model_copy(update={"sliding_window": window})
    assert attention_ratio(spec, rows, 8) == pytest.approx(ratio)


@pytest.mark.parametrize(("strategy", "micro_batches"), [("local", 1), ("hmp", 1), ("hmp", 2), ("pipeline", 1)])
def test_long_prompts_are_priced_step_by_step(strategy: str, micro_batches: int) -> None:
    asked = request(1 if strategy == "local" else 2)
    plan = plan_strategy(asked, strategy)
    body = plan.body.model_copy(update={"micro_batches": micro_batches} if micro_batches > 1 else {})
    layout = PlanLayout(SPEC, body, asked.cluster, asked.wire)
    starts = range(0, 4 * STEP_ROWS, STEP_ROWS)
    steps = [strategy_of_body(body).timing(layout, first_row)[0] for first_row in starts]
    assert steps == sorted(steps)
    assert steps[-1] > 1.05 * steps[0]
    assert prompt_seconds(layout, steps[0]) == pytest.approx(sum(steps), rel=0.02)
    if micro_batches == 1:
        assert plan.predicted.prompt_seconds == prompt_seconds(layout, steps[0])
