"""The pieces that an operator may be cut into. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from coordinator.models.onnx.tiling.space import IndexSpace, Pieces
from hearth.errors import CannotTile
from hearth.plan.graph_spec import GraphSpec

# Shorter tiles cost more in sending and starting than the parallel computation saves.
MIN_TILE_SECONDS = 2e-3
_MOST_CUT_AXES = 2  # of one operator: enough for blocks of a matrix, and few options
_MIN_UNEVEN_PIECE = 4  # of an axis that is not divided evenly: the largest piece is at most 1.25 times the smallest

Options = tuple[tuple[Pieces, ...], ...]  # by operator; one that stays whole has one option


@dataclass(frozen=True)
class TileCounts:
    """How many tiles of an operator there may be in all.

    `of_heavy`: what an operator must be cut into if its tiles are then long enough, in ascending order. `of_light`: what the
    others may follow their neighbours in. `min_tile_seconds`: the least time of a tile on the slowest device.
    """

    of_heavy: tuple[int, ...]
    of_light: tuple[int, ...]
    min_tile_seconds: float = MIN_TILE_SECONDS


def automatic_counts(num_devices: int) -> TileCounts:
    """Powers of two, and the number of devices, up to twice that number; heavy operators occupy every device."""
    limit = 2 * num_devices
    powers = {1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit}
    counts = tuple(sorted(powers | {num_devices}))
    return TileCounts(counts[1:], counts[1:])


def fixed_counts(num_tiles: int) -> TileCounts:
    """As many tiles as the user asked for, however short they are."""
    return TileCounts((num_tiles,), (num_tiles,), min_tile_seconds=0.0)


def piece_options(
    spec: GraphSpec,
    spaces: Sequence[IndexSpace | str],
    seconds: Sequence[float],
    num_devices: int,
    counts: TileCounts,
) -> Options:
    """By operator the pieces to choose among; `seconds` are those of the operators on the slowest device.

    A heavy operator is cut into as many pieces as there are devices or more, as far as its tiles are long enough. A light
    one may stay whole, or follow its neighbours so that nothing is gathered for it; its summed axes stay whole.
    """
    options: list[tuple[Pieces, ...]] = []
    for operator, space in enumerate(spaces):
        if isinstance(space, str):
            options.append(((),))
            continue
        longest = seconds[operator] if is_heavy(spec, operator) else -1.0
        heavy = [count for count in counts.of_heavy if longest >= count * counts.min_tile_seconds]
        full = _of_counts(space, (count for count in heavy if count >= num_devices), space.summed)
        partial = (_of_counts(space, [count], space.summed) for count in reversed(heavy))
        cut = full or next(filter(None, partial), [])
        light = _of_counts(space, counts.of_light, ())
        options.append(tuple(cut) or (space.uncut, *light))
    return tuple(options)


def is_heavy(spec: GraphSpec, operator: int) -> bool:
    """Whether an operator multiplies matrices: what networks spend their time on, and what is worth cutting."""
    return spec.operators[operator].kind in ("MatMul", "Gemm", "Conv")


def check_can_cut(spec: GraphSpec, spaces: Sequence[IndexSpace | str], options: Options) -> None:
    """Raise CannotTile, naming the operator with the most FLOPs, if every heavy operator must stay whole."""
    if any(
        is_heavy(spec, operator) and max(max(pieces, default=1) for pieces in choices) > 1
        for operator, choices in enumerate(options)
    ):
        return
    heaviest = max(range(spec.num_operators), key=lambda operator: spec.operators[operator].flops)
    space, named = spaces[heaviest], spec.operators[heaviest]
    if isinstance(space, str):
        reason = space
    elif is_heavy(spec, heaviest):
        reason = f"none of its axes, of {', '.join(map(str, space.sizes))}, can be cut into as many pieces"
    else:
        reason = "it is cut only together with products of matrices, and none of those can be"
    raise CannotTile(operator=named.name, kind=named.kind, reason=reason)


def _of_counts(space: IndexSpace, counts: Iterable[int], summed: Sequence[int]) -> list[Pieces]:
    """All pieces with these numbers of tiles that cut no summed axis but `summed`."""
    axes = [axis for axis in range(len(space.sizes)) if axis not in space.summed or axis in summed]
    return [pieces for count in counts for pieces in _of_count(space, count, axes)]


def _of_count(space: IndexSpace, count: int, axes: Sequence[int]) -> Iterator[Pieces]:
    def fits(axis: int, number: int) -> bool:
        size = space.sizes[axis]
        return number <= size and (size % number == 0 or size >= _MIN_UNEVEN_PIECE * number)

    for axis in axes:
        if fits(axis, count):
            yield tuple(count if each == axis else 1 for each in range(len(space.sizes)))
    for first, second in combinations(axes, _MOST_CUT_AXES):
        for number in range(2, count):
            if count % number == 0 and count // number > 1 and fits(first, number) and fits(second, count // number):
                cut = {first: number, second: count // number}
                yield tuple(cut.get(each, 1) for each in range(len(space.sizes)))
