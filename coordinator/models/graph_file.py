"""Files that hold a graph: an ONNX model, a graph without weights, or a published placement problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from coordinator.models.file_kinds import file_kind, read_json_file, why_wrong_kind
from coordinator.models.onnx.json_reader import read_graph_json
from hearth.errors import BadModelFile, BadSetting
from hearth.plan.graph import CutOperator
from hearth.plan.graph_spec import GraphSpec
from hearth.wire.messages import ElementType

if TYPE_CHECKING:
    from coordinator.models.onnx.reader import OnnxModel

ModelFileKind = Literal["transformer", "onnx", "graph", "instance"]


@dataclass(frozen=True)
class GraphFile:
    """A graph and its file. `model` is set if the graph can be run, that is, for an ONNX file."""

    path: Path
    spec: GraphSpec
    model: OnnxModel | None = None

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint if self.model is not None else ""

    @property
    def tiles(self) -> tuple[CutOperator, ...]:
        """The operators of the file that are cut into tiles."""
        return self.model.tiles if self.model is not None else ()

    def check_types(self) -> None:
        """Raise BadModelFile for an input or an output whose type no request can carry."""
        for tensor in (*self.spec.inputs, *self.spec.outputs):
            if tensor.dtype not in get_args(ElementType) or tensor.dtype == "bfloat16":
                reason = f"its tensor {tensor.name} is of {tensor.dtype}, which numpy lacks and requests cannot carry"
                raise BadModelFile(path=str(self.path), reason=reason)


def model_file_kind(path: Path) -> ModelFileKind:
    """The kind of a MODEL argument on the command line. Raises BadModelFile for a .json that cannot be read."""
    suffix = path.suffix.lower()
    if path.is_dir() or suffix not in (".onnx", ".json"):
        return "transformer"
    if suffix == ".onnx":
        return "onnx"
    content = read_json_file(path, lambda reason: BadModelFile(path=str(path), reason=f"it {reason}"))
    if file_kind(content) == "problem":
        return "instance"
    if reason := why_wrong_kind(content, "graph"):
        raise BadModelFile(path=str(path), reason=f"it {reason}")
    return "graph"


def read_graph_file(path: Path, dims: Mapping[str, int]) -> GraphFile:
    """Read the graph; for an ONNX file, `dims` fixes its open dimensions.

    Raises BadModelFile, BadSetting (dimensions that it does not have), DynamicShape and UnsupportedOperator.
    """
    if model_file_kind(path) == "onnx":
        from coordinator.models.onnx.reader import read_onnx

        model = read_onnx(path, dims)
        return GraphFile(path, model.spec, model)
    if dims:
        raise BadSetting(setting="--dim", reason=f"{path} has no dynamic dimensions")
    return GraphFile(path, read_graph_json(path))


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Parse dimensions such as `batch=1`. Raises BadSetting."""
    dims: dict[str, int] = {}
    for text in texts:
        name, separator, size = text.rpartition("=")
        if not separator or not name.strip() or not size.strip().isdecimal() or int(size) < 1:
            raise BadSetting(setting="--dim", reason=f"'{text}' is not of the form NAME=N, such as batch=1")
        dims[name.strip()] = int(size)
    return dims
