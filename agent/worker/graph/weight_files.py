"""Files of whole weights, which onnxruntime maps: a chunk in the store each, or joined from several in the scratch folder."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from hearth.errors import ChunkCorrupt, ChunkMissing, StoreFull
from hearth.wire.messages import ArrayChunks

_COPY_BYTES = 1 << 20  # buffer size for joining chunks: large enough that system calls cost little


class WeightFiles:
    """Context manager: joined weights are removed at its end. onnxruntime's mappings of them stay valid.

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
