"""Every error that Hearth raises: one root, typed fields, and what to do next.

An error is a frozen set of fields and two sentences. It crosses the wire as `(code, fields)` and comes out at the
other end as the same class, so an app can catch `ModelDoesNotFit` and read `missing_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from typing_extensions import dataclass_transform

# The fault's place, which decides what ends and what goes on:
#   request  the request, or a setting or file that it names: only this request ends, and another plan would not help it
#   worker   a device or its worker: the plan that runs on it ends, its requests may continue on the next plan
#   plan     the plan, or the lack of one: it ends together with its requests
#   peer     the other end of a connection or the way there; for a plan that depends on that peer the same as `worker`
Scope = Literal["request", "worker", "plan", "peer"]

ERROR_TYPES: dict[str, type[HearthError]] = {}  # by code


@dataclass_transform(eq_default=False)
@dataclass(eq=False)
class HearthError(Exception):
    """Root of all errors; its subclasses are dataclasses, and each states its scope.

    `summary` says what is wrong and where, `advice` what to do; both are templates over the fields.
    """

    scope: ClassVar[Scope] = "plan"
    # Whether what was asked for cannot hold, whatever devices and memory come: `hearth serve` ends instead of waiting.
    contradiction: ClassVar[bool] = False
    summary: ClassVar[str] = "Something went wrong."
    advice: ClassVar[str] = "Run `hearth doctor`."

    def __init_subclass__(cls, scope: Scope, contradiction: bool = False) -> None:
        cls.scope, cls.contradiction = scope, contradiction
        ERROR_TYPES[cls.__name__] = dataclass(eq=False)(cls)

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


class BadMessage(HearthError, scope="peer"):
    """Bytes from a peer that are no valid message or tensor frame."""

    reason: str
    summary = "A message could not be read: {reason}."
    advice = "If both ends run the same Hearth version, report this; otherwise update the older one."


class FrameTooLarge(HearthError, scope="request"):
    num_bytes: int
    cap_bytes: int
    summary = "A frame of {num_bytes} bytes is larger than the cap of {cap_bytes} bytes; nothing was allocated for it."
    advice = "Send it in smaller parts."


class UnknownMessage(HearthError, scope="peer"):
    tag: str
    summary = "The peer does not know messages of the kind '{tag}'."
    advice = "Update Hearth on the older device."


class ProtocolMismatch(HearthError, scope="peer"):
    peer: str
    ours: int
    theirs: int
    summary = "{peer} speaks protocol version {theirs}, this side speaks {ours}."
    advice = "Install the same Hearth version on both."


class WrongKey(HearthError, scope="peer"):
    endpoint: str
    summary = "{endpoint} refused our key: it belongs to another home, or the key was rotated or revoked."
    advice = "Export the key where the home lives (`hearth key export`) and import it here (`hearth key import`)."


class NotAuthorised(HearthError, scope="request"):
    role: str
    action: str
    summary = "A key with the role '{role}' may not {action}."
    advice = "Use a key that may, for instance one from `hearth key export --role admin`."


class AppRevoked(HearthError, scope="request"):
    app: str
    summary = "The key of the app '{app}' was revoked."
    advice = "Make a new one with `hearth key add-app {app}`."


class Unreachable(HearthError, scope="peer"):
    endpoint: str
    seconds: float
    summary = "{endpoint} could not be reached within {seconds:g} s."
    advice = "Is it switched on, and is the port open? `hearth doctor` checks."


class ConnectionLost(HearthError, scope="peer"):
    endpoint: str
    summary = "The connection to {endpoint} broke while it was working on the request."
    advice = "Try again; the connection is taken up again by itself."


class DeadlineExceeded(HearthError, scope="peer"):
    action: str
    seconds: float
    summary = "{action} did not finish within {seconds:g} s."
    advice = "Try again with a longer timeout, or see `hearth status` for what is slow."


class NoCoordinator(HearthError, scope="peer"):
    seconds: float
    summary = "No coordinator of this home was found on the network within {seconds:g} s."
    advice = "Start one with `hearth serve MODEL`, or give its address; `hearth doctor` checks multicast."


class NoDevices(HearthError, scope="plan"):
    seconds: float
    summary = "No device of this home answered within {seconds:g} s."
    advice = "Start `hearth-agent` on at least one device with this home's key; `hearth doctor` checks the network."


# ---- keys and settings --------------------------------------------------------------------------------------------


class KeyMissing(HearthError, scope="request"):
    path: str
    summary = "There is no key at {path}."
    advice = "Make one with `hearth key new`, or bring it from another device with `hearth key import`."


class BadKey(HearthError, scope="request"):
    source: str
    reason: str
    summary = "The key from {source} cannot be used: {reason}."
    advice = "Export it again with `hearth key export` where the home lives."


class KeyExists(HearthError, scope="request"):
    path: str
    summary = "There is a key at {path} already."
    advice = (
        "Keep it; or use `hearth key rotate` for a new one, or `--force` to overwrite it and lose access to its home."
    )


class BadSetting(HearthError, scope="request", contradiction=True):
    setting: str
    reason: str
    summary = "The setting {setting} cannot be used: {reason}."
    advice = "Correct it and start again."


class PortInUse(HearthError, scope="request"):
    port: int
    setting: str
    summary = "Port {port} is taken by another program on this device."
    advice = "Stop that program, or choose another port with {setting}."


# ---- devices ------------------------------------------------------------------------------------------------------


class DeviceLost(HearthError, scope="worker"):
    device: str
    reason: str
    summary = "The device {device} was lost: {reason}."
    advice = "The next request runs on the remaining devices; `hearth devices` shows them."


class WorkerDied(HearthError, scope="worker"):
    device: str
    reason: str
    summary = "The worker on {device} died: {reason}."
    advice = "The next request runs without it; if it ran out of memory, lower that device's share with --memory."


class DuplicateDevice(HearthError, scope="worker"):
    device_id: str
    first: str
    second: str
    summary = (
        "{first} and {second} both claim the device id {device_id}: "
        "one is probably a copy of the other's SD card or state directory."
    )
    advice = "Delete the state directory of `hearth-agent` on the copy and start it again."


class AgentBusy(HearthError, scope="worker"):
    device: str
    holder: str
    summary = "{device} already works for the coordinator {holder}."
    advice = "Use that coordinator, or stop it; its lease ends a few seconds later."


class LeaseLost(HearthError, scope="worker"):
    device: str
    summary = "The lease on {device} has ended, or another coordinator has taken it."
    advice = "The coordinator takes a new one by itself; if this repeats, look for a second coordinator with `hearth doctor`."


class StoreFull(HearthError, scope="worker"):
    device: str
    needed_bytes: int
    free_bytes: int
    summary = "The shard store of {device} cannot take {needed_bytes} more bytes: {free_bytes} are free."
    advice = "Free disk space there, or raise --store-bytes."


class ChunkCorrupt(HearthError, scope="worker"):
    chunk: str
    where: str
    summary = "The shard chunk {chunk} on {where} does not match its hash; it was discarded."
    advice = "It is sent again with the next deployment; if this repeats, check that device's disk."


class ChunkMissing(HearthError, scope="worker"):
    chunk: str
    device: str
    summary = "The shard chunk {chunk} is not in the store of {device}."
    advice = "Deploy again: missing chunks are sent then."


# ---- models, plans and requests -----------------------------------------------------------------------------------


class BadCheckpoint(HearthError, scope="request"):
    path: str
    reason: str
    summary = "The checkpoint {path} cannot be used: {reason}."
    advice = "Copy or download the model again."


class UnsupportedArchitecture(HearthError, scope="request", contradiction=True):
    architecture: str
    supported: str
    summary = "Models of the architecture '{architecture}' are not supported."
    advice = "Supported: {supported}."


class BadModelFile(HearthError, scope="request"):
    path: str
    reason: str
    summary = "The model {path} cannot be used: {reason}."
    advice = "Copy or export it again."


class DynamicShape(HearthError, scope="request", contradiction=True):
    """Dimensions of a graph's inputs that the model leaves open. `options` has one `--dim` for each."""

    tensor: str
    axis: int
    options: str
    summary = "The model does not say how large axis {axis} of its input '{tensor}' is, and no value was given."
    advice = "Fix every open dimension: {options}."


