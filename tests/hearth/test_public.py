"""Import cost of the package, and its public names."""

from __future__ import annotations

import inspect
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
def test_imports_load_no_heavy_libraries(statement: str, forbidden: tuple[str, ...]) -> None:
    pytest.importorskip("psutil")
    code = f"{statement}\nimport sys\nprint([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    import hearth

    assert sorted(hearth.__all__) == ["AsyncHome", "HearthError", "Home", "__version__", "connect", "connect_async"]
    assert all(getattr(hearth, name) for name in hearth.__all__)
    with pytest.raises(AttributeError):
        _ = hearth.nonsense


def test_sync_and_async_clients_have_equal_signatures() -> None:
    from hearth import AsyncHome, Home

    calls = {name: call for name, call in vars(AsyncHome).items() if name[0] != "_" and name not in ("open", "close")}
    assert len(calls) > 12
    for name, call in calls.items():
        synchronous = getattr(Home, name)
        assert inspect.signature(synchronous).parameters == inspect.signature(call).parameters, name
        assert not inspect.iscoroutinefunction(synchronous), name
        assert inspect.getdoc(synchronous), name
    assert "`for token in home.generate" in str(inspect.getdoc(Home.generate))
