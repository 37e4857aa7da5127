"""Conversion of version 1 plans, which had one envelope per kind of model, to version 2. Pure."""

from __future__ import annotations

from typing import Any

_ENVELOPE = ("epoch", "planner", "devices", "wire", "alternatives")


def plan_from_v1(saved: dict[str, Any]) -> dict[str, Any]:
    """Convert the decoded JSON of a version 1 plan to version 2.

    Missing or invalid fields are kept as they are; the validation of `Plan` reports them.
    """
    plan = {key: saved[key] for key in _ENVELOPE if key in saved}
    if saved.get("kind") == "graph":
        return plan | {"version": 2, **_graph(saved)}
    return plan | {"version": 2, **_transformer(saved)}


def _transformer(saved: dict[str, Any]) -> dict[str, Any]:
    body, predicted = dict(saved.get("body") or {}), dict(saved.get("predicted") or {})
    generation = dict(saved["generation"]) if saved.get("generation") else None
    decode_seconds = generation.pop("decode_seconds", 0.0) if generation else 0.0
    predicted["latency_seconds"] = predicted.pop("total_seconds", None)
    busiest = (predicted.get("compute_seconds", 0.0), predicted.get("transfer_seconds", 0.0))
    body.update(seq_len=saved.get("seq_len"), generation=generation)
    if body.get("strategy") == "pipeline":
        body["kind"] = "pipeline"
        for of_shares in ("strategy", "overlap", "modes", "micro_batches"):
            body.pop(of_shares, None)
    else:
        body["kind"] = "tensor-parallel"
        for of_stages in ("layers", "chunk_rows"):
            body.pop(of_stages, None)
    return {
        "model": saved.get("model"),
        "predicted": predicted | {"bottleneck_seconds": max(busiest), "decode_seconds": decode_seconds},
        "body": body,
    }


def _graph(saved: dict[str, Any]) -> dict[str, Any]:
    """Convert a graph plan. Version 1 stored only the busiest device or link; a link's time is known only if it was busiest."""
    predicted = dict(saved.get("predicted") or {})
    compute = max((device.get("compute_seconds", 0.0) for device in saved.get("devices", ())), default=0.0)
    bottleneck = predicted.get("bottleneck_seconds", 0.0)
    return {
        "model": {
            "name": saved.get("model"),
            "sha256": saved.get("model_hash", ""),
            "inputs": saved.get("inputs"),
            "outputs": saved.get("outputs"),
        },
        "predicted": predicted
        | {"compute_seconds": compute, "transfer_seconds": bottleneck if bottleneck > compute else 0.0},
        "body": {"kind": "graph", "objective": saved.get("objective"), "segments": saved.get("segments")},
    }
