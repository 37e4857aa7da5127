"""State that survives a power cut: the goals and plans of all deployments, the newest epoch, and the leases' holder.

Its directory also marks the coordinator that runs: by a lock, and by the address of its client port.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from typing_extensions import Self

from coordinator.devices.quorum import latest
from coordinator.plan.limits import MemoryLimit
from coordinator.serve.config import CoordinatorSettings
from hearth.errors import BadRequest, BadSetting, DiskHung
from hearth.files import FolderInUse, is_locked, locked_folder, write_atomically
from hearth.plan.common import WireFormat
from hearth.plan.graph import Objective
from hearth.plan.model_spec import KvFormat, WeightFormat
from hearth.plan.plan import Plan
from hearth.platform.disk import FILE_SECONDS, DiskWork, hung_paths, on_disk
from hearth.platform.network import local_address
from hearth.validation import first_error
from hearth.wire.messages import MAX_DRAFTED_TOKENS, Configuration

log = logging.getLogger(__name__)

DEFAULT_MAX_DRAFTED = 16  # with 9 of 10 guesses right, more add less than 2 tokens to the 8 that are expected
MAX_TILES = 64  # of one operator; plans of larger graphs take minutes
# How many tiles to cut each product of matrices into; `auto`: as many as are worth it, 1: none is cut.
TileCount: TypeAlias = Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_TILES)]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux: new at each start of the computer
# Interval of attempts to write what could not be written, and of looks for changes by other programs.
_RETRY_SECONDS = 5.0
# For the disk to take a change before it is answered: an SD card that is busy takes seconds.
_SAVE_SECONDS = 3.0
_ADDRESS = "address"  # file of the state directory
_T = TypeVar("_T")


# ---- goals and plans ---------------------------------------------------------------------------------------------------


class _Goal(BaseModel):
    """What the user asked to serve: the fields common to all kinds of model."""

    model_config = ConfigDict(frozen=True)

    wire: WireFormat = WireFormat()
    exclude: tuple[str, ...] = ()  # devices, by name or id
    limits: tuple[MemoryLimit, ...] = ()
    # The user gave the plan: do not replace it by a better one while its devices are available.
    keep_plan: bool = False
    pinned: bool = False  # where memory is short, those that are not pinned make room
    # Without a request for that long, the model is unloaded until the next request; None: it stays loaded.
    keep_alive_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_pin(self) -> Self:
        if self.pinned and self.keep_alive_seconds is not None:
            raise ValueError("a pinned model stays loaded, so that it has no keep-alive time")
        return self

    def serves_the_same(self, other: Goal) -> bool:
        """Whether both goals have the same plans: they differ in when the model is loaded, at most."""
        when_loaded = {"pinned": False, "keep_alive_seconds": None}
        return self.model_copy(update=when_loaded) == other.model_copy(update=when_loaded)


class TransformerGoal(_Goal):
    """Goal of a transformer, given as a model directory."""

    kind: Literal["transformer"] = "transformer"
    model_dir: str
    strategy: str = "auto"  # a name of `coordinator.plan.methods`
    seq_len: int | None = None
    # Decoders only: tokens per sequence, and the number of such sequences to reserve KV cache for.
    context: int | None = Field(default=None, ge=1, le=1 << 24)
    sequences: int | None = Field(default=None, ge=1, le=4096)
    kv_copies: bool = True  # whether devices with room keep copies of each other's KV caches
    kv_cache: KvFormat | None = None  # format of keys and values in the KV cache; None: that of activations
    shared_prefixes: bool = False  # whether apps share the KV cache of equal prefixes
    special_contents: bool = False  # whether special tokens in the contents of chats are special tokens of the prompt
    # Tokens of an answer that a step guesses, at most; 0: no speculative decoding.
    max_drafted: int = Field(default=DEFAULT_MAX_DRAFTED, ge=0, le=MAX_DRAFTED_TOKENS)
    draft_dir: str | None = None  # directory of a small model of the same vocabulary, which guesses tokens
    weights: WeightFormat = "float32"  # format of matrices in the devices' memory
    deterministic: bool = False  # whether each matrix has one kernel for all numbers of rows
    # Largest relative error that lossy activation formats may cause; None: use the format in `wire`.
    accuracy_budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def path(self) -> str:
        return self.model_dir


class GraphGoal(_Goal):
    """Goal of a model given as a graph of operators."""

    kind: Literal["graph"] = "graph"
    model_file: str  # ONNX
    dims: dict[str, int] = {}  # sizes of dynamic dimensions, by name
    objective: Objective = "latency"
    strategy: str = "auto"
    congestion: bool = True  # whether transfers of one device share its link
    tiles: TileCount = 1
    time_limit_seconds: float = Field(default=30.0, gt=0, le=86400)  # for the plan search
    learn: bool = True  # whether requests calibrate the profiled times

    @property
    def path(self) -> str:
        return self.model_file


Goal: TypeAlias = TransformerGoal | GraphGoal
_GOAL: TypeAdapter[Goal] = TypeAdapter(Annotated[Goal, Field(discriminator="kind")])


def goal_from_json(text: str) -> Goal:
    """The goal that a client has sent. Raises BadRequest."""
    try:
        return _GOAL.validate_json(text)
    except ValidationError as error:
        raise BadRequest(reason=f"its goal cannot be read: {first_error(error)}") from None


class SavedDeployment(BaseModel):
    """The goal of one deployment and its last plan; None if none was made yet."""

    model_config = ConfigDict(frozen=True)

    goal: Annotated[Goal, Field(discriminator="kind")]
    plan: Plan | None = None
    unloaded: bool = False  # because no request came for it
    added: bool = False  # while the coordinator ran; the other one is that of its command line
    gone: Annotated[tuple[str, ...], Field(exclude=True)] = ()  # settings of the saved goal that no longer exist

    @model_validator(mode="before")
    @classmethod
    def _note_gone(cls, saved: Any) -> Any:
        if not isinstance(saved, dict) or not isinstance(goal := saved.get("goal"), dict):
            return saved
        known = TransformerGoal.model_fields.keys() | GraphGoal.model_fields.keys()
        return {**saved, "gone": tuple(name for name, value in goal.items() if value and name not in known)}


class SavedState(BaseModel):
    """The content of `serving.json`; `deployments` are by name."""

    model_config = ConfigDict(frozen=True)

    version: Literal[2] = 2
    deployments: dict[str, SavedDeployment] = {}
    last_epoch: int = 0
    # The holder of this coordinator's leases, during the run `boot_id` of its computer. A coordinator that restarts takes its
    # leases back at once; one with a copy of this file, on another computer, does not.
    holder: str = ""
    boot_id: str = ""
    configuration: Configuration | None = None  # the latest that this coordinator has made or heard of


class StateFile:
    """`serving.json` and its second copy, with their content in memory. `boot_id` identifies the run of this computer."""

    def __init__(self, state_dir: Path, boot_id: str | None = None) -> None:
        """Read the saved state; it is empty if there is none or no copy can be read."""
        self.file = DurableFile(state_dir / "serving.json", SavedState.model_validate_json)
        boot_id = boot_id if boot_id is not None else _read_boot_id()
        state = self.file.read() or SavedState()
        if not state.holder or state.boot_id != boot_id:
            state = state.model_copy(update={"holder": secrets.token_hex(8), "boot_id": boot_id})
        self.current = state  # the newest

    def save(self, name: str, deployment: SavedDeployment, last_epoch: int) -> None:
        """Save one deployment and leave the others unchanged. The saved epoch never decreases. Never fails (`DurableFile`)."""
        state = self.current
        self._replace(deployments={**state.deployments, name: deployment}, last_epoch=max(state.last_epoch, last_epoch))

    def remove(self, name: str) -> None:
        """Forget one deployment. Never fails."""
        self._replace(deployments={each: saved for each, saved in self.current.deployments.items() if each != name})

    def put_first(self, name: str) -> None:
        """Make a deployment the first one, which is the default of its kind. Never fails."""
        deployments = self.current.deployments
        self._replace(deployments={name: deployments[name], **deployments})

    def save_configuration(self, configuration: Configuration | None) -> None:
        """Save the configuration of voters. Never fails."""
        self._replace(configuration=configuration)

    def replicate(self, leader: SavedState) -> None:
        """Save the state of the leader under this coordinator's own holder. Never fails."""
        state = self.current
        self._replace(
            deployments=leader.deployments,
            last_epoch=max(state.last_epoch, leader.last_epoch),
            configuration=latest([state.configuration, leader.configuration]),
        )

    def _replace(self, **changes: Any) -> None:
        self.current = self.current.model_copy(update=changes)
        self.file.write(self.current.model_dump_json(indent=1))