class UnsupportedOperator(HearthError, scope="request", contradiction=True):
    operator: str
    node: str
    reason: str
    summary = "The operator {operator} (node '{node}') cannot be used: {reason}."
    advice = "Export the model without it, or cut the model before it."


class ModelDoesNotFit(HearthError, scope="plan"):
    model: str
    missing_bytes: int
    summary = "{model} does not fit on the devices at hand: {missing_bytes} bytes are missing."
    advice = "Add a device, raise a device's memory limit, or use a smaller model or a shorter length."


class UnsupportedWeights(HearthError, scope="plan"):
    device: str
    weights: str
    compute_device: str
    summary = "{device} cannot keep weights as {weights}: there is no kernel for them on its {compute_device} device."
    advice = "Choose another format, such as `--weights int8`, or run its agent with `--compute-device cpu`."


class BadGraph(HearthError, scope="request"):
    path: str
    reason: str
    summary = "The graph {path} cannot be used: {reason}."
    advice = "Export it again, or correct the file."


class NoPlacement(HearthError, scope="plan"):
    graph: str
    strategy: str
    summary = "The strategy {strategy} found no placement of {graph} within the devices' memory."
    advice = "Use the strategy moirai, which searches all placements, or lend more memory."


class BadPlan(HearthError, scope="plan", contradiction=True):
    reason: str
    summary = "The plan cannot be used: {reason}."
    advice = "Make a new one with `hearth plan`."


