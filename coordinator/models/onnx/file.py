"""An ONNX file parsed without its weights, which are read one by one from the file.

An ONNX file is one protobuf message that contains the weights, so parsing it loads all of them. This module first scans the
message (the format is simple: field number, wire type, length) and replaces every tensor above `INLINE_BYTES` by a
reference to its place in the file; protobuf parses the result. Tensors in separate files ("external data") are references
already; small ones are read and inlined. A reference can be to a region of a weight, as the tiles of an operator need it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto, TensorProto, helper, numpy_helper

from coordinator.models.limits import MAX_AXES, MAX_PROTO_BYTES
from coordinator.models.model_files import open_model_file, read_region
from coordinator.models.onnx.nodes import bodies, check_size
from hearth.errors import BadModelFile

# Larger weights stay in the file and are sent to devices as separate chunks; smaller ones are sent within the segment. Large
# enough that biases and scales cost no chunk each, small enough that segments stay small without their weights.
INLINE_BYTES = 16 << 10
# Keys of our references, among the entries of a tensor's external data.
_RAW, _MESSAGE = "hearth.raw", "hearth.message"
_SLICE = "hearth.slice"
_HASH_BLOCK_BYTES = 4 << 20  # read at a time: few calls, without holding the file in memory

# Where tensors occur in the message: by message type, the fields to follow and the type of each (onnx.proto).
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}
_TENSOR_STRINGS, _TENSOR_RAW = 6, 9
_TENSOR_DATA = {4, 5, 7, _TENSOR_RAW, 10, 11}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Types with several values per byte: neither numpy nor onnxruntime's OrtValue accepts their raw bytes, so they stay inline.
_PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


def dtype_name(element_type: int) -> str:
    """The numpy name of an ONNX element type; `object` for strings."""
    return str(helper.tensor_dtype_to_np_dtype(element_type).name)


def is_packed(element_type: int) -> bool:
    """Whether several values share a byte. Such a weight cannot be passed to onnxruntime separately."""
    return dtype_name(element_type) in _PACKED_BITS


def num_bytes_of(element_type: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's data; packed types store several values per byte."""
    dtype = helper.tensor_dtype_to_np_dtype(element_type)
    return -(-math.prod(shape) * _PACKED_BITS.get(dtype.name, 8 * dtype.itemsize) // 8)


class OnnxFile:
    """An ONNX file. `proto` has every node, with references in place of large tensors. Raises BadModelFile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sizes: dict[Path, int] = {}  # in bytes
        try:
            with self._open(path) as file:
                slim = _without_large_tensors("model", file, 0, self._size(path))
            if len(slim) > MAX_PROTO_BYTES:
                raise self.error(f"it has more than {MAX_PROTO_BYTES >> 20} MiB without its large weights")
            self.proto = ModelProto.FromString(slim)
        except (DecodeError, RecursionError, _CorruptMessage):
            raise self.error("it is not an ONNX model, or was cut short") from None
        if not self.proto.HasField("graph") or not self.proto.opset_import:
            raise self.error("it is not an ONNX model: it has no graph or names no operator set")
        check_size(self.proto, self.error)
        if not _has_valid_strings(self.proto):
            raise self.error("it has names that are not valid UTF-8")
        for tensor in tensors_of(self.proto):
            self._check(tensor)

    def error(self, reason: str) -> BadModelFile:
        return BadModelFile(path=str(self.path), reason=reason)

    def read(self, tensor: TensorProto, part: slice = slice(None)) -> memoryview:
        """The little-endian bytes of a tensor, or a part of them (a slice of step 1)."""
        source = source_of(tensor)
        stored = tensor if source is None else source.tensor
        reference = _reference(stored)
        if reference is None:
            return memoryview(raw_bytes(stored))[part]
        path, offset, length, is_message = self._locate(reference, stored)
        with self._open(path) as file:
            if source is not None and not is_message:
                region = tuple(slice(start, stop) for start, stop in source.region)
                return _bytes_of(read_region(file, offset, tuple(stored.dims), _element(stored), region))[part]
            data = read_region(file, offset, (length,), np.uint8, (slice(None) if is_message else part,)).data
        if not is_message:
            return data
        data = memoryview(raw_bytes(TensorProto.FromString(data.tobytes())))
        return (data if source is None else _region_of(data, source))[part]

    def inlined(self, tensor: TensorProto) -> TensorProto:
        """The tensor with its data inlined."""
        if _reference(tensor) is None:
            return tensor
        return helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, self.read(tensor).tobytes(), raw=True)

    def paths(self) -> list[Path]:
        """The file and the files of its external data, in the order of their names."""
        paths = {
            self._locate(reference, tensor)[0] for tensor in tensors_of(self.proto) if (reference := _reference(tensor))
        }
        return [self.path, *sorted(paths - {self.path})]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file and of the files of its external data, in the order of their names."""
        sha256 = hashlib.sha256()
        for path in self.paths():
            sha256.update(self._size(path).to_bytes(8, "little"))
            with self._open(path) as file:
                while block := file.read(_HASH_BLOCK_BYTES):
                    sha256.update(block)
        return sha256.hexdigest()

    @contextmanager
    def _open(self, path: Path) -> Iterator[BufferedReader]:
        try:
            with open_model_file(path, self.path.parent) as file:
                yield file
        except FileNotFoundError:
            missing = "there is no such file" if path == self.path else f"its weights in {path.name} are missing"
            raise self.error(missing) from None
        except OSError as error:
            where = "it" if path == self.path else path.name
            raise self.error(f"{where} cannot be read ({error.strerror or error})") from None

    def _size(self, path: Path) -> int:
        if path not in self._sizes:
            with self._open(path) as file:
                self._sizes[path] = os.fstat(file.fileno()).st_size
        return self._sizes[path]

    def _check(self, tensor: TensorProto) -> None:
        """Check that the tensor's data exists and has the size that its shape implies. Inline a small one."""
        reference = _reference(tensor)
        if tensor.data_type not in helper.get_all_tensor_dtypes() or not _is_shape(tensor.dims):
            raise self.error(f"the weight {tensor.name} has no valid type and shape")
        if tensor.data_type == TensorProto.STRING:
            if reference is not None:
                raise self.error(f"the weight {tensor.name} stores strings as external data, which ONNX does not allow")
            return
        expected = num_bytes_of(tensor.data_type, tuple(tensor.dims))
        if reference is None:
            try:
                length, is_message = len(raw_bytes(tensor)), False
            except ValueError:
                raise self.error(f"the data of the weight {tensor.name} does not match its type and shape") from None
        else:
            _, _, length, is_message = self._locate(reference, tensor)
        if not is_message and length != expected:
            raise self.error(f"the weight {tensor.name} has {length} bytes, its type and shape need {expected}")
        if reference is not None and expected <= INLINE_BYTES:
            tensor.CopyFrom(self.inlined(tensor))

    def _locate(self, reference: dict[str, str], tensor: TensorProto) -> tuple[Path, int, int, bool]:
        """File, offset and length in bytes, and whether these bytes are a whole tensor message."""
        path, is_message = self.path, _MESSAGE in reference
        try:
            if _RAW in reference or is_message:
                offset, length = map(int, reference[_MESSAGE if is_message else _RAW].split(":"))
            else:
                location = PurePosixPath(reference["location"])
                if location.is_absolute() or ".." in location.parts or not location.name:
                    raise self.error(f"the weight {tensor.name} lies outside of the model's folder, at {location}")
                path = self.path.parent / location
                offset = int(reference.get("offset", 0))
                length = int(reference.get("length", num_bytes_of(tensor.data_type, tuple(tensor.dims))))
        except (KeyError, ValueError):
            raise self.error(f"its reference to the data of the weight {tensor.name} is invalid") from None
        if min(offset, length) < 0 or offset + length > self._size(path):
            raise self.error(f"the weight {tensor.name} is incomplete: {path.name} was cut short")
        return path, offset, length, is_message


def raw_bytes(tensor: TensorProto) -> bytes:
    """The little-endian bytes of a tensor with inline data."""
    if not tensor.HasField("raw_data"):
        tensor = numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name)
    return bytes(tensor.raw_data)


