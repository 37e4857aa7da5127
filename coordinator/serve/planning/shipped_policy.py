"""The placement policy that ships with Hearth, as a file of its package."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from coordinator.plan.graph.latency import doppler
from coordinator.plan.graph.latency.doppler.policy import Policy
from coordinator.plan.graph.latency.doppler.weights import policy_from_bytes
from hearth.errors import BadPolicy

SHIPPED_POLICY = Path(doppler.__file__).with_name("policy.safetensors")
log = logging.getLogger(__name__)


@cache
def usable_policy(path: Path = SHIPPED_POLICY) -> Policy | None:
    """The policy of a file, read when it is first needed; None, after one warning, if the file cannot be used."""
    try:
        return policy_from_bytes(path.read_bytes(), str(path))
    except OSError as error:
        fault = BadPolicy(path=str(path), reason=f"it cannot be read ({error.strerror})")
    except BadPolicy as error:
        fault = error
    log.warning("%s", fault)
    return None
