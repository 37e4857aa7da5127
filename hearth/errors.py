"""All errors that Hearth raises: one root class, typed fields, and advice to the user.

Each class declares its fields and two message templates. An error travels on the wire as `(code, fields)` and is rebuilt
as the same class at the other end, so an app can catch `ModelDoesNotFit` and read `missing_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

from typing_extensions import dataclass_transform

# Where the fault lies. The scope decides what fails with the error:
#   request  the request, or a setting or file that it names: only this request fails; another plan would not help
#   worker   a device or its worker: the plan that uses it ends; its requests may continue on the next plan
#   plan     the plan, or the lack of one: the plan and its requests fail
#   peer     the other end of a connection, or the network path to it; handled as `worker` if a plan depends on that peer
Scope = Literal["request", "worker", "plan", "peer"]

ERROR_TYPES: dict[str, type[HearthError]] = {}  # keyed by code


@dataclass_transform(eq_default=False)
@dataclass(eq=False)
class HearthError(Exception):
    """Root of all errors. Every subclass is a dataclass and declares its scope.

    `summary` states what is wrong and where, `advice` what to do next; both are `str.format` templates over the fields.
    """

    scope: ClassVar[Scope] = "plan"
    # True if no change of devices or memory can fix the error: `hearth serve` then exits instead of waiting.
    contradiction: ClassVar[bool] = False
    summary: ClassVar[str] = "Something went wrong."
    advice: ClassVar[str] = "Run `hearth doctor`."

    def __init_subclass__(cls, scope: Scope, contradiction: bool = False) -> None:
        cls.scope, cls.contradiction = scope, contradiction
        ERROR_TYPES[cls.__name__] = dataclass(eq=False)(cls)

    @property
    def code(self) -> str:
        """The class name. It is stable, and identifies the error on the wire and in `--json` output."""
        return type(self).__name__

    def details(self) -> dict[str, Any]:
        """The values of all fields by name, as they travel on the wire."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __reduce__(self) -> tuple[Any, ...]:
        """For other processes of this program. Exception would pickle positional arguments, of which there are none."""
        return partial(type(self), **self.details()), ()

    @property
    def device_name(self) -> str:
        """The name of the device where the fault lies; empty if the error names none."""
        return str(getattr(self, "device", ""))

    def explanation(self) -> str:
        """What is wrong, without the advice."""
        return self.summary.format(**self.details())

    def next_step(self) -> str:
        """The advice: what the user can do next."""
        return self.advice.format(**self.details())

    def __str__(self) -> str:
        return f"{self.explanation()} {self.next_step()}"


# ---- messages and connections -------------------------------------------------------------------------------------


class BadMessage(HearthError, scope="peer"):
    """A peer sent bytes that are not a valid message or tensor frame."""

    reason: str
    summary = "A message could not be read: {reason}."
    advice = "If both ends run the same Hearth version, report this; otherwise update the older one."


class FrameTooLarge(HearthError, scope="request"):
    """A message or frame exceeds a size limit of the protocol."""

    num_bytes: int
    cap_bytes: int
    summary = "A frame of {num_bytes} bytes is larger than the cap of {cap_bytes} bytes; it was refused."
    advice = "Send it in smaller parts."


class UnknownMessage(HearthError, scope="peer"):
    """A message has a tag that the receiver does not know."""

    tag: str
    summary = "The peer does not know the message type '{tag}'."
    advice = "Update Hearth on the older device."


class ProtocolMismatch(HearthError, scope="peer"):
    """The two ends have different protocol versions."""

    peer: str
    ours: int
    theirs: int
    summary = "{peer} speaks protocol version {theirs}, this side speaks {ours}."
    advice = "Install the same Hearth version on both."


class WrongKey(HearthError, scope="peer"):
    """The handshake failed: one end does not accept the key of the other."""

    endpoint: str
    summary = "{endpoint} refused our key: it belongs to another home, or the key was rotated or revoked."
    advice = (
        "Make a key where the coordinator runs (`hearth key add-device`, `add-app`, or `export --role admin`), and import it "
        "here (`hearth key import`)."
    )


class NotAuthorised(HearthError, scope="request"):
    """The key is valid, but its role does not permit the request."""

    role: str
    action: str
    summary = "A key with the role '{role}' may not {action}."
    advice = "Use a key that permits it, for example one from `hearth key export --role admin`."


class AppRevoked(HearthError, scope="request"):
    """The app's key was revoked."""

    app: str
    summary = "The key of the app '{app}' was revoked."
    advice = "Create a new key with `hearth key add-app {app}`."


class Unreachable(HearthError, scope="peer"):
    """There was no connection within the timeout; the request was not sent."""

    endpoint: str
    seconds: float
    summary = "{endpoint} could not be reached within {seconds:g} s."
    advice = "Check that the device is switched on and its port is open, or run `hearth doctor`."