def tensors_of(proto: ModelProto) -> Iterator[TensorProto]:
    """Every tensor: initialisers and attributes, including those in functions and in bodies of control flow."""
    yield from proto.graph.initializer
    todo = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while todo:
        node = todo.pop()
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for body in bodies(node):
            yield from body.initializer
            todo += body.node


def _has_valid_strings(message: Message) -> bool:
    """Whether all strings are valid UTF-8: protobuf returns bytes for a string that it cannot decode."""
    for field, content in message.ListFields():
        contents = [content] if isinstance(content, str | bytes | Message) else content
        if field.type == field.TYPE_STRING and not all(isinstance(each, str) for each in contents):
            return False
        if field.type == field.TYPE_MESSAGE and not all(map(_has_valid_strings, contents)):
            return False
    return True


def _is_shape(dims: Sequence[int]) -> bool:
    return len(dims) <= MAX_AXES and all(size >= 0 for size in dims)


def _reference(tensor: TensorProto) -> dict[str, str] | None:
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    return {entry.key: entry.value for entry in tensor.external_data}


# ---- protobuf's wire format ---------------------------------------------------------------------------------------


class _CorruptMessage(Exception):
    """The protobuf message is damaged. Never leaves this module."""


def _without_large_tensors(kind: str, file: BufferedReader, start: int, stop: int) -> bytes:
    """The encoded message with references in place of its large tensors."""
    if stop - start <= INLINE_BYTES:
        return _bytes_at(file, start, stop)
    if kind == "tensor":
        return _tensor_reference(file, start, stop)
    follow, parts, verbatim = _FIELDS[kind], bytearray(), start
    for number, wire_type, field_start, value_start, value_stop in _fields(file, start, stop):
        if number not in follow or wire_type != _BYTES or value_stop - value_start <= INLINE_BYTES:
            continue
        parts += _bytes_at(file, verbatim, field_start)
        inner = _without_large_tensors(follow[number], file, value_start, value_stop)
        parts += _varint(number << 3 | _BYTES) + _varint(len(inner)) + inner
        verbatim = value_stop
    return bytes(parts + _bytes_at(file, verbatim, stop))


