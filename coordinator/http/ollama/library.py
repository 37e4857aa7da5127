"""What is there: `/api/version`, `/api/tags`, `/api/show`, `/api/ps`, `/api/pull`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar

from coordinator.http.failures import unknown_model
from coordinator.http.homes import Served, shown_name
from coordinator.http.ollama.common import NDJSON, failed_line, line
from coordinator.http.request import Answer, Body, Call, EventStream
from hearth.wire.messages import ServedModel

# The version of Ollama whose API this is. Clients refuse versions that they think too old.
API_VERSION = "0.12.6"
_EPOCH = "1970-01-01T00:00:00Z"
_CAPABILITIES = {"text": ["completion"], "vectors": ["embedding"]}


class Named(Body):
    """A request that names a model, in the field of today or in the one of earlier clients."""

    ignored: ClassVar[frozenset[str]] = frozenset({"verbose", "insecure", "username", "password"})

    model: str = ""
    name: str = ""
    stream: bool | None = None

    def served(self, served: Served) -> ServedModel:
        """The model. Raises Failure if it is not served."""
        name = self.model or self.name
        if (found := served.named(name)) is None:
            raise unknown_model(name, served.models)
        return found


async def tags(call: Call) -> Answer:
    """List the models that can be asked."""
    return {"models": list(map(_entry, call.served.ready))}


async def running(call: Call) -> Answer:
    """List the models that are loaded. They stay so, unless they are served with a keep-alive time of their own."""
    entries = [_entry(each) for each in call.served.ready if each.phase != "unloaded"]
    return {"models": [{**entry, "expires_at": "2318-01-01T00:00:00Z", "size_vram": 0} for entry in entries]}


async def show(call: Call) -> Answer:
    """Describe a model."""
    model = Named.read(call.body).served(call.served)
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _DETAILS,
        "model_info": {
            "general.architecture": "hearth",
            **({"hearth.context_length": model.context_tokens} if model.context_tokens else {}),
        },
        "capabilities": [*_CAPABILITIES.get(model.answers, []), *(["tools"] if model.takes_tools else [])],
        "modified_at": _EPOCH,
    }


async def pull(call: Call) -> Answer:
    """Succeed for a model that is served, since there is nothing to fetch. Raises Failure for others."""
    asked = Named.read(call.body)
    asked.served(call.served)
    if asked.stream is False:
        return {"status": "success"}
    return EventStream(NDJSON, _pulled(), failed_line)


async def _pulled() -> AsyncGenerator[bytes, None]:
    for status in ("pulling manifest", "success"):
        yield line({"status": status})


_DETAILS: Mapping[str, Any] = {
    "parent_model": "", "format": "safetensors", "family": "hearth", "families": ["hearth"], "parameter_size": "",
    "quantization_level": "",
}  # fmt: skip


def _entry(model: ServedModel) -> dict[str, Any]:
    name = f"{shown_name(model)}:latest"
    return {"name": name, "model": name, "modified_at": _EPOCH, "size": 0, "digest": "", "details": _DETAILS}