class BadRequest(HearthError, scope="request"):
    reason: str
    summary = "The request cannot be served: {reason}."
    advice = "Correct the request."


class TextTooLong(HearthError, scope="request"):
    index: int
    num_tokens: int
    max_tokens: int
    summary = "Text {index} has {num_tokens} tokens; the model takes at most {max_tokens}."
    advice = "Shorten it or split it."


class ContextTooLong(HearthError, scope="request"):
    num_prompt_tokens: int
    max_tokens: int
    context_tokens: int
    summary = (
        "{num_prompt_tokens} tokens of prompt and {max_tokens} to generate are more than the context of "
        "{context_tokens} tokens that the plan has room for."
    )
    advice = "Shorten the prompt, ask for fewer tokens, or lend more memory to the plan (`hearth plan` shows it)."


class NotServing(HearthError, scope="plan"):
    state: str
    summary = "No model is ready: {state}."
    advice = "Wait until `hearth status` says 'serving', or start one with `hearth serve MODEL`."


class QueueFull(HearthError, scope="request"):
    limit: int
    summary = "The coordinator already holds {limit} waiting requests."
    advice = "Send fewer requests at once, or try again in a moment."


class StepFailed(HearthError, scope="worker"):
    device: str
    reason: str
    summary = "A step failed on {device}: {reason}."
    advice = "Try again; if it repeats, see that device's log (`journalctl -u hearth-agent`)."


class InternalError(HearthError, scope="plan"):
    where: str
    reason: str
    summary = "A fault in Hearth on {where}: {reason}."
    advice = "Please report it with the log of that device."


def error_from_wire(code: str, details: dict[str, Any], scope: Scope = "plan") -> HearthError:
    """Rebuild an error from a message. An unknown code, or unknown fields, become an `InternalError` of that scope."""
    error_type = ERROR_TYPES.get(code)
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