def _read_boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux: every run of the program counts as another computer
        return secrets.token_hex(8)


# ---- files -------------------------------------------------------------------------------------------------------------


class DurableFile(Generic[_T]):
    """`path` and its second copy `path.bak`. `parse` reads the content; it raises ValueError if that is damaged.

    `on_change` gets the content when another program has changed the file (`look`).
    `write` never fails: callers go on with the content in memory. A failure is reported once, and the next `write` or `retry`
    tries again. On an event loop a thread writes, and `saved` waits for it.
    """

    def __init__(
        self, path: Path, parse: Callable[[bytes], _T], on_change: Callable[[_T], None] = lambda content: None
    ) -> None:
        self.path = path
        self._copy = path.with_name(f"{path.name}.bak")
        self._parse, self._on_change = parse, on_change
        self._content: str | None = None  # the newest; None: this program has written none
        self._writing = DiskWork(path, self._write)
        self._stamp: tuple[int, ...] | None = None  # of the file when it was last read or written here

    @property
    def is_saved(self) -> bool:
        """Whether both copies hold the newest content."""
        return self._writing.is_done

    def read(self) -> _T | None:
        """The content of the first copy that can be read; None if there is none. A damaged copy is renamed and replaced."""
        with self._writing.lock:
            self._stamp = self._stamp_now()
            for path in (self.path, self._copy):
                try:
                    data = path.read_bytes()
                    content = self._parse(data)
                except FileNotFoundError:
                    continue
                except (ValueError, OSError) as error:
                    self._set_aside(path, error)
                    continue
                if path is self._copy:
                    log.warning("%s is used instead of %s", path, self.path)
                    with suppress(OSError):  # for instance a read-only disk: the next `write` replaces it
                        write_atomically(self.path, data, private=True, durable=True)
                return content
        return None

    async def look(self) -> None:
        """Read the file if another program has changed it since it was last read or written here."""
        if hung_paths():  # a disk that hangs would not answer
            return
        newest = self._content
        with suppress(DiskHung):
            content = await on_disk(self.path, FILE_SECONDS, self._read_changed)
            if content is not None and self._content is newest:
                self._content = None  # what is there is not written again: the other program may have changed it since
                self._on_change(content)

    def _read_changed(self) -> _T | None:
        return self.read() if self.is_saved and self._stamp != self._stamp_now() else None

    def write(self, content: str) -> None:
        """Write both copies, one after the other, so that a power cut leaves one intact."""
        if content != self._content:
            self._content = content
            self._writing.ask()

    def retry(self) -> None:
        """Try again to write what could not be written."""
        self._writing.retry()

    async def saved(self) -> bool:
        """Wait for the disk to take the newest content, for a moment; returns whether it has."""
        await self._writing.settled(_SAVE_SECONDS)
        return self.is_saved

    def _write(self) -> None:
        content = self._content or ""
        for path in (self.path, self._copy):
            write_atomically(path, content, private=True, durable=True)
        self._stamp = self._stamp_now()

    def _stamp_now(self) -> tuple[int, ...]:
        """Identifies the content of the file: each write makes a new one, perhaps of equal size in one tick of the clock."""
        try:
            status = self.path.stat()
        except OSError:  # there is none
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _set_aside(self, path: Path, error: Exception) -> None:
        kept = path.with_suffix(".unreadable" if path is self.path else ".bak.unreadable")
        log.warning("%s cannot be read and is renamed to %s: %s", path, kept.name, error)
        try:
            path.replace(kept)
        except OSError as failure:  # for instance a read-only disk
            log.warning("%s cannot be renamed: %s", path, failure)


