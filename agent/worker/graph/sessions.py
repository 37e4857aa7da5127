"""The segments of one rank as onnxruntime sessions, made from the chunks in the store.

Weights are mapped, never read whole: a segment's protobuf is written beside the chunks and names their files as its
external data, so onnxruntime maps each and lets go of it once it has packed the weight for its kernels. Handing them over
as values (`add_external_initializers`) was measured to keep each weight twice. A segment is loaded after the other.
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError

from agent.worker.allocator import give_back_freed_buffers
from hearth.errors import BadPlan, BadRequest, ChunkCorrupt, ChunkMissing, StepFailed, StoreFull
from hearth.wire.framing import MAX_DIMS
from hearth.wire.messages import ArrayChunks, ComputeDevice, SegmentFiles

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Provider = tuple[str, dict[str, Any]]

_PART_SUFFIX = ".part"  # the store removes these at its start, should we be killed before we do
_COPY_BYTES = 1 << 20
_ERRORS_ONLY = 3
# The element types that travel (see `hearth.wire.framing`), as onnxruntime names them.
DTYPES = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64", "tensor(int64)": "int64",
    "tensor(int32)": "int32", "tensor(int16)": "int16", "tensor(int8)": "int8", "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16", "tensor(uint32)": "uint32", "tensor(uint64)": "uint64", "tensor(bool)": "bool",
}  # fmt: skip


class ArrayType(NamedTuple):
    """`shape` has None where any size may stand."""

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join('?' if size is None else str(size) for size in self.shape)}]"

    def fits(self, array: Array) -> bool:
        return (
            array.dtype == self.dtype
            and array.ndim == len(self.shape)
            and all(want in (None, size) for size, want in zip(array.shape, self.shape, strict=True))
        )


class RunControl:
    """Lets another thread end a run."""

    def __init__(self) -> None:
        self.options = ort.RunOptions()
        self.options.log_severity_level = _ERRORS_ONLY

    def terminate(self) -> None:
        self.options.terminate = True


class SegmentSession:
    """One segment, loaded. `name` is for messages to people."""

    def __init__(self, session: ort.InferenceSession, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Raises BadPlan when it does not take and make these tensors, or one of a type that cannot travel."""
        self.name = name
        self.provider: str = session.get_providers()[0]
        self.inputs = {each.name: _array_type(each, name) for each in session.get_inputs()}
        self._outputs = list(outputs)
        self._session = session
        if differing := self.inputs.keys() ^ set(inputs):
            raise BadPlan(reason=f"{name} and its plan do not agree on the input {min(differing)}")
        made = {each.name: each for each in session.get_outputs()}
        for output in outputs:
            if output not in made:
                raise BadPlan(reason=f"{name} does not make {output}")
            _array_type(made[output], name)

    def run(self, feeds: Mapping[str, Array], control: RunControl | None = None) -> list[Array]:
        """The outputs, in their order. No array is copied on the way in or out, on a CPU.

        Raises StepFailed when onnxruntime cannot compute it, or was told to stop.
        """
        try:
            outputs: list[Array] = self._session.run(self._outputs, feeds, control.options if control else None)
        except Exception as error:  # onnxruntime's errors have no root of their own
            raise StepFailed(device=self.name, reason=brief(error)) from None
        return outputs


def load_segment(
    files: SegmentFiles,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    store: Path,
    num_threads: int,
    compute_device: ComputeDevice,
) -> tuple[SegmentSession, int]:
    """A segment, and how many bytes its weights have.

    Raises ChunkCorrupt, StoreFull, BadPlan when it is not what onnxruntime takes.
    """
    data = b"".join(_chunk_path(store, chunk).read_bytes() for chunk in files.graph)
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError:
        raise BadPlan(reason=f"{name} is no ONNX model") from None
    num_bytes = len(data)
    placeholders = {tensor.name: tensor for tensor in placeholders_of(model)}
    if missing := placeholders.keys() - {weight.name for weight in files.initializers}:
        raise BadPlan(reason=f"{name} comes without its weight {min(missing)}")
    with _scratch(store) as scratch:
        for weight in files.initializers:
            if weight.name not in placeholders:
                raise BadPlan(reason=f"{name} does not use the weight {weight.name}")
            num_bytes += _place(placeholders[weight.name], weight, store, scratch)
        path = scratch(f"segment{_PART_SUFFIX}", store)
        path.write_bytes(model.SerializeToString())
        del data, model, placeholders
        session = make_session(path, name, num_threads, providers_for(compute_device, store))
    give_back_freed_buffers()  # as much as the weights: onnxruntime rewrote them
    return SegmentSession(session, name, inputs, outputs), num_bytes


