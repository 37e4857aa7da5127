"""An emulated edge cluster on one Linux machine: network namespaces, `tc tbf` links, CPU and memory cgroups.

`Testbed` is the context manager for tests and benchmarks; `python -m tools.testbed` is the command.
"""

from tools.testbed.cluster import Testbed
from tools.testbed.scenario import Device, Scenario, load_scenario

__all__ = ["Device", "Scenario", "Testbed", "load_scenario"]
