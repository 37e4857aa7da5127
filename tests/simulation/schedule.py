"""Schedules: the hosts, requests and faults of one simulated run, generated from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

FaultKind = Literal[
    "kill worker", "stop worker", "kill agent", "stop agent", "stop host", "power cut", "cut", "isolate", "reset", "slow link",
    "disk full", "disk read-only", "disk failing", "rot", "kill coordinator", "stop coordinator", "hang worker",
    "dying worker", "restart agent", "restart coordinator", "reject coordinator",
]  # fmt: skip

# What may be wrong with one device until the home was asked whether it serves.
LASTING_KINDS: tuple[FaultKind, ...] = ("disk full", "disk read-only", "disk failing", "dying worker", "dying worker")

AGENT_RESTARTS = ("kill agent", "restart agent", "power cut")

# How often each fault occurs, relative to the others.
WEIGHTS: dict[FaultKind, float] = {
    "kill worker": 3, "stop worker": 2, "kill agent": 2, "stop agent": 2, "stop host": 2, "power cut": 1, "cut": 3,
    "isolate": 2, "reset": 2, "slow link": 1, "disk full": 1, "disk read-only": 0.5, "disk failing": 0.5, "rot": 1,
    "kill coordinator": 1.5, "stop coordinator": 1, "hang worker": 0.5, "restart agent": 1, "restart coordinator": 1.5,
}  # fmt: skip

FIRST_FAULT_SECONDS = 1.5  # workers load by then; the home serves at about 3 s, if nothing goes wrong
# From here on nothing goes wrong. Most homes are watched for a short time, so that there can be many of them; a few for long
# enough that a fault of any length, and what follows it, ends before the next one.
SHORT_SECONDS, LONG_SECONDS = 6.0, 12.0
LONG_FRACTION = 0.2
# How many homes have a damaged chunk when the plan is deployed that was made ahead for the loss of a device, at about 9 s.
ROT_BEFORE_LOSS = 0.03
LINKS_KNOWN_FRACTION = 0.75  # as in a home that has run before; to measure them takes a tenth of all messages
LAST_FAULT_MARGIN_SECONDS = 1.0  # between the last fault and the end of all
REQUEST_SECONDS = 100.0  # deadline of a call: ample
SHORT_DEADLINES = (0.3, 1.0, 3.0)  # of a call that may fail, in seconds
SHORT_DEADLINE_FRACTION = 0.15  # of the calls
OWN_KEY_FRACTION = 0.15  # of the homes with several devices: one of them has a key of its own
MAX_DEVICES = 5
# Of the homes with a standby: a firewall resets all connections of a coordinator that goes on, and refuses new ones. To its
# standby a leader looks as if it had ended. One that is stopped meanwhile does not know that its connections were closed.
REJECTED_FRACTION = 0.15


@dataclass(frozen=True)
class Fault:
    """A fault that lasts for `seconds`. `other` is the other end of a link."""

    at: float
    kind: FaultKind
    host: str
    other: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        where = f"{self.host}-{self.other}" if self.other else self.host
        return f"{self.at:7.3f} s: {self.kind} {where} for {self.seconds:.2f} s"


@dataclass(frozen=True)
class Call:
    """One call of a client: `length` tokens of a step, or of an answer."""

    at: float
    client: str
    number: int
    length: int
    first_token: int
    timeout_seconds: float = REQUEST_SECONDS


@dataclass(frozen=True)
class Schedule:
    """Everything that a run does by itself."""

    seed: int
    seconds: float  # from here on nothing goes wrong
    num_devices: int
    causal: bool
    calls: tuple[Call, ...]
    faults: tuple[Fault, ...]
    step_seconds: float  # compute time of one step
    revoke_at: float | None  # when the app of the client `p1` is revoked
    standby: bool  # whether a second coordinator stands by
    lasting: Fault | None  # one that does not end in time: the home must serve without this device
    thorough: bool  # whether to wait until all devices are in use again, which takes minutes of virtual time
    links_known: bool = False  # whether the coordinators have measured the links in an earlier run
    own_key: str = ""  # a device with a key of its own, which is admitted at the start; the others use the home key
    revoke_device_at: float | None = None  # when this key is revoked

    @property
    def devices(self) -> list[str]:
        return [f"d{number}" for number in range(self.num_devices)]

    @property
    def coordinators(self) -> list[str]:
        return ["c0", "c1"] if self.standby else ["c0"]

    @property
    def clients(self) -> list[str]:
        return sorted({call.client for call in self.calls})

    def __str__(self) -> str:
        kind = "decoder" if self.causal else "encoder"
        revoked = f", p1 revoked at {self.revoke_at:.2f} s" if self.revoke_at is not None else ""
        standby = ", a standby" if self.standby else ""
        own_key = f", {self.own_key} with its own key" if self.own_key else ""
        if self.revoke_device_at is not None:
            own_key += f", revoked at {self.revoke_device_at:.2f} s"
        steps = f"{kind} with steps of {self.step_seconds:g} s"
        lasting = [f"  {self.lasting}, and until the home serves"] if self.lasting is not None else []
        lines = [
            f"seed {self.seed}: {self.num_devices} devices{standby}{own_key}, {steps}, {len(self.calls)} calls{revoked}"
        ]
        return "\n".join([*lines, *lasting, *(f"  {fault}" for fault in self.faults)])


def generate(seed: int) -> Schedule:
    """The schedule of a seed."""
    random = Random(f"schedule {seed}")
    num_devices = min(random.choice((1, 2, 2, 2, 3, 3, 3, 3, 4, 5)), MAX_DEVICES)
    causal = random.random() < 0.5
    seconds = LONG_SECONDS if random.random() < LONG_FRACTION else SHORT_SECONDS
    devices = [f"d{number}" for number in range(num_devices)]
    clients = ["p0", "p1"][: random.choice((1, 2))]
    standby = random.random() < 0.4
    coordinators = ["c0", "c1"] if standby else ["c0"]
    faults: list[Fault] = []
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        # Half of the further faults hit the recovery from another one.
        near = random.choice(faults).at if faults and random.random() < 0.5 else None
        faults.append(_fault(random, seconds, devices, coordinators, clients, near))
    if num_devices > 1 and random.random() < ROT_BEFORE_LOSS:
        seconds = LONG_SECONDS
        damaged, lost = random.sample(devices, 2)
        at = random.uniform(9.5, 10.2)
        loss = Fault(at + random.uniform(0.05, 0.8), "kill agent", lost, seconds=seconds - at - 0.8)
        faults = [Fault(at, "rot", damaged), loss]
    stopped = any(fault.kind == "stop coordinator" for fault in faults)
    if standby and not stopped and (others := Random(f"rejected {seed}")).random() < REJECTED_FRACTION:
        at = others.uniform(FIRST_FAULT_SECONDS + 1.0, seconds - LAST_FAULT_MARGIN_SECONDS)
        length = min(others.choice((0.2, 0.6, 1.0, 4.0)) * others.uniform(0.7, 1.3), seconds - at)
        spared = others.choice(("", *devices))  # a device that the coordinator still reaches
        faults.append(Fault(at, "reject coordinator", others.choice(("c0", "c0", "c1")), spared, length))
    faults.sort(key=lambda fault: fault.at)
    calls = []
    for client in clients:
        times = sorted(random.uniform(1.0, seconds) for _ in range(random.randint(2, 5)))
        for number, at in enumerate(times):
            length = random.choice((1, 2, 6)) if causal else random.randint(1, 12)
            calls.append(Call(at, client, number, length, random.randrange(1, 900)))
    revoke_at = random.uniform(2.0, seconds - 1.0) if "p1" in clients and random.random() < 0.2 else None
    step_seconds = random.choice((0.004, 0.05, 0.15) if causal else (0.004, 0.1, 0.6))
    lasting = None
    if num_devices > 1 and random.random() < 0.08:
        lasting = Fault(
            random.choice((0.0, random.uniform(1.0, 4.0))), random.choice(LASTING_KINDS), random.choice(devices)
        )
    if standby and lasting is not None and lasting.kind.startswith("disk"):
        # An agent that starts again without its disk has forgotten its vote; of two voters, none may go on then.
        faults = [fault for fault in faults if fault.host != lasting.host or fault.kind not in AGENT_RESTARTS]
    thorough = random.random() < 0.05 and lasting is None
    links_known = random.random() < LINKS_KNOWN_FRACTION
    calls = [
        replace(call, timeout_seconds=random.choice(SHORT_DEADLINES) * random.uniform(0.7, 1.3))
        if random.random() < SHORT_DEADLINE_FRACTION
        else call
        for call in calls
    ]
    own_key, revoke_device_at = "", None
    if num_devices > 1 and random.random() < OWN_KEY_FRACTION:
        own_key = random.choice(devices)
        # Of two voters with a standby, the one that is left may not go on without the tie breaker.
        if lasting is None and random.random() < 0.7 and (num_devices > 2 or not standby):
            revoke_device_at = random.uniform(2.0, seconds - 1.0)
    return Schedule(
        seed,
        seconds,
        num_devices,
        causal,
        tuple(calls),
        tuple(faults),
        step_seconds,
        revoke_at,
        standby,
        lasting,
        thorough,
        links_known,
        own_key,
        revoke_device_at,
    )


def _fault(
    random: Random, end: float, devices: list[str], coordinators: list[str], clients: list[str], near: float | None
) -> Fault:
    kind = random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    last = end - LAST_FAULT_MARGIN_SECONDS
    at = random.uniform(FIRST_FAULT_SECONDS, last)
    if near is not None:
        at = min(near + random.uniform(0.0, 2.5), last)
    seconds = min(random.choice((0.3, 1.0, 2.5, 5.0, 9.0)) * random.uniform(0.7, 1.3), end - at)
    host, other = random.choice(devices), ""
    if kind in ("cut", "reset", "slow link"):
        host, other = random.sample([*coordinators, *devices, *clients], 2)
    elif kind == "isolate":
        host = random.choice([*coordinators, *devices, *clients])
    elif kind.startswith("disk"):
        host = random.choice([*coordinators, *devices])
    elif kind.endswith("coordinator"):
        host = random.choice(coordinators)
    return Fault(at, kind, host, other, seconds)
