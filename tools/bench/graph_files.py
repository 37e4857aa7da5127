"""Files of graphs that experiments read from a folder. The repository has none: the folder is a setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.models.graph_file import read_graph_file
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


def read_graphs(folder: Path, models: Sequence[str] = ()) -> list[GraphSpec]:
    """Read the graphs of a folder (JSON or ONNX) with these names, or all. Raises BadSetting, BadModelFile."""
    files = find_files("graphs", folder, (".json", ".onnx"))
    if unknown := [name for name in models if name not in files]:
        raise BadSetting(setting="models", reason=f"'{unknown[0]}' is none of {', '.join(files)}")
    return [read_graph_file(files[name], {}).spec for name in models or files]
