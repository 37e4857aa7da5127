"""safetensors checkpoints as memory-mapped files: a single file, or shards with an index. Data is read when needed.

The header is parsed here and not by the library, because the library's numpy loader does not support bfloat16 and the
coordinator does not load torch. The format (8 bytes of length, JSON, raw data) is documented and fixed.
"""

from __future__ import annotations

import json
import math
import mmap
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coordinator.models.limits import MAX_AXES, MAX_HEADER_BYTES
from coordinator.models.model_files import open_model_file, read_model_file
from hearth.errors import BadCheckpoint

# Mapped pages that may stay resident: the tensors of a layer, from which many chunks are cut one after the other, but not
# the whole checkpoint, which can be larger than memory.
_MAX_RESIDENT_BYTES = 64 << 20
# Copied at a time from a tensor above `_MAX_RESIDENT_BYTES`, so that little of it is resident.
_COPY_BLOCK_BYTES = 4 << 20
# The format's dtype -> our name, and the numpy type of the raw bytes.
_DTYPES = {"F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "BF16": ("bfloat16", "<u2")}
# File next to the model directory of a standby, whose checkpoint holds no weights but only their names and shapes. It names the
# directory of the model itself on the computer of the first leader.
COPY_MARKER = "origin.json"
_HAS_MADVISE = hasattr(mmap, "MADV_DONTNEED")  # not on Windows
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class _Tensor(NamedTuple):
    file: _MappedFile
    dtype: str  # the format's name
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int


class _MappedFile:
    """One mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_model_file(path) as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise BadCheckpoint(path=str(path), reason="there is no such file") from None
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None

    def close(self) -> None:
        """Unmap the file. If arrays still refer to it, it is unmapped with the last of them."""
        with suppress(BufferError):
            self.map.close()

    def read(self, start: int, into: np.ndarray[Any, Any]) -> None:
        """Fill a contiguous array. Raises BadCheckpoint."""
        try:
            with open_model_file(self.path) as file:  # a separate handle: several threads read at different positions
                file.seek(start)
                if file.readinto(into.data) < into.nbytes:
                    raise self._bad("it was cut short while it was read")
        except OSError as error:
            raise self._unreadable(error) from None

    def tensors(self) -> dict[str, _Tensor]:
        data = self.map
        if len(data) < 8:
            raise self._bad("it is too short for a header")
        header_bytes = int.from_bytes(data[:8], "little")
        if header_bytes > len(data) - 8:
            raise self._bad("it was cut short, or is not a safetensors file")
        if header_bytes > MAX_HEADER_BYTES:
            raise self._bad(f"its header has {header_bytes} bytes, and at most {MAX_HEADER_BYTES} are read")
        try:
            header = json.loads(data[8 : 8 + header_bytes])
            entries = {str(name): entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {name: self._tensor(name, entry, 8 + header_bytes) for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._bad("its header cannot be read") from None
        end = 8 + header_bytes
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
            if tensor.start != end:
                raise self._bad("its tensors overlap or leave gaps")
            end = tensor.stop
        if end != len(data):
            raise self._bad(f"it has {len(data)} bytes, its header describes {end}: it was cut short or appended to")
        return tensors

    def _tensor(self, name: str, entry: dict[str, Any], data_start: int) -> _Tensor:
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
        return _Tensor(self, dtype, shape, data_start + start, data_start + stop)

    def release_pages(self, start: int, stop: int) -> None:
        """Release the pages of these bytes from this process (MADV_DONTNEED); the page cache may keep them."""
        start -= start % mmap.PAGESIZE
        if _HAS_MADVISE and stop > start:
            self.map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _unreadable(self, error: Exception) -> BadCheckpoint:
        return self._bad(f"it cannot be read ({getattr(error, 'strerror', None) or error})")

    def _bad(self, reason: str) -> BadCheckpoint:
        return BadCheckpoint(path=str(self.path), reason=reason)


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """All tensors of a model directory, by name. Raises BadCheckpoint, which names the file and the fault."""

    def __init__(self, model_dir: Path) -> None:
        self.path = model_dir
        self._files: list[_MappedFile] = []
        self._tensors: dict[str, _Tensor] = {}
        self._recent: dict[_Tensor, None] = {}  # resident tensors, least recently used first
        try:
            for path, listed in _files_of(model_dir).items():
                self._add(path, listed)
        except BadCheckpoint:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self._files)

    def close(self) -> None:
        """Unmap the files. If arrays still refer to one, it is unmapped with the last of them."""
        for file in self._files:
            file.close()

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> str:
        """`float32`, `float16` or `bfloat16`."""
        tensor = self._tensor(name)
        if tensor.dtype not in _DTYPES:
            reason = f"the tensor {name} holds {tensor.dtype}, not floats"
            raise BadCheckpoint(path=str(tensor.file.path), reason=reason)
        return _DTYPES[tensor.dtype][0]

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only view into the mapped file; bfloat16 as its raw 16 bits."""
        self.dtype(name)
        tensor = self._tensor(name)
        dtype = np.dtype(_DTYPES[tensor.dtype][1])
        flat = np.frombuffer(tensor.file.map, dtype, count=math.prod(tensor.shape), offset=tensor.start)
        return flat.reshape(tensor.shape)

    def copy_view(self, name: str, view: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A C-contiguous copy of `view`, which is part of `array(name)`. Thread-safe.

        Only a bounded part of the files stays resident, whatever their size. Raises BadCheckpoint.
        """
        tensor = self._tensor(name)
        shift = tensor.start - self.array(name).ctypes.data  # from a memory address to an offset in the file
        for layout in (view, view.T):
            if layout.flags.c_contiguous:  # one run of bytes: reading it is cheaper than paging it in for one use
                copy = np.empty(layout.shape, layout.dtype)
                tensor.file.read(layout.ctypes.data + shift, copy)
                return copy if layout is view else np.ascontiguousarray(copy.T)
        if tensor.stop - tensor.start <= _MAX_RESIDENT_BYTES:
            self._mark_used(tensor)
            return np.array(view, order="C")
        return _copy_by_blocks(tensor.file, view, shift)

    def _mark_used(self, tensor: _Tensor) -> None:
        """Keep this tensor resident, since other parts of it are needed soon, and release the least recently used ones.

        Thread-safe without a lock: each dictionary operation is atomic, and releasing pages twice does no harm.
        """
        self._recent.pop(tensor, None)
        self._recent[tensor] = None
        resident = list(self._recent)
        num_bytes = sum(each.stop - each.start for each in resident)
        for oldest in resident:
            if num_bytes <= _MAX_RESIDENT_BYTES:
                break
            num_bytes -= oldest.stop - oldest.start
            self._recent.pop(oldest, None)
            oldest.file.release_pages(oldest.start, oldest.stop)

    def _add(self, path: Path, listed: set[str]) -> None:
        file = _MappedFile(path)
        self._files.append(file)
        tensors = file.tensors()
        if missing := listed - tensors.keys():
            reason = f"it lacks the tensor {min(missing)}, which the index lists for it"
            raise BadCheckpoint(path=str(path), reason=reason)
        self._tensors.update(tensors)

    def _tensor(self, name: str) -> _Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise BadCheckpoint(path=str(self.path), reason=f"the tensor {name} is missing") from None


def _copy_by_blocks(file: _MappedFile, view: np.ndarray[Any, Any], shift: int) -> np.ndarray[Any, Any]:
    """Like `np.array`, for a view that spans more of the file than may be resident."""
    copy = np.empty(view.shape, view.dtype)
    slowest = int(np.argmax(view.strides))  # copying along this axis reads the file from start to end once
    target, source = np.moveaxis(copy, slowest, 0), np.moveaxis(view, slowest, 0)
    count = max(_COPY_BLOCK_BYTES // source.strides[0], 1)
    for first in range(0, source.shape[0], count):
        block = source[first : first + count]
        target[first : first + count] = block
        start = block.ctypes.data + shift
        extent = sum((size - 1) * stride for size, stride in zip(block.shape, block.strides, strict=True))
        file.release_pages(start, start + extent + block.itemsize)
    return copy


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
