"""Read the JSON files of Hearth and recognise their kind, so that errors can say that a file is of another kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from coordinator.models.limits import MAX_TEXT_BYTES
from coordinator.models.model_files import read_model_file
from hearth.errors import HearthError

FileKind = Literal["plan", "problem", "graph", "graph profile", "transformer profile", "cluster"]

# The name of a kind in messages, and the fields that such a file must have; the first match counts.
_KINDS: Mapping[FileKind, tuple[str, set[str]]] = {
    "plan": ("a saved plan", {"planner", "predicted", "devices"}),
    "problem": ("a placement problem", {"K", "devices"}),
    "graph": ("a graph of operators", {"nodes", "edges"}),
    "graph profile": ("a profile of devices for a graph of operators", {"operators", "links", "devices"}),
    "transformer profile": ("a profile of devices for a transformer", {"links", "devices"}),
    "cluster": ("a cluster file", {"devices"}),
}


def read_json_file(
    path: Path, bad: Callable[[str], HearthError], of_model: Path | None = None, max_bytes: int = MAX_TEXT_BYTES
) -> Any:
    """The decoded JSON of a file. Raises `bad(reason)`, with the reason `cannot be read (...)` or `is not JSON (...)`.

    A file of the model in the folder `of_model` is read as `read_model_file` does, up to `max_bytes`.
    """
    try:
        data = path.read_bytes() if of_model is None else read_model_file(path, of_model, max_bytes)
        return json.loads(data.decode())
    except OSError as error:
        raise bad(f"cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise bad(f"is not JSON ({error})") from None
    except RecursionError:
        raise bad("is nested too deeply") from None


def file_kind(content: Any) -> FileKind | None:
    """The kind of a file with this decoded JSON; None if it is not a file of Hearth."""
    if not isinstance(content, dict):
        return None
    return next((kind for kind, (_, fields) in _KINDS.items() if fields <= content.keys()), None)


def why_wrong_kind(content: Any, wanted: FileKind) -> str:
    """Why this file was given by mistake, as in `is a saved plan, not a cluster file`; empty if no such mistake is found."""
    found = file_kind(content)
    return "" if found in (wanted, None) else f"is {_KINDS[found][0]}, not {_KINDS[wanted][0]}"
