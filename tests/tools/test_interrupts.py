"""The exit status after an interrupt."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import signal, sys
from tools import interrupts

interrupts.install()
try:
    exec("signal.raise_signal(signal.{name})")  # as in a dataclass that an import makes
except KeyboardInterrupt:
    interrupts.ignore()
    signal.raise_signal(signal.{name})
sys.exit(130)
"""


def test_status_stays_after_an_interrupt_while_a_string_is_executed(tmp_path: Path) -> None:
    """As `python -m`, as which benchmarks run."""
    root = Path(__file__).parents[2]
    for number in (signal.SIGINT, signal.SIGTERM):
        (tmp_path / "program.py").write_text(_PROGRAM.format(name=number.name))
        command = [sys.executable, "-m", "program"]
        done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, timeout=60, check=False)
        assert done.returncode == 130
