"""Readers of bytes that strangers, apps, devices and model files supply: whatever the bytes, they raise our own errors only.

`make test` tries some damaged samples. `make fuzz` runs each target for FUZZ_SECONDS: guided by coverage if atheris installs,
else with hypothesis. To run one: `PYTHONPATH=tests:. .venv/bin/python tests/fuzz/test_fuzz.py TARGET SECONDS`.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

try:
    import atheris  # installed by `make fuzz` for itself
except ImportError:
    atheris = None
with atheris.instrument_imports(include=["coordinator", "hearth"]) if atheris else nullcontext():
    from support.messages import EXAMPLES
    from support.onnx_models import save_two_products

    from coordinator.models.checkpoint.checkpoint import Checkpoint
    from coordinator.models.onnx.file import OnnxFile
    from hearth.errors import HearthError
    from hearth.plan.common import VALUE_FORMATS, WireFormat
    from hearth.plan.phases import Phase
    from hearth.platform.security import admin_key, format_credential, new_device_key, new_home_key, parse_credential
    from hearth.wire import framing
    from hearth.wire import messages as wire
    from hearth.wire.codec import Codec

SCRATCH = tempfile.TemporaryDirectory(prefix="hearth-fuzz-")
FOLDER = Path(SCRATCH.name)


class Target(NamedTuple):
    """A reader, and bytes that it takes. It may raise HearthError."""

    read: Callable[[bytes], Any]
    samples: Callable[[], Iterable[bytes]]


def read_tile(data: bytes) -> None:
    """As one frame and as two, with the token that they have."""
    for frames in ([data], framing.split_frames([data])):
        with suppress(HearthError):
            framing.decode_tile(data[:16], frames)
    framing.unpack_array([data[:36], data[36:]])


def tiles() -> Iterable[bytes]:
    key, array = framing.TileKey(1, 2, 3, Phase.REDUCE_MLP, 4, 5), np.arange(24, dtype=np.float32).reshape(4, 6)
    for values, lz4 in itertools.product(VALUE_FORMATS, ("off", "on")):
        codec = Codec(WireFormat(values=values, lz4=lz4), 1e6, lambda: 0.0)
        yield b"".join(framing.encode_tile(bytes(16), key, array, codec))
    yield b"".join(framing.pack_array(array))


def read_key(data: bytes) -> None:
    """As text, and as the fields of each kind of key with their checksum: no other one gets beyond that."""
    parts = [data.decode(errors="surrogateescape")]
    signed = base64.urlsafe_b64encode(data + hashlib.sha256(data).digest()[:4]).decode()
    for text in [*parts, *(f"hearth-{kind}-1:{signed}" for kind in ("home", "admin", "app", "device"))]:
        with suppress(HearthError):
            parse_credential(text, "fuzz")


def keys() -> Iterable[bytes]:
    home = new_home_key()
    for key in (home, admin_key(home), new_device_key(home, "kitchen")):
        yield format_credential(key).encode()
        yield key.model_dump_json(exclude={"kind"}).encode()


def read_onnx(data: bytes) -> None:
    (FOLDER / "model.onnx").write_bytes(data)
    OnnxFile(FOLDER / "model.onnx")


def onnx_files() -> Iterable[bytes]:
    yield save_two_products(FOLDER / "sample.onnx", 2, 4).read_bytes()
    yield save_two_products(FOLDER / "sample.onnx", 64, 64).read_bytes()  # with a weight that stays in the file


def read_safetensors(data: bytes) -> None:
    """The file, and its header with the right length."""
    for content in (data, len(data).to_bytes(8, "little") + data):
        (FOLDER / "model.safetensors").write_bytes(content)
        with suppress(HearthError):
            Checkpoint(FOLDER)


def safetensors() -> Iterable[bytes]:
    yield json.dumps({"a": {"dtype": "F32", "shape": [2, 0], "data_offsets": [0, 0]}, "__metadata__": {}}).encode()
    yield b'{"a": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}' + bytes(4)


TARGETS = {
    "framing": Target(read_tile, tiles),
    "messages": Target(wire.decode, lambda: map(wire.encode, EXAMPLES)),
    "onnx": Target(read_onnx, onnx_files),
    "safetensors": Target(read_safetensors, safetensors),
    "credentials": Target(read_key, keys),
}


@st.composite
def damaged(draw: st.DrawFn, samples: list[bytes]) -> bytes:
    """A sample in which some bytes were replaced, added or removed."""
    data = bytearray(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(data)


def run(target: Target, **chosen: Any) -> None:
    """Read damaged samples and other bytes, as many as hypothesis is set to."""

    @settings(**chosen)
    @given(damaged(list(target.samples())) | st.binary(max_size=300))
    @example(b"")
    def read(data: bytes) -> None:
        with suppress(HearthError):
            target.read(data)

    read()


@pytest.mark.parametrize("name", TARGETS)
def test_reader_raises_our_errors_only(name: str) -> None:
    run(TARGETS[name])


def fuzz(target: Target, seconds: int) -> None:
    """Read bytes for so long; the first error that is not ours ends it, with the bytes that caused it."""
    if atheris is None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            run(target, max_examples=1000, deadline=None, database=None)
        return
    corpus = Path(tempfile.mkdtemp(dir=FOLDER))
    for number, sample in enumerate(target.samples()):
        (corpus / str(number)).write_bytes(sample)

    def read(data: bytes) -> None:
        with suppress(HearthError):
            target.read(data)

    limits = (f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=1024", "-artifact_prefix=.venv-tools/")
    atheris.Setup([sys.argv[0], *limits, str(corpus)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        fuzz(TARGETS[sys.argv[1]], int(sys.argv[2]))
    else:
        print(*TARGETS)
