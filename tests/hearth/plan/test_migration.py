"""Plans written by version 1 of the format: `plans_v1.json` was made by the last commit that wrote it (ab74c37)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hearth.errors import BadPlan
from hearth.plan.plan import GraphPlan, TransformerPlan, plan_from_json

PLANS_V1: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "plans_v1.json").read_text())
_OF_TENSOR_PARALLELISM = {
    "strategy",
    "heads",
    "columns",
    "row_weights",
    "vocabulary",
    "modes",
    "overlap",
    "micro_batches",
}
_OF_PIPELINES = {"heads", "columns", "row_weights", "vocabulary", "layers", "chunk_rows"}


@pytest.mark.parametrize("name", PLANS_V1)
def test_v1_plan_keeps_its_content(name: str) -> None:
    old = PLANS_V1[name]
    plan = plan_from_json(json.dumps(old))
    new = plan.model_dump(mode="json")
    assert new["version"] == 2
    for field in ("epoch", "planner", "wire", "alternatives"):
        assert new[field] == old[field]
    assert new["devices"] == [device | {"memory": device["memory"] | {"draft": 0}} for device in old["devices"]]
    assert plan_from_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize("name", [name for name in PLANS_V1 if not name.startswith("graph")])
def test_v1_transformer_plan_keeps_its_shares(name: str) -> None:
    old = PLANS_V1[name]
    new = plan_from_json(json.dumps(old), TransformerPlan).model_dump(mode="json")
    body = new["body"]
    staged = old["body"]["strategy"] == "pipeline"
    assert body["kind"] == ("pipeline" if staged else "tensor-parallel")
    for field in _OF_PIPELINES if staged else _OF_TENSOR_PARALLELISM:
        assert body[field] == old["body"][field]
    assert body["exact_links"] == old["body"]["exact_links"]
    assert (new["model"], body["seq_len"]) == ({**old["model"], "kv_cache": "float32"}, old["seq_len"])
    limits = dict(old["generation"]) if old["generation"] else None
    assert new["predicted"]["decode_seconds"] == (limits.pop("decode_seconds") if limits else 0.0)
    assert body["generation"] == (limits and {**limits, "kv_copies": False, "draft": None})
    assert new["predicted"]["latency_seconds"] == old["predicted"]["total_seconds"]
    for field in ("compute_seconds", "transfer_seconds"):
        assert new["predicted"][field] == old["predicted"][field]


@pytest.mark.parametrize("name", ["graph latency", "graph throughput"])
def test_v1_graph_plan_keeps_its_segments(name: str) -> None:
    old = PLANS_V1[name]
    new = plan_from_json(json.dumps(old), GraphPlan).model_dump(mode="json")
    assert new["model"] == {
        "name": old["model"], "sha256": old["model_hash"], "inputs": old["inputs"], "outputs": old["outputs"]
    }  # fmt: skip
    assert new["body"] == {"kind": "graph", "objective": old["objective"], "segments": old["segments"]}
    predicted = {field: new["predicted"][field] for field in old["predicted"]}
    assert predicted == old["predicted"]


def test_examples_cover_every_strategy_and_kind() -> None:
    strategies = {plan["body"]["strategy"] for plan in PLANS_V1.values() if "body" in plan}
    assert strategies == {"local", "megatron-tp", "sp", "hmp", "pipeline"}
    assert {plan["objective"] for plan in PLANS_V1.values() if plan.get("kind") == "graph"} == {"latency", "throughput"}


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        ({"body": {"strategy": "magic"}}, "body"),
        ({"body": None}, "body"),
        ({"devices": "all"}, "devices"),
        ({"version": 3}, "version"),
        ({"model": 7}, "model"),
        ({"predicted": []}, "predicted"),
    ],
)
def test_damaged_v1_plan_is_one_error(damage: dict[str, Any], match: str) -> None:
    with pytest.raises(BadPlan, match=match):
        plan_from_json(json.dumps({**PLANS_V1["hmp"], **damage}))


def test_plan_of_the_other_kind_is_rejected() -> None:
    with pytest.raises(BadPlan):
        plan_from_json(json.dumps(PLANS_V1["hmp"]), GraphPlan)
    with pytest.raises(BadPlan):
        plan_from_json(json.dumps(PLANS_V1["graph latency"]), TransformerPlan)
