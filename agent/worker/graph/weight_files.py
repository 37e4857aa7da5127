"""Files of whole weights in the store, which onnxruntime maps: a chunk each, or joined from several."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from hearth.errors import ChunkCorrupt, ChunkMissing, StoreFull
from hearth.files import PART_SUFFIX  # the store removes such files when it starts, in case this process is killed
from hearth.wire.messages import ArrayChunks

_COPY_BYTES = 1 << 20  # buffer size for joining chunks: large enough that system calls cost little


class WeightFiles:
    """Context manager: temporary files in the store, removed at its end. onnxruntime's mappings of them stay valid."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._joined: dict[tuple[str, ...], Path] = {}  # by chunks
        self._temporary: list[Path] = []
        for leftover in store.glob(f"*{PART_SUFFIX}"):  # of a worker that was killed while loading
            leftover.unlink(missing_ok=True)

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def new(self, kind: str, folder: Path) -> Path:
        """The name of a new temporary file."""
        self._temporary.append(folder / f"{secrets.token_hex(8)}.{kind}{PART_SUFFIX}")
        return self._temporary[-1]

    def path(self, weight: ArrayChunks, num_bytes: int) -> Path:
        """The file of a weight, joined once from several chunks. Raises ChunkMissing, ChunkCorrupt and StoreFull."""
        paths = [chunk_path(self.store, chunk) for chunk in weight.chunks]
        if sum(path.stat().st_size for path in paths) != num_bytes:
            raise ChunkCorrupt(chunk=f"{weight.chunks[0][:12]} ({weight.name})", where=str(self.store))
        if len(paths) == 1:
            return paths[0]
        if weight.chunks not in self._joined:
            joined = self.new("weight", paths[0].parent)
            self._join(paths, joined, num_bytes)
            self._joined[weight.chunks] = joined
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