async def keep_retrying(files: Sequence[DurableFile[Any]]) -> None:
    """Write what a failing disk did not take, until cancelled, and once more then. Read what other programs have changed."""
    try:
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            for file in files:
                file.retry()
                await file.look()
    finally:
        for file in files:
            file.retry()
        await asyncio.gather(*(file.saved() for file in files))


@contextmanager
def locked_state(state_dir: Path) -> Iterator[None]:
    """Lock the state directory, so that two coordinators do not hold the same leases. Raises BadSetting."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_folder(state_dir))
        except FolderInUse as other:
            reason = f"another coordinator (pid {other.pid}) uses {state_dir}"
            raise BadSetting(setting="--state-dir", reason=reason) from None
        except OSError as error:  # a full or read-only disk does not end the service
            log.warning("%s cannot be locked against a second coordinator: %s", state_dir, error)
        yield


def note_address(settings: CoordinatorSettings, port: int) -> None:
    """Write down where this coordinator listens, for `address_of_running`."""
    try:
        write_atomically(settings.state_dir / _ADDRESS, f"{local_address(settings.bind_host, port)}\n", private=True)
    except OSError as error:  # as above
        log.warning("the address of this coordinator cannot be written down: %s", error)


def address_of_running(state_dir: Path) -> str | None:
    """The address of the coordinator that uses this directory now; None if none does, or if it has not written it down."""
    with suppress(OSError):  # there is none, or this user may not read it: the coordinator that serves there says so
        if is_locked(state_dir):
            return (state_dir / _ADDRESS).read_text().strip() or None
    return None
