"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from coordinator.http.call import Answer, Call, is_name_of
from coordinator.http.failures import unknown_model


async def models(call: Call) -> Answer:
    """List the served model; empty while none is ready."""
    served = call.served
    return {"object": "list", "data": [_entry(served.model)] if served.readiness.ready else []}


async def model(call: Call) -> Answer:
    """Describe one model."""
    served, name = call.served, call.path["model"]
    if not served.readiness.ready or not is_name_of(name, served.model):
        raise unknown_model(name, served.model)
    return _entry(served.model)


def _entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "hearth"}
