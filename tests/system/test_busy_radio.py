"""Ten minutes on a busy radio with stalls of up to two seconds: no device counts as lost, and no answer is wrong."""

from __future__ import annotations

import json
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.models import save_random_model
from support.soak_clients import Load, Request, run_clients, serving_status, wrong_answers
from support.waiting import wait_for

from coordinator.serve.model.lifecycle import HISTORY_LENGTH
from tools.testbed import Testbed, load_scenario
from tools.testbed.cluster import what_is_missing

SECONDS = float(os.environ.get("HEARTH_RADIO_SECONDS", "600"))
CLIENTS = 2
START_SECONDS = 300.0  # for profiles, link measurements and weights over 60 Mbit/s


@pytest.mark.slow
@pytest.mark.namespaces
def test_no_device_is_lost_on_a_busy_radio(tmp_path: Path) -> None:
    """All four devices take part in each step, so each of their stalls is felt."""
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    if reason := what_is_missing():
        pytest.skip(reason)
    scenario = load_scenario("wifi-busy")
    names = [device.name for device in scenario.devices]
    model_dir = save_random_model(tmp_path / "model", decoder(), generates=True)
    rng = random.Random(1)
    pool: list[Request] = [
        {"token_ids": [rng.randrange(3, 4000) for _ in range(rng.randint(4, 40))], "max_tokens": rng.randint(2, 8)}
        for _ in range(12)
    ]
    with Testbed(scenario, tmp_path / "testbed") as testbed:
        for name in names:
            testbed.start_agent(name)
        testbed.start_coordinator(
            str(model_dir), "--strategy", "hmp", "--min-devices", str(len(names)), "--context", "64"
        )
        before = wait_for("serving", partial(serving_status, testbed), START_SECONDS)
        assert len(before["plan"]["devices"]) == len(names)
        alone = run_clients(testbed, Load(requests=pool))
        began = time.monotonic()
        outcomes = run_clients(testbed, Load(requests=pool, clients=CLIENTS, seconds=SECONDS))
        seconds = time.monotonic() - began
        after = json.loads(testbed.hearth("status", "--json"))
    assert len(after["history"]) < HISTORY_LENGTH, "earlier transitions are gone"
    print(
        f"\n{len(outcomes)} answers in {seconds:.0f} s, {after['plan']['epoch'] - before['plan']['epoch']} more plans"
    )
    assert [each.error for each in (*alone, *outcomes) if each.error] == []
    assert after["failed_requests"] == 0
    assert wrong_answers(outcomes, alone) == []
    assert [each["cause"] for each in after["history"] if "lost" in each["cause"] or "silent" in each["cause"]] == []


def decoder() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=256, intermediate_size=688, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2,
        vocab_size=4000, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
