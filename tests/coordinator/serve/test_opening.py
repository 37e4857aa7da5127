"""Models that anybody may have made: what hostile folders can do, what the process may that opens them, and what it costs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper
from support.checkpoints import write_model
from support.hostile_models import CANARY, CORPUS, Opened, instead, key_of, open_all, save_decoder, save_one_weight

from coordinator.models.onnx.file import OnnxFile
from coordinator.models.onnx.reader import read_onnx
from coordinator.serve import opening
from coordinator.serve.goal import open_model, read_model
from coordinator.serve.opening import check_model, open_checked
from coordinator.serve.state import GraphGoal, TransformerGoal
from hearth.errors import BadCheckpoint, BadModelFile

_SECONDS, _MEMORY_BYTES = 10.0, 512 << 20  # of processor time, and resident beyond the libraries, for any folder
_OWN_ERRORS = {"BadCheckpoint", "BadModelFile", "UnsupportedArchitecture", "UnsupportedOperator"}


@pytest.mark.thorough
def test_hostile_folders_are_errors_of_ours_in_time_and_memory(tmp_path: Path) -> None:
    """One test for all: it takes most of its time to start the process that opens them."""
    wrong = {name: why for name, found in open_all(tmp_path, list(CORPUS)).items() if (why := what_is_wrong(found))}
    assert not wrong


def what_is_wrong(found: Opened) -> str:
    if found.error not in _OWN_ERRORS:
        return f"{found.error}: {found.text}"
    if found.processor_seconds >= _SECONDS or found.peak_bytes - found.bare_bytes >= _MEMORY_BYTES:
        return f"{found.processor_seconds:.1f} s, {(found.peak_bytes - found.bare_bytes) >> 20} MiB"
    return found.text if CANARY in found.text or len(found.text) >= 3000 else ""


def transformer(folder: Path, template: str = "{{ messages }}") -> TransformerGoal:
    folder.mkdir(parents=True, exist_ok=True)
    save_decoder(folder, template)
    return TransformerGoal(model_dir=str(folder))


def test_process_is_confined_to_the_folder_of_the_model(tmp_path: Path) -> None:
    goal, key = transformer(tmp_path / "model"), key_of(tmp_path / "model")
    code = """
import sys
from pathlib import Path
from coordinator.serve import opening
def steal(goal):
    Path(goal.model_dir, "config.json").read_bytes()
    raise ValueError(Path(sys.argv[1]).read_text())
opening.read_model = steal
opening.main()
"""
    done = run_python(code, str(key), said=goal.model_dump_json())
    if "not supported" in done.stderr:
        pytest.skip("this kernel has no Landlock")
    assert "PermissionError" in json.loads(done.stdout)["details"]["reason"]
    assert CANARY not in done.stdout + done.stderr


def test_planner_is_confined_to_what_its_requests_name(tmp_path: Path) -> None:
    key = key_of(tmp_path / "model")
    code = """
import sys
from pathlib import Path
from coordinator.serve.planners import child
child._answer = lambda kind, request: Path(sys.argv[1]).read_text()
child.main(b'{"in_background": false, "kind": "graph", "requests": [{"policies_dir": "%s"}]}' % sys.argv[2].encode())
"""
    allowed = run_python(code, str(tmp_path / "policies" / "file"), str(tmp_path / "policies"))
    assert "FileNotFoundError" in allowed.stderr
    refused = run_python(code, str(key), str(tmp_path / "policies"))
    assert "PermissionError" in refused.stderr
    assert CANARY not in refused.stdout + refused.stderr


def run_python(code: str, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, input=said, env=environment, capture_output=True, text=True, timeout=60)


def test_process_that_dies_or_answers_nothing_is_an_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening.sys, "executable", "/bin/false")
    with pytest.raises(BadCheckpoint, match="exited with code 1"):
        check_model(transformer(tmp_path / "model"))
    with pytest.raises(BadModelFile, match="exited with code 1"):
        check_model(GraphGoal(model_file=str(tmp_path / "model.onnx")))


def test_files_that_passed_are_not_checked_again_until_one_of_them_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_dir, folder, started = tmp_path / "state", tmp_path / "model", []
    run = subprocess.run

    def counted(command: Any, **options: Any) -> Any:
        started.append(command)
        return run(command, **options)

    monkeypatch.setattr(opening.subprocess, "run", counted)
    goal = transformer(folder)
    (tmp_path / "link").symlink_to(folder)
    linked = goal.model_copy(update={"model_dir": str(tmp_path / "link")})
    for each in (goal, linked, goal, linked):
        open_checked(each, state_dir)
    assert len(started) == 2
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    check_model(linked, state_dir)
    assert len(started) == 3
    instead(folder / "chat_template.jinja", "fifo")
    with pytest.raises(BadCheckpoint, match="not a regular file"):
        check_model(goal, state_dir)
    (folder / "chat_template.jinja").unlink()
    os.utime(folder / "config.json", ns=(1, 1))
    check_model(goal, state_dir)
    check_model(goal, state_dir)
    assert len(started) == 5


def test_weights_are_not_read_before_a_graph_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The confined process has seconds of processor time, in which a large file cannot be hashed."""
    save_one_weight(tmp_path, "w.bin")
    (tmp_path / "w.bin").write_bytes(np.ones((8, 8), np.float32).tobytes())
    goal, hashed = GraphGoal(model_file=str(tmp_path / "model.onnx")), list[str]()
    monkeypatch.setattr(OnnxFile, "digest", property(lambda file: hashed.append("all") or "0" * 64))
    read_model(goal)
    assert hashed == []
    open_model(goal)
    assert hashed == ["all"]


def test_links_into_the_blobs_of_the_same_repository_are_followed(tmp_path: Path) -> None:
    """As the cache of the Hugging Face hub has them; a link to another repository is refused."""
    repository = tmp_path / "hub" / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "1f0e", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_model(tmp_path / "plain")
    for file in (tmp_path / "plain").iterdir():
        file.rename(blobs / f"{file.name}-hash")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{file.name}-hash")
    (snapshot / "onnx").mkdir()
    save_one_weight(snapshot / "onnx", "w.bin")
    (snapshot / "onnx" / "w.bin").write_bytes(np.ones((8, 8), np.float32).tobytes())
    (snapshot / "onnx" / "w.bin").rename(blobs / "w-hash")
    (snapshot / "onnx" / "w.bin").symlink_to("../../../blobs/w-hash")
    check_model(TransformerGoal(model_dir=str(snapshot)))
    check_model(GraphGoal(model_file=str(snapshot / "onnx" / "model.onnx")))
    (tensor,) = read_onnx(snapshot / "onnx" / "model.onnx").file.proto.graph.initializer
    assert numpy_helper.to_array(tensor).sum() == 64
    other = repository.rename(repository.with_name("models--a--c"))
    (repository / "snapshots").mkdir(parents=True)
    shutil.copytree(other / "snapshots" / "1f0e", repository / "snapshots" / "1f0e", symlinks=True)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(other / "blobs" / "config.json-hash")
    with pytest.raises(BadCheckpoint, match="outside of the model's folder"):
        check_model(TransformerGoal(model_dir=str(snapshot)))
