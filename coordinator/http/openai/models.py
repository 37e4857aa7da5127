"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from coordinator.http.failures import unknown_model
from coordinator.http.homes import shown_name
from coordinator.http.request import Answer, Call


async def models(call: Call) -> Answer:
    """List the models that can be asked."""
    return {"object": "list", "data": [_entry(shown_name(each)) for each in call.served.ready]}


async def model(call: Call) -> Answer:
    """Describe one model."""
    served, name = call.served, call.path["model"]
    found = served.named(name)
    if found is None or not found.ready:
        raise unknown_model(name, served.ready)
    return _entry(shown_name(found))


def _entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "hearth"}