class ConnectionLost(HearthError, scope="peer"):
    """The connection was lost while a request was in progress."""

    endpoint: str
    summary = "The connection to {endpoint} broke while it was working on the request."
    advice = "Send the request again; the client reconnects automatically."


class DeadlineExceeded(HearthError, scope="peer"):
    """An operation did not finish within its timeout."""

    action: str
    seconds: float
    summary = "{action} did not finish within {seconds:g} s."
    advice = "Try again with a longer timeout, or run `hearth status` to see what is slow."


class NoCoordinator(HearthError, scope="peer"):
    """mDNS found no coordinator of this home within the timeout."""

    seconds: float
    summary = "No coordinator of this home was found on the network within {seconds:g} s."
    advice = "Start one with `hearth serve MODEL`, or give its address; `hearth doctor` checks multicast."


class NoDevices(HearthError, scope="plan"):
    """No agent of this home answered within the timeout."""

    seconds: float
    summary = "No device of this home answered within {seconds:g} s."
    advice = "Start `hearth-agent` on at least one device with this home's key; `hearth doctor` checks the network."


# ---- keys and settings --------------------------------------------------------------------------------------------


class KeyMissing(HearthError, scope="request"):
    """The credential file does not exist."""

    path: str
    summary = "There is no key at {path}."
    advice = "Create a key with `hearth key new`, or import one from another device with `hearth key import`."


class BadKey(HearthError, scope="request"):
    """A credential cannot be parsed, or is of the wrong kind."""

    source: str
    reason: str
    summary = "The key from {source} cannot be used: {reason}."
    advice = "Make it again where the coordinator runs (`hearth key add-device`, `add-app` or `export`)."


class KeyExposed(HearthError, scope="request"):
    """Others than the owner of a credential file can read it."""

    path: str
    summary = "Others than its owner can read the key at {path}."
    advice = (
        "Run `chmod 600 {path}`. If somebody has read it, replace it: `hearth key rotate`, or revoke the app or device."
    )


class KeyExists(HearthError, scope="request"):
    """A new credential would overwrite an existing file."""

    path: str
    summary = "There is a key at {path} already."
    advice = (
        "Keep it, replace it with `hearth key rotate`, or pass `--force` to overwrite it and lose access to its home."
    )


class BadSetting(HearthError, scope="request", contradiction=True):
    """A flag, variable or argument has an invalid value."""

    setting: str
    reason: str
    summary = "The setting {setting} cannot be used: {reason}."
    advice = "Correct it and start again."


class PortInUse(HearthError, scope="request"):
    """A port cannot be bound, because another program uses it."""

    port: int
    setting: str
    summary = "Port {port} is in use by another program on this device."
    advice = "Stop that program, or choose another port with {setting}."


# ---- devices ------------------------------------------------------------------------------------------------------


class DeviceLost(HearthError, scope="worker"):
    """A device of the running plan is no longer reachable."""

    device: str
    reason: str
    summary = "The device {device} was lost: {reason}."
    advice = "The next request runs on the remaining devices; `hearth devices` shows them."


class LinkLost(HearthError, scope="worker"):
    """Two devices of the running plan cannot reach each other."""

    device: str
    peer: str
    reason: str
    summary = "The link between {device} and {peer} was lost: {reason}."
    advice = "The next request runs without one of the two; `hearth doctor` checks the network."


class WorkerDied(HearthError, scope="worker"):
    """A worker or profiler process has ended."""

    device: str
    reason: str
    summary = "The worker on {device} died: {reason}."
    advice = "The next request runs without it; if it ran out of memory, lower that device's share with --memory."


PartLost: TypeAlias = DeviceLost | LinkLost | WorkerDied  # something that the running plan needs is gone


class DuplicateDevice(HearthError, scope="worker"):
    """Two agents have the same device id."""

    device_id: str
    first: str
    second: str
    summary = (
        "{first} and {second} both claim the device id {device_id}: "
        "one is probably a copy of the other's SD card or state directory."
    )
    advice = "Delete the state directory of `hearth-agent` on the copy and start it again."


class AgentBusy(HearthError, scope="worker"):
    """Another coordinator holds the agent's lease."""

    device: str
    holder: str
    summary = "{device} already works for the coordinator {holder}."
    advice = "Use that coordinator, or stop it; its lease ends a few seconds later."


class LeaseLost(HearthError, scope="worker"):
    """The coordinator no longer holds the agent's lease."""

    device: str
    summary = "The lease on {device} has ended, or another coordinator has taken it."
    advice = (
        "The coordinator acquires a new lease automatically; "
        "if this repeats, run `hearth doctor` to find a second coordinator."
    )


