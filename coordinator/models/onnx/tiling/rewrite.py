"""Rewrite an ONNX graph into tiles: `tile` cuts operators, gathers what a tile reads, and adds up partial sums.

A tile is an ordinary operator, so profiler, planners and devices treat it as any other. Where the region that a tile reads is
not a block that was computed, it is put together first: Slice takes a part of a block and is shared by all readers, so
that only the part travels; Concat joins blocks, separately for each reader, so that each device joins what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from onnx import NodeProto, helper

from coordinator.models.onnx.contrib import TensorType
from coordinator.models.onnx.flops import flops_of
from coordinator.models.onnx.nodes import attributes_of, unique_name, used_tensors
from coordinator.models.onnx.reader import OnnxModel, graph_spec
from coordinator.models.onnx.shapes import ResolvedGraph
from coordinator.models.onnx.tiling.rules import index_space
from coordinator.models.onnx.tiling.space import (
    CannotCut,
    IndexSpace,
    Operand,
    Pieces,
    Range,
    Region,
    Shape,
    Window,
    overlap,
    shape_of,
)
from coordinator.models.onnx.tiling.weights import SlicedConstants, region_name
from hearth.errors import CannotTile
from hearth.plan.graph import CutOperator

_RESHAPES = {"Reshape", "Flatten", "Squeeze", "Unsqueeze"}


class _Block(NamedTuple):
    """A computed region of a tensor of the original graph, and the tensor of the tiled graph that holds it."""

    region: Region
    name: str


def tile(model: OnnxModel, pieces: Mapping[int, Pieces]) -> OnnxModel:
    """The model with operators cut into pieces: by operator, the number of pieces of each axis of its index space.

    Operators without pieces, or with one, stay whole. Inputs, outputs and results are those of `model`. Raises CannotTile
    for an operator that must stay whole, or whose index space the pieces do not fit.
    """
    cut = {operator: tuple(counts) for operator, counts in sorted(pieces.items()) if max(counts, default=1) > 1}
    if not cut:
        return model
    rewrite = _Rewrite(model)
    for operator in range(model.spec.num_operators):
        if operator in cut:
            rewrite.cut(operator, cut[operator])
        else:
            rewrite.keep(operator)
    graph = rewrite.graph
    inputs = {tensor.name: graph.types[tensor.name] for tensor in model.spec.inputs}
    spec = graph_spec(model.spec.name, graph, inputs, [tensor.name for tensor in model.spec.outputs])
    operators = (each._replace(group=rewrite.groups.get(each.name, "")) for each in spec.operators)
    return OnnxModel(
        spec=replace(spec, operators=tuple(operators)),
        file=model.file,
        dims=model.dims,
        ir_version=model.ir_version,
        opsets=model.opsets,
        graph=graph,
        tiles=tuple(CutOperator(operator=operator, pieces=counts) for operator, counts in cut.items()),
    )


class _Rewrite:
    """Builds `graph`, operator by operator in topological order."""

    def __init__(self, model: OnnxModel) -> None:
        old = model.graph
        self._model = model
        self.graph = ResolvedGraph(types=dict(old.types), constants=dict(old.constants), derived=dict(old.derived))
        self._tensor_names = {*old.types}
        self._operator_names = {operator.name for operator in model.spec.operators}
        self.groups: dict[str, str] = {}  # of tiles and formations, by the name of the node
        opset = next((each.version for each in model.opsets if not each.domain), 0)
        self._constants = SlicedConstants(model.file, self.graph, opset, self._tensor_names)
        self._inputs = {tensor.name for tensor in model.spec.inputs}
        self._outputs = {tensor.name for tensor in model.spec.outputs}
        self._blocks: dict[str, list[_Block]] = {}  # of the tensors that are cut
        self._slices: dict[tuple[str, Region, str], str] = {}
        self._joined: set[str] = set()  # tensors that were cut and are whole again

    def keep(self, operator: int) -> None:
        """Add an operator that stays whole, and therefore reads whole tensors."""
        node = self._model.graph.nodes[operator]
        for name in used_tensors(node):
            self._join(name)
        self.graph.nodes.append(node)
        self.graph.flops.append(self._model.graph.flops[operator])

    def cut(self, operator: int, pieces: Pieces) -> None:
        """Add the tiles of an operator, and the formations of its partial sums. Raises CannotTile."""
        node, title = self._model.graph.nodes[operator], self._model.spec.operators[operator].name
        try:
            space = index_space(self._model, operator)
            tiles = list(space.tiles(pieces))
        except (CannotCut, ValueError) as error:
            raise CannotTile(operator=title, kind=node.op_type, reason=str(error)) from None
        for output in space.outputs:
            self._blocks[output.name] = []
        if space.has_partial_sums(pieces):
            self._partial_sums(node, title, space, tiles)
        else:
            for ranges in tiles:
                names = [self._new_block(output, ranges) for output in space.outputs]
                self._add_tile(node, title, space, ranges, names)
        for name in node.output:
            if name in self._outputs:
                self._join(name)

    # ---- tiles ----------------------------------------------------------------------------------------------------

    def _partial_sums(self, node: NodeProto, title: str, space: IndexSpace, tiles: list[tuple[Range, ...]]) -> None:
        """The joins of each output block, then the formation that adds them and what is added once."""

        def block_of(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
            return tuple(each for axis, each in enumerate(ranges) if axis not in space.summed)

        for _, joins in groupby(sorted(tiles, key=block_of), block_of):
            partial = list(joins)
            name = self._new_block(space.outputs[0], partial[0])
            names = [
                self._new_tensor(f"{name}#{number}", space.outputs[0], ranges) for number, ranges in enumerate(partial)
            ]
            for ranges, join in zip(partial, names, strict=True):
                self._add_tile(node, title, space, ranges, [join], space.added_once)
            if space.added_once is not None:
                names.append(self._added_once(node, space, partial[0], title))
            self._add(helper.make_node("Sum", names, [name]), f"{title}/sum", group=f"{title}/sum")

    def _added_once(self, node: NodeProto, space: IndexSpace, ranges: Sequence[Range], title: str) -> str:
        """What the formation adds to the partial sums of a block; the bias of a convolution belongs to axis 1."""
        assert space.added_once is not None
        operand = space.inputs[space.added_once]
        region = operand.region(ranges)
        name = self._read(operand.name, region, f"{title}/sum")
        if node.op_type != "Conv":
            return name
        return self._constants.reshaped(name, (1, *shape_of(region), *(1,) * (len(space.outputs[0].shape) - 2)))

    def _add_tile(
        self,
        node: NodeProto,
        title: str,
        space: IndexSpace,
        ranges: tuple[Range, ...],
        outputs: list[str],
        without: int | None = None,
    ) -> None:
        name = unique_name(f"{title}/tile", self._operator_names)
        inputs = [
            "" if position == without or not operand.name else self._read(operand.name, operand.region(ranges), name)
            for position, operand in enumerate(space.inputs)
        ]
        shape = self.graph.types[outputs[0]].shape
        self._append(_tile_node(node, space, ranges, inputs, outputs, shape, self._constants), name, f"{title}/tile")

    def _new_block(self, output: Operand, ranges: Sequence[Range]) -> str:
        """A new tensor for the region of an output that a tile computes."""
        region, name = output.region(ranges), output.name
        if shape_of(region) != output.shape:
            name = self._new_tensor(region_name(output.name, region), output, ranges)
        self._blocks[output.name].append(_Block(region, name))
        return name

    def _new_tensor(self, name: str, output: Operand, ranges: Sequence[Range]) -> str:
        name = unique_name(name, self._tensor_names)
        kind = self.graph.types[output.name].element_type
        self.graph.types[name] = TensorType(kind, shape_of(output.region(ranges)))
        return name

    # ---- what a tile reads ----------------------------------------------------------------------------------------

    def _read(self, name: str, region: Region, reader: str) -> str:
        """The tensor with this region of the tensor `name`, put together for the operator `reader`."""
        if name in self._constants:
            return self._constants.region(name, region)
        whole = tuple((0, size) for size in self.graph.types[name].shape)
        blocks = self._blocks.get(name, [_Block(whole, name)])
        return self._assemble(name, blocks, region, 0, reader)

    def _join(self, name: str) -> None:
        """Make a tensor that was cut whole again, under its own name."""
        if name in self._blocks and name not in self._joined:
            self._joined.add(name)
            whole = tuple((0, size) for size in self.graph.types[name].shape)
            self._assemble(name, self._blocks[name], whole, 0, name, result=name)

    def _assemble(
        self, name: str, blocks: list[_Block], region: Region, axis: int, reader: str, result: str = ""
    ) -> str:
        """The tensor with a region: its parts along `axis`, each put together along the axes after it, are joined."""
        if axis == len(region):
            return self._part(name, next(each for each in blocks if overlap(each.region, region)), region, reader)
        met = [common for block in blocks if (common := overlap(block.region, region))]
        parts = sorted({common[axis] for common in met})
        if len(parts) == 1:
            return self._assemble(name, blocks, region, axis + 1, reader, result)
        names = [
            self._assemble(name, blocks, (*region[:axis], part, *region[axis + 1 :]), axis + 1, reader)
            for part in parts
        ]
        if not result:
            result = unique_name(region_name(name, region), self._tensor_names)
            self.graph.types[result] = TensorType(self.graph.types[name].element_type, shape_of(region))
        self._add(helper.make_node("Concat", names, [result], axis=axis), f"{reader}/gather")
        return result

    def _part(self, name: str, block: _Block, region: Region, reader: str) -> str:
        """A part of one block. Parts of the graph's inputs, which every device can have, belong to their reader."""
        if block.region == region:
            return block.name
        key = (block.name, region, reader if name in self._inputs else "")
        if key not in self._slices:
            part = self._slices[key] = unique_name(region_name(name, region), self._tensor_names)
            self.graph.types[part] = TensorType(self.graph.types[name].element_type, shape_of(region))
            self._add(self._constants.slice_node(block.name, part, region, block.region), f"{name}/part")
        return self._slices[key]

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _add(self, node: NodeProto, name: str, group: str = "") -> None:
        self._append(node, unique_name(name, self._operator_names), group)

    def _append(self, node: NodeProto, name: str, group: str = "") -> None:
        node.name = name
        if group:
            self.groups[name] = group
        shapes = [
            [self.graph.types[each].shape if each else None for each in side] for side in (node.input, node.output)
        ]
        self.graph.nodes.append(node)
        self.graph.flops.append(flops_of(node, *shapes))


