"""Files of graphs that experiments read from a folder. The repository has none: the folder is a setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.models.onnx.json_reader import read_graph_json
from coordinator.models.onnx.reader import read_onnx
from hearth.errors import BadSetting
from hearth.plan.graph_spec import GraphSpec


def find_files(setting: str, folder: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    """The folder's files with these suffixes by name, sorted. Raises BadSetting if there are none."""
    found = {path.stem: path for path in sorted(folder.glob("*")) if path.suffix in suffixes}
    if not found:
        reason = (
            f"the folder {folder} holds no {' or '.join(suffixes)} files; the experiment's file says how to get them, "
            f"and --set {setting}=DIR names another folder"
        )
        raise BadSetting(setting=setting, reason=reason)
    return found


def choose(setting: str, files: dict[str, Path], names: Sequence[str]) -> list[Path]:
    """The files with these names, or all without names. Raises BadSetting for an unknown name."""
    if unknown := [name for name in names if name not in files]:
        raise BadSetting(setting=setting, reason=f"'{unknown[0]}' is none of {', '.join(files)}")
    return [files[name] for name in names or files]


def read_graphs(folder: Path, setting: str, names: Sequence[str]) -> list[GraphSpec]:
    """Read the graphs of a folder (JSON or ONNX) that a setting names. Raises BadSetting, BadModelFile."""
    files = choose(setting, find_files("graphs", folder, (".json", ".onnx")), names)
    return [read_graph_json(path) if path.suffix == ".json" else read_onnx(path).spec for path in files]
