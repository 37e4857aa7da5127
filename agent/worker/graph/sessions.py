"""onnxruntime sessions for one rank's segments, created from the chunks in the store.

Weights are memory-mapped: a segment's protobuf is written into the store with the chunk files as its external data, so
onnxruntime maps each weight and unmaps it once it is packed for a kernel. Passing weights as values
(`add_external_initializers`) was measured to keep each weight in memory twice. Segments are loaded one at a time. Every
operator packs its own copy of a weight, even within a session; without packing, all read the mapped file.
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from agent.worker.onnx_runtime import load_cuda, ort
from hearth.errors import BadPlan, BadRequest, ChunkCorrupt, ChunkMissing, StepFailed, StoreFull
from hearth.files import file_beside
from hearth.platform.machine import give_back_freed_buffers
from hearth.wire.framing import MAX_DIMS
from hearth.wire.messages import ArrayChunks, ComputeDevice, SegmentFiles

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Provider = tuple[str, dict[str, Any]]

_TENSORRT = "TensorrtExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_COPY_BYTES = 1 << 20  # buffer size for joining chunks: large enough that system calls cost little
_ERRORS_ONLY = 3  # onnxruntime's log severity ERROR
# Element types that can be sent (see `hearth.wire.framing`), by onnxruntime's names.
DTYPES = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64", "tensor(int64)": "int64",
    "tensor(int32)": "int32", "tensor(int16)": "int16", "tensor(int8)": "int8", "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16", "tensor(uint32)": "uint32", "tensor(uint64)": "uint64", "tensor(bool)": "bool",
}  # fmt: skip


class ArrayType(NamedTuple):
    """Type of a tensor. None in `shape`: any size."""

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
    """Lets another thread terminate a run."""

    def __init__(self) -> None:
        self.options = ort.RunOptions()
        self.options.log_severity_level = _ERRORS_ONLY

    def terminate(self) -> None:
        self.options.terminate = True


class SegmentSession:
    """A loaded segment. `name` is used in error messages."""

    def __init__(self, session: ort.InferenceSession, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Raises BadPlan if the model's inputs or outputs are not these, or one has a type that cannot be sent."""
        self.name = name
        self.provider: str = session.get_providers()[0]
        self.inputs = {each.name: _array_type(each, name) for each in session.get_inputs()}
        self._outputs = list(outputs)
        self._session = session
        if differing := self.inputs.keys() ^ set(inputs):
            raise BadPlan(reason=f"{name} and its plan do not agree on the input {min(differing)}")
        outputs_by_name = {each.name: each for each in session.get_outputs()}
        for output in outputs:
            if output not in outputs_by_name:
                raise BadPlan(reason=f"{name} does not produce {output}")
            _array_type(outputs_by_name[output], name)

    def used_as(self, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> SegmentSession:
        """The same session as a segment of another plan. Raises as the constructor does."""
        return SegmentSession(self._session, name, inputs, outputs)

    def run(self, feeds: Mapping[str, Array], control: RunControl | None = None) -> list[Array]:
        """Run the segment and return its outputs in order. On a CPU, neither inputs nor outputs are copied.

        Raises StepFailed if onnxruntime fails or the run was terminated.
        """
        try:
            outputs: list[Array] = self._session.run(self._outputs, feeds, control.options if control else None)
        except Exception as error:  # onnxruntime's errors have no common base class
            raise StepFailed(device=self.name, reason=brief_message(error)) from None
        return outputs


def load_segment(
    files: SegmentFiles,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    scratch: Path,
    num_threads: int,
    compute_device: ComputeDevice,
    in_place: WeightFiles | None = None,
) -> tuple[SegmentSession, int]:
    """Load a segment. Returns it, and the bytes of its protobuf and weights.

    `scratch` is a folder for temporary files in the store.
    With `in_place`, the segments that are loaded with the same files map each weight once, and kernels do not pack it.
    Raises ChunkMissing, ChunkCorrupt, StoreFull, and BadPlan if onnxruntime does not accept it.
    """
    model, num_bytes = _read_model(files, name, scratch.parent)
    placeholders = {tensor.name: tensor for tensor in placeholders_of(model)}
    if missing := placeholders.keys() - {weight.name for weight in files.initializers}:
        raise BadPlan(reason=f"{name} comes without its weight {min(missing)}")

    def configure(options: ort.SessionOptions) -> None:
        if in_place is not None:
            options.add_session_config_entry("session.disable_prepacking", "1")

    with nullcontext(in_place) if in_place is not None else WeightFiles(scratch) as weight_files:
        for weight in files.initializers:
            if weight.name not in placeholders:
                raise BadPlan(reason=f"{name} does not use the weight {weight.name}")
            num_bytes += _attach_weight(placeholders[weight.name], weight, weight_files)
        path = file_beside(scratch)
        path.write_bytes(model.SerializeToString())
        del model, placeholders
        session = make_session(path, name, num_threads, providers_for(compute_device, scratch), configure)
    give_back_freed_buffers()  # as much as the weights, which onnxruntime has repacked
    return SegmentSession(session, name, inputs, outputs), num_bytes


def copied_bytes(files: SegmentFiles, name: str, store: Path) -> int:
    """Bytes of a segment's weights, each counted once per operator that uses it. Raises ChunkMissing and BadPlan."""
    model, _ = _read_model(files, name, store)
    sizes = {tensor.name: data_bytes(tensor) for tensor in placeholders_of(model)}
    return sum(sizes.get(used, 0) for node in model.graph.node for used in set(node.input))


def _read_model(files: SegmentFiles, name: str, store: Path) -> tuple[onnx.ModelProto, int]:
    """A segment's model without its weights, and the bytes of its protobuf."""
    data = b"".join(chunk_path(store, chunk).read_bytes() for chunk in files.graph)
    try:
        return onnx.ModelProto.FromString(data), len(data)
    except DecodeError:
        raise BadPlan(reason=f"{name} is not an ONNX model") from None


def make_session(
    path: Path,
    name: str,
    num_threads: int,
    providers: Sequence[Provider],
    configure: Callable[[ort.SessionOptions], None] = lambda options: None,
) -> ort.InferenceSession:
    """Create a session from an ONNX file, without TensorRT if that fails. Raises BadPlan."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    # Idle threads must not spin between runs, because communication needs the cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    configure(options)

    def create(wanted: Sequence[Provider]) -> ort.InferenceSession:
        # Without onnxruntime's own fallback, which forgets the options of the other providers.
        return ort.InferenceSession(str(path), options, providers=list(wanted), enable_fallback=0)

    nodes_only = without_compilers(providers)
    try:
        try:
            session = create(providers)
        except Exception as error:
            if nodes_only == list(providers):
                raise
            # TensorRT's libraries are often missing, and it does not take every model.
            log.info("%s is tried without TensorRT: %s", name, brief_message(error))
            session = create(nodes_only)
    except Exception as error:
        raise BadPlan(reason=f"onnxruntime {ort.__version__} does not accept {name}: {brief_message(error)}") from None
    if _CUDA in dict(providers) and _CUDA not in session.get_providers():
        log.warning("onnxruntime cannot use CUDA, for the reason above: %s runs on the CPU", name)
    return session


def providers_for(compute_device: ComputeDevice, scratch: Path) -> list[Provider]:
    """This build's execution providers for the device, fastest first; each runs the operators that earlier ones cannot.

    TensorRT takes minutes to compile a segment on a small board, so its engines are cached in `scratch` while the process
    lives. float32 is float32: without TF32, which NVIDIA's libraries use for it otherwise.
    """
    wanted: list[Provider] = [("CPUExecutionProvider", {})]
    if compute_device == "cuda":
        load_cuda()
        engines = {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(scratch)}
        # Memory is taken as it is needed, as it is planned, and not in powers of two.
        exact = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
        wanted = [(_TENSORRT, engines), (_CUDA, exact), *wanted]
    available = ort.get_available_providers()
    providers = [provider for provider in wanted if provider[0] in available]
    if compute_device == "cuda" and len(providers) == 1:
        log.warning("this build of onnxruntime has no CUDA provider; segments run on the CPU")
    return providers


def without_compilers(providers: Sequence[Provider]) -> list[Provider]:
    """The providers that run the nodes of a graph one by one. The other makes engines of them.

    Nodes in an engine have no times, and onnxruntime refuses to write a graph with engines to a file.
    """
    return [provider for provider in providers if provider[0] != _TENSORRT]


def check_input(session: SegmentSession, name: str, array: Array) -> None:
    """Raise BadRequest if the array does not have the type and shape of the segment's input."""
    expected = session.inputs[name]
    if not expected.fits(array):
        actual = ArrayType(str(array.dtype), array.shape)
        raise BadRequest(reason=f"the input {name} is {actual}, the model takes {expected}")


# ---- models ----------------------------------------------------------------------------------------------------------


def _attach_weight(tensor: onnx.TensorProto, weight: ArrayChunks, files: WeightFiles) -> int:
    """Point a placeholder to its weight's file. Returns the weight's bytes."""
    num_bytes = data_bytes(tensor)
    path = files.path(weight, num_bytes)
    set_external_data(tensor, str(path.relative_to(files.store)), 0, num_bytes)
    return num_bytes


def placeholders_of(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The initialisers whose data are not in the protobuf."""
    return [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]


def set_external_data(tensor: onnx.TensorProto, location: str, offset: int, num_bytes: int) -> None:
    """Point a placeholder to its data in a file; `location` is relative to the model file."""
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(num_bytes))):
        tensor.external_data.add(key=key, value=value)


def data_bytes(tensor: onnx.TensorProto) -> int:
    """Size of a tensor's data in bytes, from its type and shape."""
    num_values: int = math.prod(tensor.dims)
    return num_values * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


# ---- small parts ----------------------------------------------------------------------------------------------------


def _array_type(value: Any, where: str) -> ArrayType:
    """The type of an input or output. Raises BadPlan if it cannot be sent."""
    dtype, shape = DTYPES.get(value.type), value.shape or ()
    if dtype is None or len(shape) > MAX_DIMS:
        kind = f"{value.type} of {len(shape)} dimensions"
        raise BadPlan(reason=f"{where} takes or produces {value.name}, a {kind}, which cannot be sent between devices")
    return ArrayType(dtype, tuple(size if isinstance(size, int) else None for size in shape))


def brief_message(error: Exception) -> str:
    """The error message of onnxruntime on one line, at most 500 characters."""
    return " ".join(str(error).split())[:500]


# ---- files of weights ---------------------------------------------------------------------------------------------------


class WeightFiles:
    """The files of whole weights, which onnxruntime maps: a chunk in the store each, or joined in the scratch folder.

    A context manager: joined weights are removed at its end. onnxruntime's mappings of them stay valid.

    `scratch` is a folder in the store.
    """

    def __init__(self, scratch: Path) -> None:
        self.store = scratch.parent
        self._scratch = scratch
        self._joined: dict[tuple[str, ...], Path] = {}  # by chunks

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._joined.values():
            path.unlink(missing_ok=True)

    def path(self, weight: ArrayChunks, num_bytes: int) -> Path:
        """The file of a weight, joined once from several chunks. Raises ChunkMissing, ChunkCorrupt and StoreFull."""
        paths = [chunk_path(self.store, chunk) for chunk in weight.chunks]
        if sum(path.stat().st_size for path in paths) != num_bytes:
            raise ChunkCorrupt(chunk=f"{weight.chunks[0][:12]} ({weight.name})", where=str(self.store))
        if len(paths) == 1:
            return paths[0]
        if weight.chunks not in self._joined:
            self._joined[weight.chunks] = self._scratch / f"{secrets.token_hex(8)}.weight"
            self._join(paths, self._joined[weight.chunks], num_bytes)
        return self._joined[weight.chunks]

    def _join(self, paths: Sequence[Path], into: Path, num_bytes: int) -> None:
        try:
            with into.open("wb") as joined:
                for path in paths:
                    with path.open("rb") as chunk:
                        shutil.copyfileobj(chunk, joined, _COPY_BYTES)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = shutil.disk_usage(self.store).free
            raise StoreFull(device=str(self.store), needed_bytes=num_bytes, free_bytes=free) from None


def chunk_path(store: Path, chunk: str) -> Path:
    """The file of a chunk. Raises ChunkMissing."""
    path = store / chunk[:2] / chunk
    if not path.is_file():
        raise ChunkMissing(chunk=chunk[:12], device="this device")
    return path
