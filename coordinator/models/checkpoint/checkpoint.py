"""safetensors checkpoints: a single file, or shards with an index. Data is read when needed.

The header is parsed here and not by the library, because the library's numpy loader does not support bfloat16 and the
coordinator does not load torch. The format (8 bytes of length, JSON, raw data) is documented and fixed.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coordinator.models.limits import MAX_AXES, MAX_HEADER_BYTES
from coordinator.models.model_files import open_model_file, read_model_file, read_region
from hearth.errors import BadCheckpoint

# Largest tensor that stays in memory after a part of its columns was read: those of other chunks are needed next.
_MAX_KEPT_BYTES = 64 << 20
# The format's dtype -> our name, and the numpy type of the raw bytes.
_DTYPES = {"F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "BF16": ("bfloat16", "<u2")}
# File next to the model directory of a standby, whose checkpoint holds no weights but only their names and shapes. It names the
# directory of the model itself on the computer of the first leader.
COPY_MARKER = "origin.json"
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class _Tensor(NamedTuple):
    path: Path
    dtype: str  # the format's name
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int


class _Header:
    """The header of a safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_model_file(path) as file:
                self._num_bytes = os.fstat(file.fileno()).st_size
                header_bytes = int.from_bytes(file.read(8), "little")
                self._data_start = 8 + header_bytes
                if self._num_bytes < 8:
                    raise self._bad("it is too short for a header")
                if self._data_start > self._num_bytes:
                    raise self._bad("it was cut short, or is not a safetensors file")
                if header_bytes > MAX_HEADER_BYTES:
                    raise self._bad(f"its header has {header_bytes} bytes, and at most {MAX_HEADER_BYTES} are read")
                self._text = file.read(header_bytes)
        except FileNotFoundError:
            raise self._bad("there is no such file") from None
        except OSError as error:
            raise _unreadable(path, error) from None

    def tensors(self) -> dict[str, _Tensor]:
        try:
            header = json.loads(self._text)
            entries = {str(name): entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {name: self._tensor(name, entry) for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._bad("its header cannot be read") from None
        end = self._data_start
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
            if tensor.start != end:
                raise self._bad("its tensors overlap or leave gaps")
            end = tensor.stop
        if end != self._num_bytes:
            raise self._bad(
                f"it has {self._num_bytes} bytes, its header describes {end}: it was cut short or appended to"
            )
        return tensors

    def _tensor(self, name: str, entry: dict[str, Any]) -> _Tensor:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        if (
            dtype not in _ITEM_BYTES
            or len(shape) > MAX_AXES
            or not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
        ):
            raise self._bad(f"the tensor {name} has the dtype {dtype} and the shape {shape[:MAX_AXES]}")
        if stop - start != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise self._bad(f"the tensor {name} has {stop - start} bytes for the shape {shape} of {dtype}")
        return _Tensor(self.path, dtype, shape, self._data_start + start, self._data_start + stop)

    def _bad(self, reason: str) -> BadCheckpoint:
        return BadCheckpoint(path=str(self.path), reason=reason)


class Checkpoint:
    """All tensors of a model directory, by name. Raises BadCheckpoint, which names the file and the fault."""

    def __init__(self, model_dir: Path) -> None:
        self.path = model_dir
        self._tensors: dict[str, _Tensor] = {}
        self._kept: tuple[str, np.ndarray[Any, Any]] | None = (
            None  # the last tensor of which columns were read, and its name
        )
        files = _files_of(model_dir)
        self.files = tuple(files)
        for path, listed in files.items():
            tensors = _Header(path).tensors()
            if missing := listed - tensors.keys():
                reason = f"it lacks the tensor {min(missing)}, which the index lists for it"
                raise BadCheckpoint(path=str(path), reason=reason)
            self._tensors.update(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> str:
        """`float32`, `float16` or `bfloat16`."""
        tensor = self._tensor(name)
        if tensor.dtype not in _DTYPES:
            reason = f"the tensor {name} holds {tensor.dtype}, not floats"
            raise BadCheckpoint(path=str(tensor.path), reason=reason)
        return _DTYPES[tensor.dtype][0]

    def read(self, name: str, region: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """A C-contiguous copy of a part of a tensor, a slice for each axis; bfloat16 as its raw 16 bits. Thread-safe."""
        self.dtype(name)
        tensor = self._tensor(name)
        if tensor.stop - tensor.start > _MAX_KEPT_BYTES or all(each == slice(None) for each in region[1:]):
            return self._read(tensor, region)
        kept = self._kept
        if kept is None or kept[0] != name:
            kept = self._kept = (name, self._read(tensor, (slice(None),) * len(region)))
        return np.array(kept[1][region], order="C")

    def _read(self, tensor: _Tensor, region: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        try:
            with open_model_file(tensor.path) as file:
                return read_region(file, tensor.start, tensor.shape, _DTYPES[tensor.dtype][1], region)
        except OSError as error:
            raise _unreadable(tensor.path, error) from None

    def _tensor(self, name: str) -> _Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise BadCheckpoint(path=str(self.path), reason=f"the tensor {name} is missing") from None


def _unreadable(path: Path, error: OSError) -> BadCheckpoint:
    return BadCheckpoint(path=str(path), reason=f"it cannot be read ({error.strerror or error})")


def _files_of(model_dir: Path) -> dict[Path, set[str]]:
    """The files of a checkpoint, with the tensors that the index lists for each."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.exists():
        return {single: set()}
    if not index.exists():
        others = sorted(path.name for path in model_dir.glob("*.bin")) if model_dir.is_dir() else []
        what = f"it holds {others[0]}, but no safetensors file" if others else "it holds no model.safetensors"
        raise BadCheckpoint(path=str(model_dir), reason=f"{what} (other formats can run code when read)")
    try:
        weight_map = json.loads(read_model_file(index))["weight_map"]
        files: dict[Path, set[str]] = {}
        for tensor, name in weight_map.items():
            if Path(name).name != name:
                raise BadCheckpoint(path=str(index), reason=f"it names a file outside its directory: {name}")
            files.setdefault(model_dir / name, set()).add(tensor)
        return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadCheckpoint(path=str(index), reason="the index cannot be read") from None
