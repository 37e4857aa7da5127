"""Every error that Hearth raises: one root, typed fields, and what to do next.

An error is a frozen set of fields and two sentences. It crosses the wire as `(code, fields)` and comes out at the
other end as the same class, so an app can catch `ModelDoesNotFit` and read `missing_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

# The fault's place, which decides what ends and what goes on:
#   request  the request, or a setting or file that it names: only this request ends, and another plan would not help it
#   worker   a device or its worker: the plan that runs on it ends, its requests may continue on the next plan
#   plan     the plan, or the lack of one: it ends together with its requests
#   peer     the other end of a connection or the way there; for a plan that depends on that peer the same as `worker`
Scope = Literal["request", "worker", "plan", "peer"]


@dataclass(eq=False)
class HearthError(Exception):
    """Root of all errors. `summary` says what is wrong and where, `advice` what to do; both are templates over the fields."""

    scope: ClassVar[Scope] = "plan"
    # Whether what was asked for cannot hold, whatever devices and memory come: `hearth serve` ends instead of waiting.
    contradiction: ClassVar[bool] = False
    summary: ClassVar[str] = "Something went wrong."
    advice: ClassVar[str] = "Run `hearth doctor`."

    @property
    def code(self) -> str:
        """The class name: stable, and the error's name on the wire and in `--json` output."""
        return type(self).__name__

    def details(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def explanation(self) -> str:
        return self.summary.format(**self.details())

    def next_step(self) -> str:
        return self.advice.format(**self.details())

    def __str__(self) -> str:
        return f"{self.explanation()} {self.next_step()}"


# ---- messages and connections -------------------------------------------------------------------------------------


@dataclass(eq=False)
class BadMessage(HearthError):
    """Bytes from a peer that are no valid message or tensor frame."""

    reason: str
    scope = "peer"
    summary = "A message could not be read: {reason}."
    advice = "If both ends run the same Hearth version, report this; otherwise update the older one."


@dataclass(eq=False)
class FrameTooLarge(HearthError):
    num_bytes: int
    cap_bytes: int
    scope = "request"
    summary = "A frame of {num_bytes} bytes is larger than the cap of {cap_bytes} bytes; nothing was allocated for it."
    advice = "Send it in smaller parts."


@dataclass(eq=False)
class UnknownMessage(HearthError):
    tag: str
    scope = "peer"
    summary = "The peer does not know messages of the kind '{tag}'."
    advice = "Update Hearth on the older device."


@dataclass(eq=False)
class ProtocolMismatch(HearthError):
    peer: str
    ours: int
    theirs: int
    scope = "peer"
    summary = "{peer} speaks protocol version {theirs}, this side speaks {ours}."
    advice = "Install the same Hearth version on both."


@dataclass(eq=False)
class WrongKey(HearthError):
    endpoint: str
    scope = "peer"
    summary = "{endpoint} refused our key: it belongs to another home, or the key was rotated or revoked."
    advice = "Export the key where the home lives (`hearth key export`) and import it here (`hearth key import`)."


@dataclass(eq=False)
class NotAuthorised(HearthError):
    role: str
    action: str
    scope = "request"
    summary = "A key with the role '{role}' may not {action}."
    advice = "Use a key that may, for instance one from `hearth key export --role admin`."


@dataclass(eq=False)
class AppRevoked(HearthError):
    app: str
    scope = "request"
    summary = "The key of the app '{app}' was revoked."
    advice = "Make a new one with `hearth key add-app {app}`."


@dataclass(eq=False)
class Unreachable(HearthError):
    endpoint: str
    seconds: float
    scope = "peer"
    summary = "{endpoint} could not be reached within {seconds:g} s."
    advice = "Is it switched on, and is the port open? `hearth doctor` checks."


@dataclass(eq=False)
class ConnectionLost(HearthError):
    endpoint: str
    scope = "peer"
    summary = "The connection to {endpoint} broke while it was working on the request."
    advice = "Try again; the connection is taken up again by itself."


@dataclass(eq=False)
class DeadlineExceeded(HearthError):
    action: str
    seconds: float
    scope = "peer"
    summary = "{action} did not finish within {seconds:g} s."
    advice = "Try again with a longer timeout, or see `hearth status` for what is slow."


@dataclass(eq=False)
class NoCoordinator(HearthError):
    seconds: float
    scope = "peer"
    summary = "No coordinator of this home was found on the network within {seconds:g} s."
    advice = "Start one with `hearth serve MODEL`, or give its address; `hearth doctor` checks multicast."


@dataclass(eq=False)
class NoDevices(HearthError):
    seconds: float
    scope = "plan"
    summary = "No device of this home answered within {seconds:g} s."
    advice = "Start `hearth-agent` on at least one device with this home's key; `hearth doctor` checks the network."


# ---- keys and settings --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class KeyMissing(HearthError):
    path: str
    scope = "request"
    summary = "There is no key at {path}."
    advice = "Make one with `hearth key new`, or bring it from another device with `hearth key import`."


@dataclass(eq=False)
class BadKey(HearthError):
    source: str
    reason: str
    scope = "request"
    summary = "The key from {source} cannot be used: {reason}."
    advice = "Export it again with `hearth key export` where the home lives."


@dataclass(eq=False)
class KeyExists(HearthError):
    path: str
    scope = "request"
    summary = "There is a key at {path} already."
    advice = (
        "Keep it; or use `hearth key rotate` for a new one, or `--force` to overwrite it and lose access to its home."
    )


@dataclass(eq=False)
class BadSetting(HearthError):
    setting: str
    reason: str
    scope = "request"
    contradiction = True
    summary = "The setting {setting} cannot be used: {reason}."
    advice = "Correct it and start again."


@dataclass(eq=False)
class PortInUse(HearthError):
    port: int
    setting: str
    scope = "request"
    summary = "Port {port} is taken by another program on this device."
    advice = "Stop that program, or choose another port with {setting}."


# ---- devices ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class DeviceLost(HearthError):
    device: str
    reason: str
    scope = "worker"
    summary = "The device {device} was lost: {reason}."
    advice = "The next request runs on the remaining devices; `hearth devices` shows them."


@dataclass(eq=False)
class WorkerDied(HearthError):
    device: str
    reason: str
    scope = "worker"
    summary = "The worker on {device} died: {reason}."
    advice = "The next request runs without it; if it ran out of memory, lower that device's share with --memory."


@dataclass(eq=False)
class DuplicateDevice(HearthError):
    device_id: str
    first: str
    second: str
    scope = "worker"
    summary = (
        "{first} and {second} both claim the device id {device_id}: "
        "one is probably a copy of the other's SD card or state directory."
    )
    advice = "Delete the state directory of `hearth-agent` on the copy and start it again."


@dataclass(eq=False)
class AgentBusy(HearthError):
    device: str
    holder: str
    scope = "worker"
    summary = "{device} already works for the coordinator {holder}."
    advice = "Use that coordinator, or stop it; its lease ends a few seconds later."


@dataclass(eq=False)
class LeaseLost(HearthError):
    device: str
    scope = "worker"
    summary = "The lease on {device} has ended, or another coordinator has taken it."
    advice = "The coordinator takes a new one by itself; if this repeats, look for a second coordinator with `hearth doctor`."


@dataclass(eq=False)
class StoreFull(HearthError):
    device: str
    needed_bytes: int
    free_bytes: int
    scope = "worker"
    summary = "The shard store of {device} cannot take {needed_bytes} more bytes: {free_bytes} are free."
    advice = "Free disk space there, or raise --store-bytes."


@dataclass(eq=False)
class ChunkCorrupt(HearthError):
    chunk: str
    where: str
    scope = "worker"
    summary = "The shard chunk {chunk} on {where} does not match its hash; it was discarded."
    advice = "It is sent again with the next deployment; if this repeats, check that device's disk."


@dataclass(eq=False)
class ChunkMissing(HearthError):
    chunk: str
    device: str
    scope = "worker"
    summary = "The shard chunk {chunk} is not in the store of {device}."
    advice = "Deploy again: missing chunks are sent then."


# ---- models, plans and requests -----------------------------------------------------------------------------------


@dataclass(eq=False)
class BadCheckpoint(HearthError):
    path: str
    reason: str
    scope = "request"
    summary = "The checkpoint {path} cannot be used: {reason}."
    advice = "Copy or download the model again."


@dataclass(eq=False)
class UnsupportedArchitecture(HearthError):
    architecture: str
    supported: str
    scope = "request"
    contradiction = True
    summary = "Models of the architecture '{architecture}' are not supported."
    advice = "Supported: {supported}."


@dataclass(eq=False)
class BadModelFile(HearthError):
    path: str
    reason: str
    scope = "request"
    summary = "The model {path} cannot be used: {reason}."
    advice = "Copy or export it again."


@dataclass(eq=False)
class DynamicShape(HearthError):
    """Dimensions of a graph's inputs that the model leaves open. `options` has one `--dim` for each."""

    tensor: str
    axis: int
    options: str
    scope = "request"
    contradiction = True
    summary = "The model does not say how large axis {axis} of its input '{tensor}' is, and no value was given."
    advice = "Fix every open dimension: {options}."


@dataclass(eq=False)
class UnsupportedOperator(HearthError):
    operator: str
    node: str
    reason: str
    scope = "request"
    contradiction = True
    summary = "The operator {operator} (node '{node}') cannot be used: {reason}."
    advice = "Export the model without it, or cut the model before it."


@dataclass(eq=False)
class ModelDoesNotFit(HearthError):
    model: str
    missing_bytes: int
    scope = "plan"
    summary = "{model} does not fit on the devices at hand: {missing_bytes} bytes are missing."
    advice = "Add a device, raise a device's memory limit, or use a smaller model or a shorter length."


@dataclass(eq=False)
class UnsupportedWeights(HearthError):
    device: str
    weights: str
    compute_device: str
    scope = "plan"
    summary = "{device} cannot keep weights as {weights}: there is no kernel for them on its {compute_device} device."
    advice = "Choose another format, such as `--weights int8`, or run its agent with `--compute-device cpu`."


@dataclass(eq=False)
class BadGraph(HearthError):
    path: str
    reason: str
    scope = "request"
    summary = "The graph {path} cannot be used: {reason}."
    advice = "Export it again, or correct the file."


@dataclass(eq=False)
class NoPlacement(HearthError):
    graph: str
    strategy: str
    scope = "plan"
    summary = "The strategy {strategy} found no placement of {graph} within the devices' memory."
    advice = "Use the strategy moirai, which searches all placements, or lend more memory."


@dataclass(eq=False)
class BadPlan(HearthError):
    reason: str
    scope = "plan"
    contradiction = True
    summary = "The plan cannot be used: {reason}."
    advice = "Make a new one with `hearth plan`."


@dataclass(eq=False)
class BadRequest(HearthError):
    reason: str
    scope = "request"
    summary = "The request cannot be served: {reason}."
    advice = "Correct the request."


@dataclass(eq=False)
class TextTooLong(HearthError):
    index: int
    num_tokens: int
    max_tokens: int
    scope = "request"
    summary = "Text {index} has {num_tokens} tokens; the model takes at most {max_tokens}."
    advice = "Shorten it or split it."


@dataclass(eq=False)
class ContextTooLong(HearthError):
    num_prompt_tokens: int
    max_tokens: int
    context_tokens: int
    scope = "request"
    summary = (
        "{num_prompt_tokens} tokens of prompt and {max_tokens} to generate are more than the context of "
        "{context_tokens} tokens that the plan has room for."
    )
    advice = "Shorten the prompt, ask for fewer tokens, or lend more memory to the plan (`hearth plan` shows it)."


@dataclass(eq=False)
class NotServing(HearthError):
    state: str
    scope = "plan"
    summary = "No model is ready: {state}."
    advice = "Wait until `hearth status` says 'serving', or start one with `hearth serve MODEL`."


@dataclass(eq=False)
class QueueFull(HearthError):
    limit: int
    scope = "request"
    summary = "The coordinator already holds {limit} waiting requests."
    advice = "Send fewer requests at once, or try again in a moment."


@dataclass(eq=False)
class StepFailed(HearthError):
    device: str
    reason: str
    scope = "worker"
    summary = "A step failed on {device}: {reason}."
    advice = "Try again; if it repeats, see that device's log (`journalctl -u hearth-agent`)."


@dataclass(eq=False)
class InternalError(HearthError):
    where: str
    reason: str
    scope = "plan"
    summary = "A fault in Hearth on {where}: {reason}."
    advice = "Please report it with the log of that device."


def _all_errors(root: type[HearthError]) -> dict[str, type[HearthError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_all_errors(child))
    return found


def error_from_wire(code: str, details: dict[str, Any], scope: Scope = "plan") -> HearthError:
    """Rebuild an error from a message. An unknown code, or unknown fields, become an `InternalError` of that scope."""
    error_type = _all_errors(HearthError).get(code)
    if error_type is not None:
        known = {field.name for field in fields(error_type)}
        try:
            error = error_type(**{name: value for name, value in details.items() if name in known})
            str(error)  # a field of the wrong type shows here, not in the app
            return error
        except (TypeError, ValueError):
            pass
    unknown = InternalError(where="the peer", reason=f"{code} {details}")
    vars(unknown)["scope"] = scope
    return unknown