def _tensor_reference(file: BufferedReader, start: int, stop: int) -> bytes:
    other_fields, key, place = bytearray(), _MESSAGE, (start, stop - start)
    for number, wire_type, field_start, value_start, value_stop in _fields(file, start, stop):
        if number == _TENSOR_STRINGS:  # strings have no fixed size, and are never weights
            return _bytes_at(file, start, stop)
        if number not in _TENSOR_DATA:
            other_fields += _bytes_at(file, field_start, value_stop)
        elif number == _TENSOR_RAW and wire_type == _BYTES:
            key, place = _RAW, (value_start, value_stop - value_start)
    reference = TensorProto(data_location=TensorProto.EXTERNAL)
    reference.external_data.add(key=key, value=f"{place[0]}:{place[1]}")
    return bytes(other_fields + reference.SerializeToString())


def _fields(file: BufferedReader, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The fields of a message: field number, wire type, start of the field, start and end of its value."""
    position = start
    while position < stop:
        field_start = position
        tag, position = _read_varint(file, position, stop)
        wire_type, value_start = tag & 7, position
        if wire_type == _VARINT:
            _, position = _read_varint(file, position, stop)
        elif wire_type == _BYTES:
            length, value_start = _read_varint(file, position, stop)
            position = value_start + length
        elif wire_type in (_FIXED32, _FIXED64):
            position += 4 if wire_type == _FIXED32 else 8
        else:
            raise _CorruptMessage
        if position > stop:
            raise _CorruptMessage
        yield tag >> 3, wire_type, field_start, value_start, position


def _read_varint(file: BufferedReader, position: int, stop: int) -> tuple[int, int]:
    """A number of at most 10 bytes, and the position after it."""
    value = 0
    file.seek(position)
    for index, byte in enumerate(file.read(min(10, stop - position))):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise _CorruptMessage


def _bytes_at(file: BufferedReader, start: int, stop: int) -> bytes:
    file.seek(start)
    data = file.read(stop - start)
    if len(data) < stop - start:
        raise _CorruptMessage
    return data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


Region = tuple[tuple[int, int], ...]


class Source(NamedTuple):
    """A weight that stays in the file, and the region of it that is taken: a range per axis."""

    tensor: TensorProto
    region: Region


def slice_reference(tensor: TensorProto, region: Region, name: str) -> TensorProto:
    """A reference to a region of a weight that is a reference itself; nothing is read."""
    ranges = ",".join(f"{start}-{stop}" for start, stop in region)
    sizes = ",".join(map(str, tensor.dims))
    reference = TensorProto(name=name, data_type=tensor.data_type, data_location=TensorProto.EXTERNAL)
    reference.dims.extend(stop - start for start, stop in region)
    reference.external_data.extend(tensor.external_data)
    reference.external_data.add(key=_SLICE, value=f"{sizes}:{ranges}")
    return reference


def source_of(tensor: TensorProto) -> Source | None:
    """The weight of which `tensor` is a region; None if it is a whole weight."""
    entry = next((each for each in tensor.external_data if each.key == _SLICE), None)
    if entry is None:
        return None
    sizes, _, ranges = entry.value.partition(":")
    source = TensorProto(name=tensor.name, data_type=tensor.data_type, data_location=TensorProto.EXTERNAL)
    source.dims.extend(map(int, sizes.split(",")))
    source.external_data.extend(each for each in tensor.external_data if each.key != _SLICE)
    region = tuple((int(start), int(stop)) for start, stop in (each.split("-") for each in ranges.split(",")))
    return Source(source, region)


def _region_of(data: memoryview, source: Source) -> memoryview:
    """The bytes of the region from those of the whole weight."""
    elements = np.frombuffer(data, _element(source.tensor)).reshape(tuple(source.tensor.dims))
    return _bytes_of(np.ascontiguousarray(elements[tuple(slice(start, stop) for start, stop in source.region)]))


def _element(tensor: TensorProto) -> np.dtype[np.void]:
    return np.dtype((np.void, helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize))


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
