"""What importing costs, and the public names."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import hearth", ("torch", "onnxruntime", "numpy", "zeroconf", "transformers")),
        ("import hearth; hearth.connect", ("torch", "onnxruntime", "numpy", "zeroconf")),
        ("import hearth.wire.framing", ("torch", "lz4", "zeroconf")),
        ("import agent.daemon.main, agent.daemon.daemon", ("torch", "onnxruntime", "numpy")),
        ("import coordinator.cli.app", ("torch", "onnxruntime", "transformers")),
    ],
)
def test_importing_loads_nothing_heavy(statement: str, forbidden: tuple[str, ...]) -> None:
    pytest.importorskip("psutil")
    code = f"{statement}\nimport sys\nprint([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_these() -> None:
    import hearth

    assert sorted(hearth.__all__) == [
        "AsyncHome",
        "HearthError",
        "Home",
        "__version__",
        "connect",
        "connect_async",
    ]
    assert all(getattr(hearth, name) for name in hearth.__all__)
    with pytest.raises(AttributeError):
        _ = hearth.nonsense