def _tile_node(
    node: NodeProto,
    space: IndexSpace,
    ranges: Sequence[Range],
    inputs: Sequence[str],
    outputs: Sequence[str],
    output_shape: Shape,
    constants: SlicedConstants,
) -> NodeProto:
    """The node that computes the tile with these ranges: the operator's, with attributes and shapes changed to its part."""
    inputs = list(inputs)
    if node.op_type in _RESHAPES:
        return helper.make_node("Reshape", [inputs[0], constants.integers(output_shape)], outputs)
    if node.op_type == "Expand":
        inputs[1] = constants.integers(output_shape)
    while inputs and not inputs[-1]:
        del inputs[-1]
    copy = NodeProto(op_type=node.op_type, domain=node.domain, input=inputs, output=outputs)
    changed = _changed_attributes(node, space, ranges)
    dropped = {*changed, "auto_pad"} if "pads" in changed else set(changed)
    copy.attribute.extend(each for each in node.attribute if each.name not in dropped)
    copy.attribute.extend(helper.make_attribute(name, value) for name, value in changed.items())
    return copy


def _changed_attributes(node: NodeProto, space: IndexSpace, ranges: Sequence[Range]) -> dict[str, int | list[int]]:
    attributes = attributes_of(node)
    changed: dict[str, int | list[int]] = {}
    if node.op_type == "Conv" and attributes.get("group", 1) > 1:
        start, stop = ranges[1]
        changed["group"] = stop - start
    x = space.inputs[0]
    rows = x.axes[2] if len(x.axes) > 2 else None
    if isinstance(rows, Window):
        spatial = len(x.axes) - 2
        pads = list(attributes.get("pads") or [0] * (2 * spatial))
        pads[0], pads[spatial] = rows.padding(ranges, x.shape[2])
        changed["pads"] = pads
    return changed
