"""A standby's copy of its leader's state and model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.checkpoints import write_model
from support.graphs import save_two_branch_model
from support.plans import make_plan

from coordinator.deploy.transformer import shard_weights
from coordinator.models.graph_file import read_graph_file
from coordinator.serve.clients.key_registry import KeyRegistry
from coordinator.serve.goal import open_transformer
from coordinator.serve.kinds.transformer import transformer_files
from coordinator.serve.standby.replica import Replica, replica_files
from coordinator.serve.state import Goal, GraphGoal, SavedDeployment, SavedState, StateFile, TransformerGoal
from hearth.errors import BadCheckpoint
from hearth.plan.plan import TransformerPlan
from hearth.wire.messages import ReplicaPart


def copied(
    leader: Path, state: SavedState, files: list[Path], standby: Path, absent: Sequence[Path] = ()
) -> SavedState:
    """The leader's state as its standby stores it. `absent`: files that the standby's computer does not have."""
    keys = [KeyRegistry(leader / "apps.json")]
    parts = [each for file in replica_files(leader, state, keys, {"default": files}) for each in file.parts()]
    for path in absent:
        path.unlink()
    replica = Replica(standby)
    for part, data in parts:
        replica.receive(part, data)
    assert replica.keys == {"apps.json": keys[0].current}
    assert replica.state is not None
    return replica.state


async def chunk_hashes(directory: Path, plan: TransformerPlan, cache: Path, draft: Path | None = None) -> list[str]:
    weights = await shard_weights(directory, plan, cache, draft_dir=draft)
    return [chunk.hash for chunks in weights.chunks for chunk in chunks]


async def test_standby_opens_and_plans_the_model_without_its_weights(tmp_path: Path) -> None:
    leader, standby = tmp_path / "leader", tmp_path / "standby"
    goal = TransformerGoal(model_dir=str(write_model(tmp_path / "model")))
    model = open_transformer(goal)
    plan = make_plan(model.spec, "hmp", (1, 1))
    hashes = await chunk_hashes(model.directory, plan, leader / "manifests")
    KeyRegistry(leader / "apps.json").add("lamp", "k1")
    state = SavedState(deployments={"default": SavedDeployment(goal=goal, plan=plan)}, last_epoch=7, holder="leader")
    (tmp_path / "model").rename(tmp_path / "away")
    (tmp_path / "model").symlink_to(tmp_path / "away")
    there = copied(leader, state, transformer_files(model.directory), standby, [tmp_path / "model"])

    assert (there.last_epoch, there.holder) == (7, "")
    copy = open_transformer(there.deployments["default"].goal)  # type: ignore[arg-type]
    assert copy.spec == model.spec
    assert copy.directory.is_relative_to(standby)
    assert await chunk_hashes(copy.directory, plan, standby / "manifests") == hashes
    weights = next(copy.directory.glob("*.safetensors"))
    assert weights.stat().st_size == (tmp_path / "away" / weights.name).stat().st_size

    opened = await shard_weights(copy.directory, plan, standby / "manifests")
    with pytest.raises(BadCheckpoint, match="no device holds the chunk"):
        opened.chunks[0][0].read()


async def test_standby_has_the_draft_model_too(tmp_path: Path) -> None:
    leader, standby = tmp_path / "leader", tmp_path / "standby"
    model_dir, draft_dir = write_model(tmp_path / "model", "llama"), write_model(tmp_path / "draft", "llama")
    goal = TransformerGoal(model_dir=str(model_dir), draft_dir=str(draft_dir))
    model = open_transformer(goal)
    assert model.draft is not None
    limits = model.generation.limits(model.seq_len).model_copy(update={"draft": model.draft.spec})
    plan = make_plan(model.spec, "hmp", (1, 1), generation=limits)
    hashes = await chunk_hashes(model_dir, plan, leader / "manifests", draft_dir)
    assert len(hashes) > len(await chunk_hashes(model_dir, plan, leader / "manifests"))
    state = SavedState(deployments={"default": SavedDeployment(goal=goal, plan=plan)})
    files = [*transformer_files(model_dir), *transformer_files(draft_dir)]
    assert copied(leader, state, files, standby).deployments["default"].goal == goal  # the models are here
    model_dir.rename(tmp_path / "away")
    draft_dir.rename(tmp_path / "gone")
    (tmp_path / "model").symlink_to(tmp_path / "away")
    (tmp_path / "draft").symlink_to(tmp_path / "gone")
    there = copied(leader, state, files, standby, [tmp_path / "model", tmp_path / "draft"])
    copy = open_transformer(there.deployments["default"].goal)  # type: ignore[arg-type]
    assert copy.draft.spec == model.draft.spec
    assert copy.draft.directory.is_relative_to(standby)
    assert await chunk_hashes(copy.directory, plan, standby / "manifests", copy.draft.directory) == hashes


def test_standby_uses_the_model_itself_where_it_is(tmp_path: Path) -> None:
    goal: Goal = TransformerGoal(model_dir=str(write_model(tmp_path / "model")))
    state = SavedState(deployments={"default": SavedDeployment(goal=goal)})
    there = copied(tmp_path / "leader", state, transformer_files(tmp_path / "model"), tmp_path / "standby")
    assert there.deployments["default"].goal == goal


@pytest.mark.parametrize("name", [".gitattributes", "read me.txt", "größe.json", "a\nb"])
def test_files_of_any_name_next_to_the_model_do_not_keep_the_standby_from_copying(tmp_path: Path, name: str) -> None:
    directory = write_model(tmp_path / "model")
    (directory / name).write_text("{}")
    state = SavedState(deployments={"default": SavedDeployment(goal=TransformerGoal(model_dir=str(directory)))})
    copied(tmp_path / "leader", state, transformer_files(directory), tmp_path / "standby")
    (copy,) = (tmp_path / "standby").glob("**/config.json")
    assert copy.read_bytes() == (directory / "config.json").read_bytes()
    assert (copy.parent / name).exists() is name.isprintable()


@pytest.mark.parametrize("name", ["model.onnx", "my model.onnx"])
def test_standby_has_the_whole_graph(tmp_path: Path, name: str) -> None:
    path = save_two_branch_model(tmp_path / name, channels=8)
    graph = read_graph_file(path, {})
    assert graph.model is not None
    state = SavedState(deployments={"default": SavedDeployment(goal=GraphGoal(model_file=str(path)))})
    fingerprint = graph.fingerprint
    there = copied(tmp_path, state, graph.model.file.paths(), tmp_path / "standby", [path])
    copy = read_graph_file(Path(there.deployments["default"].goal.path), {})
    assert copy.fingerprint == fingerprint


def test_standby_keeps_the_folders_of_a_graphs_weights(tmp_path: Path) -> None:
    folder = tmp_path / "leader" / "models"
    folder.mkdir(parents=True)
    path = save_two_branch_model(folder / "net.onnx", channels=32)
    for weights in ("parts/one/w.bin", "parts/two/w.bin", "größe 1.bin"):
        (folder / weights).parent.mkdir(parents=True, exist_ok=True)
        (folder / weights).write_bytes(weights.encode())
    state = SavedState(deployments={"default": SavedDeployment(goal=GraphGoal(model_file=str(path)))})
    files = [path, *(each for each in folder.rglob("*.bin"))]
    there = copied(tmp_path / "leader", state, files, tmp_path / "standby")
    copy = tmp_path / "standby" / "models" / "default"
    assert {each.relative_to(copy).as_posix(): each.read_bytes().decode() for each in copy.rglob("*.bin")} == {
        weights: weights for weights in ("parts/one/w.bin", "parts/two/w.bin", "größe 1.bin")
    }
    assert there.deployments["default"].goal.path == str(path)  # which is here, as on the leader's computer
    (folder / "parts/two/w.bin").unlink()
    incomplete = copied(tmp_path / "leader", state, [path], tmp_path / "standby")
    assert incomplete.deployments["default"].goal.path == str(copy / "net.onnx")


def test_standby_knows_which_models_are_pinned_unloaded_or_stay_loaded_for_how_long(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "model"))
    saved = {
        "pinned": SavedDeployment(goal=TransformerGoal(model_dir=path, pinned=True)),
        "idle": SavedDeployment(goal=TransformerGoal(model_dir=path, keep_alive_seconds=300.0), unloaded=True),
    }
    files = transformer_files(tmp_path / "model")
    there = copied(tmp_path / "leader", SavedState(deployments=saved), files, tmp_path / "standby")
    assert there.deployments == saved


def test_replicated_state_keeps_the_own_holder(tmp_path: Path) -> None:
    own = StateFile(tmp_path)
    holder = own.current.holder
    own.replicate(SavedState(last_epoch=9, holder="another", boot_id="another"))
    assert (StateFile(tmp_path).current.holder, StateFile(tmp_path).current.last_epoch) == (holder, 9)


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "", ".ssh/x", "a//b", "a/./b", "a/..", "a/" * 20 + "b", "a\n"]
)
def test_no_path_leaves_the_folder(path: str) -> None:
    with pytest.raises(ValidationError):
        ReplicaPart(path=path, num_bytes=1, offset=0, is_last=True)
