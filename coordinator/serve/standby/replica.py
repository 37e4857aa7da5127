"""What a standby needs of its leader, as files: the state, keys, profiles, calibrations, policies, the model without weights.

The leader sends each file in parts. Of a checkpoint it sends only the headers: the standby's copies are sparse files of the
same size, from which the model can be opened and planned. Their weights are never read: the devices hold the chunks, which the
manifest names. An ONNX file is sent whole, because its segments are cut from it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.models.checkpoint.checkpoint import COPY_MARKER, Checkpoint
from coordinator.models.checkpoint.sharding import manifest_path
from coordinator.models.model_files import open_model_file
from coordinator.plan.graph.request import POLICIES_FOLDER
from coordinator.serve.clients.key_registry import KeyRegistry, RegisteredKeys
from coordinator.serve.kinds.measurements import FOLDER as LEARNT
from coordinator.serve.opening import check_model
from coordinator.serve.state import Goal, GraphGoal, SavedDeployment, SavedState, TransformerGoal
from hearth.errors import HearthError
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import Plan, is_transformer_plan
from hearth.platform.disk import DaemonThreads
from hearth.wire.messages import ReplicaPart
from hearth.wire.messages.client import is_replica_path

log = logging.getLogger(__name__)

_PART_BYTES = 4 << 20  # of one message: small enough not to delay the leader's signs of life on a slow link
_SAFETENSORS = ".safetensors"
_STATE = "serving.json"
_MANIFEST = "manifest.json"
_DRAFTS = "drafts"  # folder of a model's draft model, with its own marker and manifest


@dataclass(frozen=True)
class ReplicaFile:
    """A file to send: the content is `data`, or the first `sent_bytes` of the file `source`."""

    path: str
    num_bytes: int
    sent_bytes: int
    stamp: tuple[int, ...]  # changes with the content
    data: bytes = b""
    source: Path | None = None

    def parts(self) -> Iterator[tuple[ReplicaPart, bytes]]:
        """The messages, each with its payload. Raises OSError."""
        for offset in range(0, max(self.sent_bytes, 1), _PART_BYTES):
            size = min(_PART_BYTES, self.sent_bytes - offset)
            is_last = offset + size >= self.sent_bytes
            part = ReplicaPart(path=self.path, num_bytes=self.num_bytes, offset=offset, is_last=is_last)
            yield part, self._read(offset, size)

    def _read(self, offset: int, size: int) -> bytes:
        if self.source is None:
            return self.data[offset : offset + size]
        with open_model_file(self.source, hidden=True) as file:
            file.seek(offset)
            return file.read(size)


# ---- the leader --------------------------------------------------------------------------------------------------------


def replica_files(
    state_dir: Path, state: SavedState, keys: Iterable[KeyRegistry], model_files: Mapping[str, Iterable[Path]]
) -> list[ReplicaFile]:
    """All files of the replica. `model_files`: those of each deployment's model. Files that cannot be read are left out.

    State and keys are those in memory: the disk may not have taken them.
    """
    files = [_content(each.file.path.name, each.current.model_dump_json(indent=1).encode()) for each in keys]
    patterns = ("profiles/*.json", f"{LEARNT}/*.json", f"{POLICIES_FOLDER}/*{_SAFETENSORS}")
    for path in (path for pattern in patterns for path in sorted(state_dir.glob(pattern))):
        files += _file(path.relative_to(state_dir).as_posix(), path, whole=True)
    for name, deployment in state.deployments.items():
        folder, goal = f"models/{_plain(name)}", deployment.goal
        # A graph is a file, whose weights may lie in folders next to it.
        model = folder if isinstance(goal, GraphGoal) else f"{folder}/{_model_name(goal)}"
        draft = _draft_dir(goal)
        for path in model_files.get(name, ()):
            if draft is not None and path.parent == draft:
                files += _file(f"{folder}/{_DRAFTS}/{_name_of(draft)}/{path.name}", path)
            else:
                files += _file(f"{model}/{_relative(path, goal)}", path)
        spec, draft_spec = _specs(deployment.plan)
        files += _about_copy(state_dir, Path(goal.path), spec, folder)
        if draft is not None:
            files += _about_copy(state_dir, draft, draft_spec, f"{folder}/{_DRAFTS}")
    content = state.model_dump_json(exclude={"holder", "boot_id"}).encode()
    return [*files, _content(_STATE, content)]  # last: it refers to the others


def _relative(path: Path, goal: Goal) -> str:
    """Where a file of a model belongs in the copy of the model's folder."""
    if isinstance(goal, GraphGoal) and path != Path(goal.path):
        return path.relative_to(Path(goal.path).parent).as_posix()
    return _model_name(goal) if isinstance(goal, GraphGoal) else path.name


def _file(path: str, source: Path, whole: bool = False) -> list[ReplicaFile]:
    """A file to send: of weights only the header, unless they are wanted `whole`."""
    if not is_replica_path(path):
        log.warning("%r is not copied to a standby: its name is not printable", str(source))
        return []
    try:
        status = source.stat()
        num_bytes = status.st_size
        sent_bytes = _header_bytes(source) if source.suffix == _SAFETENSORS and not whole else num_bytes
    except OSError:
        return []
    return [ReplicaFile(path, num_bytes, sent_bytes, (status.st_mtime_ns, num_bytes), source=source)]


def _content(path: str, data: bytes) -> ReplicaFile:
    return ReplicaFile(path, len(data), len(data), (hash(data),), data=data)


