"""The malicious worker of a home, as a benchmark sees it: `malicious/sitecustomize.py` runs in it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tools.bench.damaged_copies import Order
from tools.bench.fault_home import FaultHome
from tools.bench.results import REPOSITORY

_CODE = Path(__file__).parent / "malicious"
_END_SECONDS = 0.5  # for the worker to notice that its order is gone, and to report


class MaliciousWorker:
    """The last device's worker. Start its agent with `install` before the home's load begins."""

    def __init__(self, home: FaultHome) -> None:
        self._home = home
        self._order = home.testbed.folder / home.names[-1] / "store" / "malicious"
        self._report = self._order.with_suffix(".report")
        self._dropped = 0  # messages that workers had refused when the order was given
        self._reported = 0  # characters of the report then

    def install(self) -> None:
        """Start the device's agent so that its workers follow orders, deploy again and start the load."""
        name = self._home.names[-1]
        path = os.pathsep.join([str(_CODE), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        self._home.stop_agent(name)
        self._home.testbed.start_agent(name, environment={"PYTHONPATH": path, "MALICIOUS_ORDER": str(self._order)})
        self._home.redeploy()

    def begin(self, order: Order) -> None:
        """Give the order."""
        self._dropped, self._reported = self._home.look().dropped, len(self._lines())
        part = self._order.with_suffix(".part")
        part.write_text(json.dumps(order._asdict()))
        part.replace(self._order)

    def end(self) -> None:
        """Take the order back."""
        self._order.unlink()

    def report(self) -> dict[str, Any]:
        """What was done since `begin`, once it has ended; `errors`: messages that other workers refused."""
        time.sleep(_END_SECONDS)
        reports = [json.loads(line) for line in self._lines()[self._reported :].splitlines()]
        return {
            "frames": sum(each["frames"] for each in reports),
            "cpu_seconds": sum(each["cpu_seconds"] for each in reports),
            "errors": max(self._home.look().dropped - self._dropped, 0),
        }

    def _lines(self) -> str:
        return self._report.read_text() if self._report.exists() else ""
