"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coordinator.http.answer_stream import while_connected
from coordinator.http.failures import Failure, unsupported
from coordinator.http.homes import Asked
from coordinator.http.request import Answer, Body, Call, Many
from hearth.client.home import Result

_EMBED_SECONDS = 600.0


class Embeddings(Body):
    """The body of the request."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str
    input: str | Annotated[Many[Any], Field(max_length=4096)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    def texts(self) -> list[str]:
        """The texts. Raises Failure for token ids."""
        given = [self.input] if isinstance(self.input, str) else list(self.input)
        texts = [each for each in given if isinstance(each, str)]
        if len(texts) != len(given):
            raise unsupported("input", "it must be a text or a list of texts, not token ids")
        if not texts:
            raise Failure(400, "The field 'input' is empty.", param="input")
        return texts


async def embeddings(call: Call) -> Answer:
    """Embed texts; vectors have length 1."""
    asked = Embeddings.read(call.body)
    texts = asked.texts()
    served = await call.ready(asked.model)
    result = await embedded(call, served, texts)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, asked.encoding_format)}
        for index, vector in enumerate(shortened(result.vectors, asked.dimensions))
    ]
    usage = {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens}
    return {"object": "list", "data": data, "model": served.model, "usage": usage}


async def embedded(call: Call, served: Asked, texts: Sequence[str]) -> Result:
    """The vectors of texts by this model, unless the client goes away."""
    request = served.home.request_embeddings(texts, _EMBED_SECONDS, model=served.deployment)
    return await while_connected(call.receive, request)


def shortened(vectors: Any, dimensions: int | None) -> Any:
    """The first `dimensions` values of each vector [N,H], again with length 1. Raises Failure if there are fewer."""
    if dimensions is None:
        return vectors
    import numpy as np

    if dimensions > vectors.shape[1]:
        raise Failure(
            400, f"The model's vectors have {vectors.shape[1]} dimensions, not {dimensions}.", param="dimensions"
        )
    cut = vectors[:, :dimensions]
    return cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def _encoded(vector: Any, form: str) -> object:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
