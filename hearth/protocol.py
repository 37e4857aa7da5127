"""The protocol version, size limits that both ends of a connection enforce, names, and timeouts that must agree. Pure."""

from __future__ import annotations

PROTOCOL_VERSION = 4  # contained in every message; peers of another version are refused
DEFAULT_DEPLOYMENT = "default"  # name of the deployment of a coordinator that serves one model
MAX_MESSAGE_BYTES = 4 << 20  # a plan for 256 devices with its chunk list stays below this
MAX_PAYLOAD_FRAME_BYTES = 64 << 20  # one chunk, or one tensor; bounds the memory that a peer can make us allocate
MAX_PAYLOAD_FRAMES = 64  # per message; 32 arrays of two frames each
# What workers should be confined in: Landlock's rules for files and for TCP ports, and a filter of system calls.
CONFINEMENT = ("files", "network", "calls")

# ---- timeouts that must agree -----------------------------------------------------------------------------------------
#
# All in seconds. A caller waits longer for an answer than the program that it asked, so that the inner, more specific error
# arrives first: worker < agent < coordinator < client.

# Liveness: interval < timeout of one heartbeat < dead < lease. The coordinator gives up a silent device before the
# device's lease ends, and one late heartbeat has no effect.
HEARTBEAT_SECONDS = 0.5  # interval of heartbeats
HEARTBEAT_TIMEOUT_SECONDS = 0.75  # of one heartbeat: several attempts fit before a device is dead
# Without an answer, until the coordinator knows how long the device is silent when it is well (`devices.registry`).
DEAD_SECONDS = 3.0  # too long for a short loss of Wi-Fi
LEASE_SECONDS = 5.0  # ten heartbeats; a second coordinator waits at most this long for the lease of a dead one
# With a standby, which takes over when the leases have run out: four heartbeats. Longer on a device that is often silent, whose
# lease would end at each silence otherwise (`devices.registry`).
STANDBY_LEASE_SECONDS = 2.0
# A coordinator counts on a lease for this much less than the agent grants it: for clocks that run at different rates.
LEASE_MARGIN_SECONDS = 0.25
# An agent gives the lease of a coordinator that has ended to a standby once the connection has been closed for this long:
# several times what a coordinator that goes on takes to connect again after a reset.
CLOSED_LEASE_SECONDS = 0.75
# For which a coordinator that goes on counts on a lease after the connection was closed: less, since the other end may have
# noticed it sooner.
CLOSED_LEASE_COUNTED_SECONDS = 0.5
# Interval at which an agent looks for expired leases; a stream of tokens outlives its lease by at most this.
LEASE_CHECK_SECONDS = 1.0
# A worker without a lease computes nothing, and waits this long for a coordinator to take it over: a restart takes seconds,
# that of a slow computer a minute. Then it is stopped, which frees its memory.
ADOPTION_SECONDS = 60.0

# The longest round trip over a wire at home, where it is a fraction of a millisecond. Over radio and powerline it is longer.
WIRE_ROUND_TRIP_SECONDS = 2e-3

# Added by the coordinator to a timeout that it sends along with a request.
REPLY_MARGIN_SECONDS = 10.0  # long enough for a round trip over bad Wi-Fi, and for a busy event loop at both ends
GRAPH_REPLY_MARGIN_SECONDS = 5.0  # requests to an ONNX graph: shorter, since users wait for them

# Liveness of a worker, as its agent sees it.
WORKER_SIGN_SECONDS = 0.5  # interval of a worker's signs of life; each is one small message over a private socket
# The same while it computes: a wait for a peer that lasts too long is known to the coordinator almost at once.
WORKER_STEP_SIGN_SECONDS = 0.1
# An agent reports the states of its workers at least that often while a coordinator watches them, and each change at once.
WATCH_SECONDS = 5.0

# Start of a worker. Importing torch takes 20 s from a Raspberry Pi's SD card; reading a large shard adds to that.
WORKER_LOAD_SECONDS = 300.0  # the agent waits for its worker to start and load
# The same for a process that goes on with another plan, besides the reading of its weights: it has the libraries. Requests wait
# for it, and a new process takes its place.
WORKER_RELOAD_SECONDS = 10.0
# The coordinator waits for `Load`; the agent also verifies the chunks' hashes.
LOAD_SECONDS = WORKER_LOAD_SECONDS + 20.0
WORKER_CONNECT_SECONDS = 30.0  # the agent waits for its worker's `ConnectPeers`, and a worker for the keys of its peers
CONNECT_SECONDS = WORKER_CONNECT_SECONDS + 5.0  # the coordinator waits for `ConnectPeers`

# One peer fetches chunks from another, or measures the link to it, while the other one's link port admits it.
LINK_OPEN_MARGIN_SECONDS = 5.0  # the port stays open for longer than the request may take
MAX_LINK_OPEN_SECONDS = 60.0  # limit of the protocol for one grant
# One batch of chunks; missing ones come from elsewhere.
FETCH_SECONDS = MAX_LINK_OPEN_SECONDS - LINK_OPEN_MARGIN_SECONDS


def late_seconds(timeout_seconds: float) -> float:
    """How long a worker waits for a tile until it reports the rank that should have sent it.

    `timeout_seconds` bounds the wait: at least 5 s, and 20 times the predicted duration of the whole step. So this is at least
    0.4 s, and 1.6 times that duration; a false report costs one message to that device, and a check of the link to it.
    """
    return 0.08 * timeout_seconds


def hung_step_seconds(timeout_seconds: float, num_ranks: int) -> float:
    """How long a worker may compute without sending or getting a tile, until it counts as hung.

    `timeout_seconds` bounds a wait for a tile: at least 5 s, and 20 times the predicted duration of the whole step. The peers
    of a worker give up the step then; it is a little less, so that the cause is known first. One without peers may take longer.
    """
    return (0.9 if num_ranks > 1 else 3) * timeout_seconds


def agent_run_seconds(timeout_seconds: float) -> float:
    """How long an agent waits for its worker to answer `Run`; `timeout_seconds` is the request's.

    The worker bounds its own waits for peers by the request's timeout, and its agent ends it if it hangs in a step.
    """
    return hung_step_seconds(timeout_seconds, num_ranks=1) + 30.0


def coordinator_run_seconds(timeout_seconds: float) -> float:
    """How long the coordinator waits for an agent to answer a transformer's `Run`: longer than the agent for its worker."""
    return 4 * timeout_seconds + 30.0
