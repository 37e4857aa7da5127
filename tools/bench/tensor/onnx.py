"""`python -m tools.bench.tensor.onnx`: the task graphs of Doppler's evaluation as ONNX files that run, with random weights.

Every vertex is a node, or a few whose names begin with the vertex's. Blocks of weights are initialisers; blocks of x, the
positions and `scale` are inputs of the request. The result's blocks are the outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from onnx import TensorProto, ValueInfoProto, helper

from coordinator.cli.output import handles_errors, out
from hearth.errors import BadSetting
from hearth.platform.units import format_bytes
from tools.bench.tensor.graphs import GRAPHS, HOME, PAPER, tensor_graph
from tools.bench.tensor.kernels import SCALE, NodeWriter
from tools.bench.tensor.sharding import ShardedGraph
from tools.bench.tensor.values import input_block
from tools.graph_models import OPSET

_IR_VERSION = 8  # that of operator set 17
_SIZES = {"home": HOME, "paper": PAPER}


def write_onnx(graph: ShardedGraph, path: Path, seed: int = 0) -> Path:
    """Write the graph, and its weights to PATH.weights, block by block. The weights of a seed are always the same."""
    writer = NodeWriter(graph)
    for vertex in graph.vertices:
        writer.write(vertex)
    weights_path = path.with_name(f"{path.name}.weights")
    spec = graph.spec()
    outputs = [_value(tensor.name, tensor.shape) for tensor in spec.outputs]
    model = helper.make_model(
        helper.make_graph(
            writer.nodes, graph.name, _inputs(graph, writer.uses_scale), outputs,
            [*_write_weights(graph, weights_path, seed), *writer.constants.values()],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_IR_VERSION,
    )  # fmt: skip
    path.write_bytes(model.SerializeToString())
    return path


def _inputs(graph: ShardedGraph, uses_scale: bool) -> list[ValueInfoProto]:
    tensors = [tensor for tensor in graph.inputs if not tensor.is_weight]
    kinds = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    found = [
        _value(tensor.block_name(block), tensor.block_shape, kinds[tensor.dtype])
        for tensor in tensors
        for block in tensor.blocks
    ]
    return [*found, _value(SCALE, (1,))] if uses_scale else found


def _write_weights(graph: ShardedGraph, path: Path, seed: int) -> list[TensorProto]:
    """Write the blocks of all weights to a file. Returns initialisers that refer to it."""
    found, offset = [], 0
    with path.open("wb") as file:
        for tensor in graph.inputs:
            for block in tensor.blocks if tensor.is_weight else ():
                values = input_block(tensor, block, seed)
                weight = TensorProto(name=tensor.block_name(block), data_type=TensorProto.FLOAT, dims=values.shape)
                weight.data_location = TensorProto.EXTERNAL
                place = {"location": path.name, "offset": str(offset), "length": str(values.nbytes)}
                for key, text in place.items():
                    weight.external_data.add(key=key, value=text)
                offset += file.write(values.data)
                found.append(weight)
    return found


def _value(name: str, shape: tuple[int, ...], kind: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@handles_errors
def main(
    name: Annotated[str, typer.Argument(help=", ".join(GRAPHS))],
    path: Annotated[Path, typer.Option("--out", help="Where to write the model.", metavar="FILE.onnx")],
    sizes: Annotated[str, typer.Option(help=", ".join(_SIZES))] = "home",
    devices: Annotated[int, typer.Option(help="Cut for this number of devices: 4 or 8.")] = 4,
) -> None:
    """Write a graph as an ONNX file, with random weights beside it in FILE.onnx.weights."""
    for setting, value, known in (("NAME", name, GRAPHS), ("--sizes", sizes, _SIZES), ("--devices", devices, (4, 8))):
        if value not in known:
            raise BadSetting(setting=setting, reason=f"'{value}' is none of {', '.join(map(str, known))}")
    graph = tensor_graph(name, _SIZES[sizes], devices)  # type: ignore[arg-type]
    write_onnx(graph, path)
    weights = path.with_name(f"{path.name}.weights").stat().st_size
    out.print(f"{path}: {len(graph.vertices)} vertices, {format_bytes(weights)} of weights")


if __name__ == "__main__":
    app()