class StoreFull(HearthError, scope="worker"):
    """There is not enough disk space for a chunk or for weights."""

    device: str
    needed_bytes: int
    free_bytes: int
    summary = "The shard store of {device} has no room for {needed_bytes} more bytes: {free_bytes} are free."
    advice = "Free disk space on that device, or raise its --store-bytes."


class StoreFailed(HearthError, scope="worker"):
    """The disk of a device's store cannot be written or read."""

    device: str
    reason: str
    summary = "The shard store of {device} cannot be used: {reason}."
    advice = "Check that device's disk or SD card: it may be read-only or failing. Other devices serve meanwhile."


class ChunkCorrupt(HearthError, scope="worker"):
    """The content of a chunk does not match its hash."""

    chunk: str
    where: str
    device: str = ""
    summary = "The shard chunk {chunk} on {where} does not match its hash; it was discarded."
    advice = "The next deployment sends it again; if this repeats, check that device's disk."


class ChunkMissing(HearthError, scope="worker"):
    """A chunk that is needed is not in the store."""

    chunk: str
    device: str
    summary = "The shard chunk {chunk} is not in the store of {device}."
    advice = "Deploy again; the deployment sends missing chunks."


# ---- models, plans and requests -----------------------------------------------------------------------------------


class DiskHung(HearthError, scope="plan"):
    """A disk of the coordinator's computer does not answer."""

    path: str
    seconds: float
    summary = "The disk that holds {path} has not answered for {seconds:g} s."
    advice = "Check that disk and its cable, or the network file system: `dmesg` shows its errors."


class BadCheckpoint(HearthError, scope="request"):
    """A checkpoint cannot be read."""

    path: str
    reason: str
    summary = "The checkpoint {path} cannot be used: {reason}."
    advice = "Copy or download the model again."


class UnsupportedArchitecture(HearthError, scope="request", contradiction=True):
    """The checkpoint has an architecture that Hearth does not support."""

    architecture: str
    supported: str
    summary = "Models of the architecture '{architecture}' are not supported."
    advice = "Supported: {supported}."


class BadModelFile(HearthError, scope="request"):
    """A model file cannot be read."""

    path: str
    reason: str
    summary = "The model {path} cannot be used: {reason}."
    advice = "Copy or export it again."


class DynamicShape(HearthError, scope="request", contradiction=True):
    """A graph input has an axis without a fixed size. `options` lists one `--dim` option for each such axis of the model."""

    tensor: str
    axis: int
    options: str
    summary = "The model does not fix the size of axis {axis} of its input '{tensor}', and no size was given."
    advice = "Give a size for every dynamic dimension: {options}."


class UnsupportedOperator(HearthError, scope="request", contradiction=True):
    """An ONNX graph has an operator that Hearth does not support."""

    operator: str
    node: str
    reason: str
    summary = "The operator {operator} (node '{node}') cannot be used: {reason}."
    advice = "Export the model without it, or cut the model before it."


class CannotTile(HearthError, scope="request"):
    """An operator of an ONNX graph cannot be cut into tiles."""

    operator: str
    kind: str
    reason: str
    summary = "The operator {operator} ({kind}) cannot be cut into tiles: {reason}."
    advice = "Plan without tiles: `--tiles off`."


class ModelDoesNotFit(HearthError, scope="plan"):
    """The model exceeds the devices' memory limits."""

    model: str
    missing_bytes: int
    summary = "{model} does not fit on the devices at hand: {missing_bytes} bytes are missing."
    advice = "Add a device, raise a device's memory limit, or use a smaller model or a shorter length."


class MemoryTaken(ModelDoesNotFit, scope="plan"):
    """The model would fit, if other models that are served did not hold memory. `holders` names them with their memory."""

    holders: str
    summary = (
        "{model} does not fit in addition to the models that are served: {missing_bytes} bytes are missing; {holders}."
    )
    advice = "Stop one of them (`hearth stop NAME`), add a device, or raise a device's memory limit."


class StoresTooSmall(ModelDoesNotFit, scope="plan"):
    """The model exceeds what the stores of the devices have room for. `rooms` names the devices and their room."""

    rooms: str
    summary = "{model} does not fit into the shard stores of the devices at hand: {rooms}."
    advice = "Free disk space on these devices, raise their --store-bytes, or add a device."


class UnsupportedWeights(HearthError, scope="plan"):
    """A device's compute device has no kernel for the weight format."""

    device: str
    weights: str
    compute_device: str
    summary = "{device} cannot keep weights as {weights}: there is no kernel for them on its {compute_device} device."
    advice = "Choose another format, such as `--weights int8`, or run its agent with `--compute-device cpu`."


