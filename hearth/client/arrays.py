"""Client side of inference with an ONNX graph: named arrays in, named arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hearth.errors import BadRequest
from hearth.protocol import MAX_PAYLOAD_FRAMES
from hearth.wire.messages import DeviceTrace, Inferred, Message, expect_message

if TYPE_CHECKING:
    import numpy as np

    Arrays: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
else:
    Arrays = Mapping


class InferenceResult(NamedTuple):
    """The outputs by name, and how long the request ran. `latency_seconds` excludes the time in the queue."""

    outputs: dict[str, np.ndarray[Any, Any]]
    latency_seconds: float
    traces: tuple[DeviceTrace, ...]


def array_frames(inputs: Arrays) -> list[Any]:
    """Encode the inputs as two frames each. Raises BadRequest for an input that cannot be sent, FrameTooLarge."""
    import numpy as np

    from hearth.wire.framing import pack_array

    if 2 * len(inputs) > MAX_PAYLOAD_FRAMES:
        raise BadRequest(reason=f"{len(inputs)} inputs; one request takes at most {MAX_PAYLOAD_FRAMES // 2}")
    frames: list[Any] = []
    for name, value in inputs.items():
        try:
            frames += pack_array(np.asarray(value))
        except ValueError as error:
            raise BadRequest(reason=f"the input '{name}' cannot be sent: {error}") from None
    return frames


def decode_inference(message: Message, payload: Sequence[Any]) -> InferenceResult:
    """Decode the coordinator's answer. Raises BadMessage."""
    from hearth.wire.framing import unpack_arrays

    answer = expect_message(message, Inferred, "the coordinator")
    return InferenceResult(unpack_arrays(answer.names, payload), answer.latency_seconds, answer.traces)
