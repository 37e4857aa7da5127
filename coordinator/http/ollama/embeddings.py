"""`POST /api/embed` and, as in earlier versions, `POST /api/embeddings`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from coordinator.http.ollama.common import KeepAlive, keep_loaded
from coordinator.http.openai.embeddings import embedded, shortened
from coordinator.http.request import Answer, Body, Call, Texts


class Embed(Body):
    """The body of `/api/embed`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"options"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"truncate": (True, False)}

    model: str
    keep_alive: KeepAlive | None = None
    input: Annotated[Texts, Field(max_length=4096)] = ()
    dimensions: Annotated[int, Field(ge=1)] | None = None


class EmbedOne(Body):
    """The body of `/api/embeddings`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"options"})

    model: str
    keep_alive: KeepAlive | None = None
    prompt: str = ""


async def embed(call: Call) -> Answer:
    """Embed texts; vectors have length 1."""
    asked, began = Embed.read(call.body), time.monotonic()
    served = await call.ready(asked.model)
    if not asked.input:
        await keep_loaded(served, asked.keep_alive)
        return {"model": asked.model, "embeddings": []}
    result = await embedded(call, served, asked.input)
    await keep_loaded(served, asked.keep_alive)
    return {
        "model": asked.model,
        "embeddings": shortened(result.vectors, asked.dimensions).tolist(),
        "total_duration": round((time.monotonic() - began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": result.num_tokens,
    }


async def embed_one(call: Call) -> Answer:
    """Embed one text."""
    asked = EmbedOne.read(call.body)
    served = await call.ready(asked.model)
    if not asked.prompt:
        await keep_loaded(served, asked.keep_alive)
        return {"embedding": []}
    result = await embedded(call, served, [asked.prompt])
    await keep_loaded(served, asked.keep_alive)
    return {"embedding": result.vectors[0].tolist()}
