"""A region of a weight that stays in the model file: a reference to the whole weight, with the ranges that are taken."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import TensorProto, helper

_SLICE = "hearth.slice"  # our key among the entries of a tensor's external data

Region = tuple[tuple[int, int], ...]


class Source(NamedTuple):
    """The whole weight, and the region of it: a range per axis."""

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


def read_slice(data: memoryview, source: Source) -> memoryview:
    """The bytes of the region from those of the whole weight: a view if they are consecutive, else a copy of the region."""
    item_bytes = helper.tensor_dtype_to_np_dtype(source.tensor.data_type).itemsize
    elements = np.frombuffer(data, np.dtype((np.void, item_bytes))).reshape(tuple(source.tensor.dims))
    region = elements[tuple(slice(start, stop) for start, stop in source.region)]
    return np.ascontiguousarray(region).reshape(-1).view(np.uint8).data