def _header_bytes(path: Path) -> int:
    """The size of a safetensors file's header: its length, 8 bytes little-endian, then JSON."""
    with open_model_file(path, hidden=True) as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _about_copy(state_dir: Path, model: Path, spec: ModelSpec | None, folder: str) -> list[ReplicaFile]:
    """What a copy of a model needs besides the model's files: where the model came from, and its manifest."""
    origin = _content(
        f"{folder}/{COPY_MARKER}", json.dumps({"path": str(_origin(model.parent) or model.absolute())}).encode()
    )
    if spec is None:
        return [origin]
    try:
        manifest = manifest_path(Checkpoint(model), spec, state_dir / "manifests")
        return [*_file(f"{folder}/{_MANIFEST}", manifest), origin]
    except (OSError, HearthError) as error:
        log.warning("the manifest of %s cannot be sent to a standby: %s", model, error)
        return [origin]


def _specs(plan: Plan | None) -> tuple[ModelSpec | None, ModelSpec | None]:
    """The spec of a plan's transformer, and that of its draft model."""
    if not is_transformer_plan(plan):
        return None, None
    return plan.model, plan.body.generation.draft if plan.body.generation is not None else None


def _draft_dir(goal: Goal) -> Path | None:
    return Path(goal.draft_dir) if isinstance(goal, TransformerGoal) and goal.draft_dir is not None else None


def _origin(folder: Path) -> Path | None:
    """Where the first leader has the model itself of which this folder holds a copy; None: it holds none."""
    try:
        return Path(json.loads((folder / COPY_MARKER).read_text())["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _model_name(goal: Goal) -> str:
    """The name of the model's directory or file, which is the model's name."""
    return _name_of(Path(goal.path))


def _name_of(model: Path) -> str:
    name = model.absolute().name
    return name if name.isprintable() else _plain(name)


def _plain(name: str) -> str:
    """A name that a `ReplicaPath` may begin with."""
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.+-") else "_" for letter in name)
    return plain if plain[:1].isalnum() else f"_{plain}"


# ---- the standby -------------------------------------------------------------------------------------------------------


class Replica:
    """A standby's copy, in the coordinator's state directory. `state` is that of the leader, once it is complete.

    `keys`: those that were received, by the names of their files, for the caller to take.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._receiving: dict[str, Path] = {}
        self.state: SavedState | None = None
        self.keys: dict[str, RegisteredKeys] = {}

    def receive(self, part: ReplicaPart, data: bytes | memoryview) -> None:
        """Store a part. Raises OSError if it cannot be written, ValueError if the state cannot be read."""
        target = self._state_dir / part.path
        target.parent.mkdir(parents=True, exist_ok=True)
        growing = target.with_name(f"{target.name}.new")
        with growing.open("wb" if part.offset == 0 else "r+b") as file:
            if part.offset == 0:
                file.truncate(part.num_bytes)
            file.seek(part.offset)
            file.write(data)
            if part.is_last:
                file.flush()
                os.fsync(file.fileno())
        if not part.is_last:
            return
        if part.path == _STATE:  # kept under this coordinator's own name and holder
            self.state = self._localised(SavedState.model_validate_json(growing.read_bytes()))
            growing.unlink()
            DaemonThreads().submit(self._check_models, self.state)  # so that taking over does not wait for it
        elif target.name in ("apps.json", "devices.json"):
            self.keys[target.name] = RegisteredKeys.model_validate_json(growing.read_bytes())
            growing.unlink()
        else:
            growing.replace(target)

    def _check_models(self, state: SavedState) -> None:
        for deployment in state.deployments.values():
            with suppress(HearthError):  # which whoever opens it will get, too
                check_model(deployment.goal, self._state_dir)

    def _localised(self, state: SavedState) -> SavedState:
        """The state with the paths of this computer: the model itself where there is one, else the copy."""
        return state.model_copy(
            update={
                "deployments": {
                    name: deployment.model_copy(update={"goal": self._local_goal(name, deployment)})
                    for name, deployment in state.deployments.items()
                }
            }
        )

    def _local_goal(self, name: str, deployment: SavedDeployment) -> Goal:
        goal, folder = deployment.goal, self._state_dir / "models" / _plain(name)
        spec, draft_spec = _specs(deployment.plan)
        path = self._local_path(folder, _model_name(goal), spec)
        if isinstance(goal, GraphGoal):
            return goal.model_copy(update={"model_file": path})
        changed = {"model_dir": path}
        if (draft := _draft_dir(goal)) is not None:
            changed["draft_dir"] = self._local_path(folder / _DRAFTS, _name_of(draft), draft_spec)
        return goal.model_copy(update=changed)

    def _local_path(self, folder: Path, name: str, spec: ModelSpec | None) -> str:
        """The model itself where this computer has it, else its copy in `folder`."""
        copy, origin = folder / name, _origin(folder)
        if origin is not None and _same_files(origin, copy):
            return str(origin)
        if spec is not None:
            self._store_manifest(spec, copy, folder / _MANIFEST)
        return str(copy)

    def _store_manifest(self, spec: ModelSpec, copy: Path, manifest: Path) -> None:
        """Put the manifest where the copy of the checkpoint finds it: its weights cannot be hashed."""
        if not manifest.exists():
            return
        target = manifest_path(Checkpoint(copy), spec, self._state_dir / "manifests")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(manifest, target)


def _same_files(origin: Path, copy: Path) -> bool:
    """Whether this computer has the model itself: files with the names and sizes of those of the copy."""
    if origin == copy or not origin.exists():
        return False
    ours, theirs = (copy, origin) if copy.is_dir() else (copy.parent, origin.parent)  # a graph's weights lie next to it
    files = [each for each in ours.rglob("*") if each.is_file() and each != ours / COPY_MARKER]
    pairs = [(each, theirs / each.relative_to(ours)) for each in files]
    return all(there.is_file() and there.stat().st_size == here.stat().st_size for here, there in pairs)
