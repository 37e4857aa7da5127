"""Normal forms of printed plans, independent of the surrounding JSON. One small function for each recorded format.

`normalise(printed)` selects by the version that a plan names. A new version gets its own functions in the tables at
the end; the records stay as they are, in the normal form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

Json = dict[str, Any]

# Fields that identify a model; the rest of its spec follows from its config.
_MODEL = (
    "name", "family", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "ffn_size", "vocab_size",
    "dtype", "weights",
)  # fmt: skip
_BODY = ("overlap", "heads", "columns", "row_weights", "vocabulary", "micro_batches")
_SHARDED = {"qkv": "sharded", "out": "sharded", "mlp": "sharded", "attention": "heads"}
# Planning times and the wording of reasons are never recorded.


def _by_label(found: Sequence[Json]) -> Json:
    """Alternatives as {strategy: predicted seconds}; repeated labels get a number."""
    labelled: Json = {}
    for each in found:
        label, count = each["strategy"], 2
        while label in labelled:
            label, count = f"{each['strategy']} #{count}", count + 1
        labelled[label] = each["predicted_seconds"]
    return labelled


def _devices(plan: Json) -> list[Json]:
    return [
        {name: each[name] for name in ("device_id", "name", "memory", "budget_bytes", "compute_seconds")}
        for each in plan["devices"]
    ]


# ---- version 1 --------------------------------------------------------------------------------------------------------


def transformer_plan_v1(printed: Json) -> Json:
    """A plan of `hearth plan` for a transformer.

    A pipeline's heads, columns, vocabulary and rows follow from its layers. Equal modes of consecutive layers are
    merged; there are none if everything is sharded.
    """
    body, model = printed["body"], printed["model"]
    normal: Json = {
        "kind": "transformer",
        "strategy": body["strategy"],
        "planner": printed["planner"],
        "model": {name: model[name] for name in _MODEL},
        "seq_len": printed["seq_len"],
        "wire": printed["wire"],
        "devices": _devices(printed),
        "exact_links": body["exact_links"],
        "predicted": printed["predicted"],
        "generation": printed["generation"],
    }
    if body["strategy"] == "pipeline":
        normal["layers"], normal["chunk_rows"] = body["layers"], body["chunk_rows"]
    else:
        runs = [[mode, len(list(same))] for mode, same in groupby(body["modes"])]
        normal.update({name: body[name] for name in _BODY})
        normal["modes"] = [] if all(mode == _SHARDED for mode, _ in runs) else runs
    return {"plan": normal, "alternatives": _by_label(printed["alternatives"])}


def graph_plan_v1(printed: Json) -> Json:
    """A plan of `hearth plan` for a graph; `answer` has the surrounding fields: placement, schedule, bound."""
    plan = printed["plan"]
    normal = {
        "kind": "graph",
        "strategy": printed["strategy"],
        "planner": plan["planner"],
        "objective": plan["objective"],
        "model": {"name": plan["model"], "hash": plan["model_hash"]},
        "wire": plan["wire"],
        "devices": _devices(plan),
        "segments": [
            {name: each[name] for name in ("operators", "rank", "inputs", "outputs", "seconds")}
            for each in plan["segments"]
        ],
        "inputs": plan["inputs"],
        "outputs": plan["outputs"],
        "predicted": plan["predicted"],
    }
    return {"plan": normal, "answer": _answer_v1(printed), "alternatives": _by_label(plan["alternatives"])}


def instance_plan_v1(printed: Json) -> Json:
    """The placement of a problem with its own devices: there is no plan to run."""
    normal = {
        "kind": "instance",
        "strategy": printed["strategy"],
        "objective": printed["objective"],
        "model": {"name": printed["model"]},
        "devices": printed["devices"],
    }
    others = [each for each in printed["candidates"] if each["strategy"] != printed["strategy"]]
    return {"plan": normal, "answer": _answer_v1(printed), "alternatives": _by_label(others)}


def _answer_v1(printed: Json) -> Json:
    names = ("objective_value", "bound", "proven_optimal", "congestion", "unit", "assignment", "starts")
    return {name: printed[name] for name in names}


# ---- version 2 --------------------------------------------------------------------------------------------------------


def transformer_plan_v2(printed: Json) -> Json:
    """The body of version 2 has the step's length and the limits of a generation, and only the fields of its kind.

    It may replicate the word embeddings, which version 1 never did.
    """
    body, predicted = printed["body"], printed["predicted"]
    generation = body["generation"] and body["generation"] | {"decode_seconds": predicted["decode_seconds"]}
    as_v1 = printed | {
        "planner": _recorded_planner(printed["planner"]),
        "body": body | {"strategy": body.get("strategy", body["kind"])},
        "seq_len": body["seq_len"],
        "generation": generation,
        "predicted": {
            "total_seconds": predicted["latency_seconds"],
            "compute_seconds": predicted["compute_seconds"],
            "transfer_seconds": predicted["transfer_seconds"],
        },
    }
    normal = transformer_plan_v1(as_v1)
    if body.get("embedding") == "replicated":
        normal["plan"]["embedding"] = "replicated"
    return normal


def _recorded_planner(planner: str) -> str:
    """`exact` claimed more when plans were recorded: its shares are best for compute, not proven to be the best."""
    return planner.replace("exact (best for compute)", "exact (proven best)").replace(
        "exact (compute within", "exact (within"
    )


def graph_plan_v2(printed: Json) -> Json:
    plan = printed["plan"]
    model, body, predicted = plan["model"], plan["body"], plan["predicted"]
    as_v1 = plan | {
        "objective": body["objective"],
        "segments": body["segments"],
        "model": model["name"],
        "model_hash": model["sha256"],
        "inputs": model["inputs"],
        "outputs": model["outputs"],
        "predicted": {
            name: predicted[name]
            for name in ("latency_seconds", "bottleneck_seconds", "bound_seconds", "proven_optimal")
        },
    }
    return graph_plan_v1(printed | {"plan": as_v1})


# ---- by version -------------------------------------------------------------------------------------------------------

# By kind and version.
NORMALISERS: dict[tuple[str, int], Callable[[Json], Json]] = {
    ("transformer", 1): transformer_plan_v1,
    ("graph", 1): graph_plan_v1,
    ("transformer", 2): transformer_plan_v2,
    ("graph", 2): graph_plan_v2,
    ("instance", 1): instance_plan_v1,
}


def normalise(kind: str, printed: Json) -> Json:
    """`plan`, `alternatives`, and for graphs `answer`; and the version of the format that was read."""
    version = printed.get("plan", printed).get("version", 1)
    return {"version": version, **NORMALISERS[kind, version](printed)}


def seconds_that_count(normal: Json) -> float:
    """The predicted time under the plan's objective, by which plans are compared."""
    predicted = normal["plan"].get("predicted", {})
    if normal["plan"]["kind"] == "instance":
        return float(normal["answer"]["objective_value"])
    if normal["plan"]["kind"] == "transformer":
        return float(predicted["total_seconds"])
    return float(predicted["latency_seconds" if normal["plan"]["objective"] == "latency" else "bottleneck_seconds"])