class UnsupportedKvCache(HearthError, scope="plan"):
    """A device's compute device cannot compute attention with keys and values in this format."""

    device: str
    kv_cache: str
    compute_device: str
    reason: str
    summary = "{device} cannot compute with a KV cache in {kv_cache} on its {compute_device} device: {reason}."
    advice = "Choose `--kv-cache float32`, exclude the device, or run its agent with `--compute-device cpu`."


class BadGraph(HearthError, scope="request"):
    """The file of a graph or of a placement instance cannot be read."""

    path: str
    reason: str
    summary = "The graph {path} cannot be used: {reason}."
    advice = "Export it again, or correct the file."


class BadPolicy(HearthError, scope="request"):
    """The file of a learned placement policy cannot be used. Planning goes on without the policy."""

    path: str
    reason: str
    summary = "The placement policy {path} cannot be used: {reason}."
    advice = "Install Hearth again, or train the policy again with this version."


class NoPlacement(HearthError, scope="plan"):
    """A strategy found no placement within the memory limits."""

    graph: str
    strategy: str
    summary = "The strategy {strategy} found no placement of {graph} within the devices' memory."
    advice = "Use the strategy moirai, which searches all placements, or lend more memory."


class BadPlan(HearthError, scope="plan", contradiction=True):
    """A plan is invalid, or does not fit the model."""

    reason: str
    summary = "The plan cannot be used: {reason}."
    advice = "Make a new plan with `hearth plan`."


class BadRequest(HearthError, scope="request"):
    """A request has invalid content."""

    reason: str
    summary = "The request cannot be served: {reason}."
    advice = "Correct the request."


class BadGrammar(HearthError, scope="request"):
    """A JSON schema, regular expression or grammar for an answer cannot be used. `what` names it, and where in it."""

    what: str
    reason: str
    summary = "The {what} for the answer cannot be used: {reason}."
    advice = "Correct or simplify it; docs/client.md says what is supported."


class UnknownModel(HearthError, scope="request"):
    """A request names a model that is not served."""

    model: str
    served: str
    summary = "The model '{model}' is not served here. Served: {served}."
    advice = "Name one that is served (`hearth ps`), or add it with `hearth serve MODEL`."


class TextTooLong(HearthError, scope="request"):
    """A text has more tokens than the model accepts."""

    index: int
    num_tokens: int
    max_tokens: int
    summary = "Text {index} has {num_tokens} tokens; the model takes at most {max_tokens}."
    advice = "Shorten it or split it."


class ContextTooLong(HearthError, scope="request"):
    """The prompt leaves no room for an answer in the context that the plan reserves."""

    num_prompt_tokens: int
    max_tokens: int
    context_tokens: int
    summary = (
        "{num_prompt_tokens} prompt tokens and {max_tokens} to generate exceed the plan's context of "
        "{context_tokens} tokens."
    )
    advice = (
        "Shorten the prompt, serve with a larger `--context`, or raise the devices' memory limits (`hearth plan` shows "
        "their use)."
    )


class NotServing(HearthError, scope="plan"):
    """No model is ready to answer requests."""

    state: str
    summary = "No model is ready: {state}."
    advice = "Wait until `hearth status` says 'serving', or start one with `hearth serve MODEL`."


class QueueFull(HearthError, scope="request"):
    """Too many requests are waiting or running."""

    limit: int
    summary = "The coordinator already holds {limit} waiting requests."
    advice = "Send fewer requests at once, or try again in a moment."


class StepFailed(HearthError, scope="worker"):
    """A step or request failed on a device."""

    device: str
    reason: str
    peer: str = ""  # the device that it waited for, if the step failed by a timeout
    summary = "A step failed on {device}: {reason}."
    advice = "Try again; if it repeats, see that device's log (`journalctl -u hearth-agent`)."


class InternalError(HearthError, scope="plan"):
    """An unexpected exception, or an error that this version does not know."""

    where: str
    reason: str
    summary = "Internal error in Hearth on {where}: {reason}."
    advice = "Please report it, with the log of that device."


def error_from_wire(code: str, details: dict[str, Any], scope: Scope = "plan") -> HearthError:
    """Rebuild an error from its code and fields. Unknown fields are dropped.

    An unknown code, or fields that do not fit the class, give an `InternalError` of the given scope.
    """
    error_type = ERROR_TYPES.get(code)
    if error_type is not None:
        known = {field.name for field in fields(error_type)}
        try:
            error = error_type(**{name: value for name, value in details.items() if name in known})
            str(error)  # fails here, not in the app, if a field has the wrong type
            return error
        except (TypeError, ValueError):
            pass
    unknown = InternalError(where="the peer", reason=f"{code} {details}")
    vars(unknown)["scope"] = scope
    return unknown