def make_session(
    path: Path,
    name: str,
    num_threads: int,
    providers: Sequence[Provider],
    change: Callable[[ort.SessionOptions], None] = lambda options: None,
) -> ort.InferenceSession:
    """A session from an ONNX file. Raises BadPlan."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    # Beside compute there is communication: threads that wait for the next run must not spin meanwhile.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    change(options)
    try:
        return ort.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:
        raise BadPlan(reason=f"onnxruntime {ort.__version__} does not take {name}: {brief(error)}") from None


def providers_for(compute_device: ComputeDevice, store: Path) -> list[Provider]:
    """What this build of onnxruntime offers for the device, the fastest first; each takes what the one before cannot.

    TensorRT compiles a segment for minutes on a small board, so it keeps what it made in the store's folder.
    """
    wanted: list[Provider] = [("CPUExecutionProvider", {})]
    if compute_device == "cuda":
        engines = {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(store / "tensorrt")}
        wanted = [("TensorrtExecutionProvider", engines), ("CUDAExecutionProvider", {}), *wanted]
    offered = ort.get_available_providers()
    found = [provider for provider in wanted if provider[0] in offered]
    if compute_device == "cuda" and len(found) == 1:
        log.warning("this build of onnxruntime has no CUDA provider; segments run on the CPU")
    return found


def check_input(session: SegmentSession, name: str, array: Array) -> None:
    """Raises BadRequest for an array that the segment does not take."""
    wanted = session.inputs[name]
    if not wanted.fits(array):
        found = ArrayType(str(array.dtype), array.shape)
        raise BadRequest(reason=f"the input {name} is {found}, the model takes {wanted}")


# ---- files ----------------------------------------------------------------------------------------------------------


def _place(tensor: onnx.TensorProto, weight: ArrayChunks, store: Path, scratch: Scratch) -> int:
    """Have a placeholder point to its weight's file; its bytes. Weights of several chunks are joined on the disk first."""
    paths = [_chunk_path(store, chunk) for chunk in weight.chunks]
    num_bytes = sum(path.stat().st_size for path in paths)
    if num_bytes != data_bytes(tensor):
        raise ChunkCorrupt(chunk=f"{weight.chunks[0][:12]} ({weight.name})", where=str(store))
    if len(paths) == 1:
        path = paths[0]
    else:
        path = scratch(f"weight{_PART_SUFFIX}", paths[0].parent)
        _join(paths, path, store, num_bytes)
    refer(tensor, str(path.relative_to(store)), 0, num_bytes)
    return num_bytes


def placeholders_of(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The initialisers whose bytes are not in the protobuf."""
    return [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]


def refer(tensor: onnx.TensorProto, location: str, offset: int, num_bytes: int) -> None:
    """Have a placeholder point to its data: in a file, relative to the model's."""
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(num_bytes))):
        tensor.external_data.add(key=key, value=value)


def data_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes that the type and the shape of a tensor take."""
    num_values: int = math.prod(tensor.dims)
    return num_values * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _join(paths: Sequence[Path], into: Path, store: Path, num_bytes: int) -> None:
    try:
        with into.open("wb") as joined:
            for path in paths:
                with path.open("rb") as chunk:
                    shutil.copyfileobj(chunk, joined, _COPY_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(store).free
        raise StoreFull(device=str(store), needed_bytes=num_bytes, free_bytes=free) from None


def _chunk_path(store: Path, chunk: str) -> Path:
    path = store / chunk[:2] / chunk
    if not path.is_file():
        raise ChunkMissing(chunk=chunk[:12], device="this device")
    return path


Scratch = Callable[[str, Path], Path]


@contextmanager
def _scratch(store: Path) -> Iterator[Scratch]:
    """Names for files of ours in the store, gone afterwards; onnxruntime's maps of them live on."""
    for left in store.glob(f"*{_PART_SUFFIX}"):  # of a worker that was killed while it loaded
        left.unlink(missing_ok=True)
    made: list[Path] = []

    def new(suffix: str, folder: Path) -> Path:
        made.append(folder / f"{secrets.token_hex(8)}.{suffix}")
        return made[-1]

    try:
        yield new
    finally:
        for path in made:
            path.unlink(missing_ok=True)


# ---- small parts ----------------------------------------------------------------------------------------------------


def _array_type(value: Any, where: str) -> ArrayType:
    """Raises BadPlan for what cannot travel."""
    dtype, shape = DTYPES.get(value.type), value.shape or ()
    if dtype is None or len(shape) > MAX_DIMS:
        kind = f"{value.type} of {len(shape)} dimensions"
        raise BadPlan(reason=f"{where} takes or makes {value.name}, a {kind}, which cannot travel between devices")
    return ArrayType(dtype, tuple(size if isinstance(size, int) else None for size in shape))


def brief(error: Exception) -> str:
    """onnxruntime's message without its prefix and its stack, on one line."""
    return " ".join(str(error).split())[:500]
