"""An emulated edge cluster on one Linux machine: network namespaces, `tc tbf` links, CPU and memory cgroups.

`Testbed` is the context manager for tests and benchmarks.
"""

from tools.testbed.cluster import Testbed
from tools.testbed.scenario import EmulatedDevice, Scenario, load_scenario

__all__ = ["EmulatedDevice", "Scenario", "Testbed", "load_scenario"]
