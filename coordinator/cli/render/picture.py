"""Pictures of placed graphs, as input for Graphviz: operators coloured by device, edges between devices in red."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hearth.errors import BadSetting

# Light enough for black text, and distinguishable for colour-blind readers (after Okabe and Ito, then Tol).
_COLOURS = (
    "#8ec7ee", "#f6c26b", "#8fd6b0", "#f4a6a0", "#cdb4e8", "#f1e27a", "#b5b5b5", "#e8b4d4", "#b9d77e", "#7fd0d3",
    "#d9b38c", "#a9b4f0",
)  # fmt: skip


def check_picture(path: Path) -> None:
    """Raise BadSetting for a file format that cannot be written, before anything is planned."""
    if path.suffix.lower() != ".dot":
        drawn = path.with_suffix(".dot")
        reason = f"{path} must end in .dot; Graphviz draws it: dot -Tsvg {drawn} > {path.with_suffix('.svg')}"
        raise BadSetting(setting="--picture", reason=reason)


def dot_graph(
    title: str,
    devices: Sequence[str],
    operators: Sequence[Sequence[str]],
    assignment: Sequence[int],
    edges: Sequence[tuple[int, int]],
) -> str:
    """The graph in Graphviz's language: `devices` are lines of the legend, `operators` the lines of text of each operator."""
    lines = [
        "digraph {",
        'node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=11];',
        f"subgraph cluster_devices {{ label={_quoted(title)};",
        *(f"device{rank} [label={_quoted(text)}, fillcolor={_colour(rank)}];" for rank, text in enumerate(devices)),
        "}",
        *(
            f"{operator} [label={_quoted(*texts)}, fillcolor={_colour(assignment[operator])}];"
            for operator, texts in enumerate(operators)
        ),
        *(f"{a} -> {b}{'' if assignment[a] == assignment[b] else ' [color=red]'};" for a, b in edges),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(*lines: str) -> str:
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return '"' + "\\n".join(escaped) + '"'


def _colour(device: int) -> str:
    return f'"{_COLOURS[device % len(_COLOURS)]}"'
