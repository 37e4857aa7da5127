"""Every strategy that a plan may name has a pricing class and execution code."""

from __future__ import annotations

from typing import get_args

import pytest

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from agent.worker.transformer import strategies as running
from coordinator.plan.transformer.strategies import STRATEGIES
from hearth.plan.transformer import Strategy


def test_every_plan_strategy_can_be_priced_and_run() -> None:
    assert set(STRATEGIES) == set(running.STRATEGIES) == set(get_args(Strategy))
    assert all(name == strategy.name for name, strategy in STRATEGIES.items())
