"""Planning of a graph with a policy: one learnt for it and its devices, in the coordinator's state, or the one that ships."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from coordinator.models.cache_files import read_cached, write_cached
from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.latency import doppler
from coordinator.plan.graph.latency.doppler.home_policy import HomePolicy
from coordinator.plan.graph.latency.doppler.policy import Policy, policy_bytes, policy_from_bytes
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.solution import PlanningResult
from hearth.errors import BadPolicy
from hearth.plan.plan import GraphPlan
from hearth.platform.units import format_seconds

SHIPPED_POLICY = Path(doppler.__file__).with_name("policy.safetensors")
log = logging.getLogger(__name__)


def plan_with_policy(
    request: GraphRequest, clock: Callable[[], float], progress: Callable[[str], None]
) -> PlanningResult[GraphPlan]:
    """`plan_graph`, with the learnt policy if there is one. With time to learn, it learns on, or the one that ships does.

    While requests wait, the one that ships is used: it finds better starts than the search would in the time of its samples.
    What it learns is kept for the next plan. The notes of the result name a file that cannot be used, and say so if no policy
    can learn. Raises as `plan_graph`.
    """
    path, notes = policy_path(request), list[str]()
    policy = _learnt_policy(path, notes)
    if policy is None and (request.learn_seconds or request.recovering):
        policy = usable_policy()
        if policy is None and request.learn_seconds:
            notes.append("--learn is ignored: this Hearth has no policy that could learn")
    home = HomePolicy(policy, request.learn_seconds)
    planned = plan_graph(request, clock, progress, home if policy else None)
    if home.policy is not None and home.num_episodes:
        learnt = f"learnt from {home.num_episodes} episodes in {format_seconds(request.learn_seconds)}"
        if path is not None:
            write_cached(path, policy_bytes(home.policy, {"episodes": str(home.num_episodes)}))
            learnt += f"; kept in {path}"
        notes.append(learnt)
    return replace(planned, notes=(*planned.notes, *notes))


def policy_path(request: GraphRequest) -> Path | None:
    """The file of the policy learnt for this graph and these devices; None: policies are not kept."""
    if not request.policies_dir:
        return None
    graph = (request.spec.name, request.model_hash, [operator.name for operator in request.spec.operators])
    devices = sorted(device.device_id for device in request.cluster.devices)
    graph_key, devices_key = (hashlib.sha256(json.dumps(each).encode()).hexdigest()[:16] for each in (graph, devices))
    return Path(request.policies_dir) / f"{graph_key}-{devices_key}.safetensors"


def _learnt_policy(path: Path | None, notes: list[str]) -> Policy | None:
    if path is None:
        return None
    try:
        return policy_from_bytes(read_cached(path), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        notes.append(f"The learnt policy {path} cannot be read: {error.strerror}.")
    except BadPolicy as error:
        notes.append(f"{error.explanation()} The next --learn replaces it.")
    return None


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
