"""Plan a pipeline of layers: the devices and their order, the number of layers on each, and the chunk size of prompts.

For one order of devices and one chunk size, the time of the expected request is approximately

    sum_r n_r w_r + repeats * max(m, max_r (n_r p_r + e_r)) + constant     over n_r >= 1 that sum to the model's layers,

with n_r within device r's memory. For device r, w_r is the time that one layer adds to the first chunk on its way through the
stages and to all tokens of the answer; p_r is its time for one chunk, and e_r the device's other work per chunk. m is the
time of the slowest link per chunk. Each further chunk takes as long as the slowest of all these. For a given bound on the
maximum, the sum is least if layers go to the devices with the least w_r first; trying all bounds that matter gives the
optimal split. The simulator then prices the best few of all orders and chunk sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, permutations, product
from math import comb
from typing import NamedTuple

from coordinator.plan.transformer.cost.decode import token_head_seconds, token_layer_seconds
from coordinator.plan.transformer.cost.layout import wire_seconds
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.request import PlanRequest, best_ring, build_plan, on_subset
from coordinator.plan.transformer.shares import device_capacity
from coordinator.plan.transformer.strategies import rank_memory
from coordinator.plan.transformer.strategies.pipeline import layer_seconds, prompt_chunks
from hearth.errors import ModelDoesNotFit
from hearth.plan.common import BYTES_PER_VALUE
from hearth.plan.geometry import ROW_GRAIN, num_grains
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import Pipeline

# Numbers of chunks per step that are tried. More chunks fill the pipeline better; fewer run larger GEMMs.
_CHUNK_COUNTS = (1, 2, 4, 8)
_MIN_CHUNK_ROWS = 16  # with smaller chunks, a stage reads its weights too often
# Devices up to which all orders are tried (4! = 24); with more, only orders along a good ring.
_MAX_DEVICES_ALL_ORDERS = 4
# Subsets up to which all are tried; if there are more, only the fastest and the largest devices. Each costs all its orders.
_MAX_ALL_SUBSETS = 24
# Best estimates that are simulated: the estimate ignores contention, so near ties need the simulator.
_NUM_SIMULATED = 3


class Split(NamedTuple):
    """Layers of each stage, and the objective without its constant, in seconds."""

    layers: tuple[int, ...]
    seconds: float


def best_split(
    num_layers: int,
    max_layers: Sequence[int],
    layer_weights: Sequence[float],
    chunk_seconds: Sequence[float],
    extra_seconds: Sequence[float],
    repeats: float = 0.0,
    link_seconds: float = 0.0,
) -> Split | None:
    """Minimise sum n_r w_r + repeats * max(m, max_r (n_r p_r + e_r)) over 1 <= n_r <= `max_layers[r]`, sum `num_layers`.

    `layer_weights` are w, `chunk_seconds` p, `extra_seconds` e and `link_seconds` m. Returns None if no split fits in memory.
    """
    ranks = range(len(max_layers))
    max_layers = [min(count, num_layers - len(max_layers) + 1) for count in max_layers]
    if min(max_layers) < 1 or sum(max_layers) < num_layers:
        return None
    cheapest = sorted(ranks, key=lambda rank: layer_weights[rank])

    def fill(max_counts: Sequence[int]) -> Split | None:
        layers, left = [1 for _ in ranks], num_layers - len(ranks)
        if min(max_counts) < 1 or sum(max_counts) < num_layers:
            return None
        for rank in cheapest:
            more = min(max_counts[rank] - 1, left)
            layers[rank] += more
            left -= more
        slowest = max(layers[rank] * chunk_seconds[rank] + extra_seconds[rank] for rank in ranks)
        linear = sum(layers[rank] * layer_weights[rank] for rank in ranks)
        return Split(tuple(layers), linear + repeats * max(slowest, link_seconds))

    best = fill(max_layers)
    if repeats <= 0 or best is None:
        return best
    # The first term, which is the least for any bound.
    linear = sum(count * weight for count, weight in zip(best.layers, layer_weights, strict=True))
    by_rank = [
        [n * chunk_seconds[rank] + extra_seconds[rank] for n in range(1, max_layers[rank] + 1)] for rank in ranks
    ]
    for bound in sorted({seconds for each in by_rank for seconds in each}):
        if linear + repeats * max(bound, link_seconds) >= best.seconds:
            break  # with this bound or a larger one, no split can be better
        # The tolerance is for rounding: bounds are such times themselves.
        found = fill([bisect_left(each, bound * (1 + 1e-12) + 1e-15) for each in by_rank])
        if found is not None and found.seconds < best.seconds:
            best = found
    return best


def plan_stages(request: PlanRequest, num_devices: int) -> TransformerPlan:
    """The fastest pipeline found on `num_devices` of the request's devices. Raises ModelDoesNotFit."""
    search = _StageSearch(request)
    estimates: list[_Estimate] = []
    missing: list[int] = []
    for subset in search.subsets(num_devices):
        for order, chunk_rows in product(search.orders(subset), search.chunk_sizes(num_devices)):
            estimate = search.estimate(order, chunk_rows)
            if isinstance(estimate, int):
                missing.append(estimate)
            else:
                estimates.append(estimate)
    if not estimates:
        raise ModelDoesNotFit(model=request.spec.name, missing_bytes=min(missing))
    return min((search.build_plan(estimate) for estimate in sorted(estimates)[:_NUM_SIMULATED]), key=request_seconds)


class _Estimate(NamedTuple):
    """A candidate with its estimated seconds. `order` are device indices in the cluster. Sorts deterministically by time."""

    seconds: float
    order: tuple[int, ...]
    layers: tuple[int, ...]
    chunk_rows: int


class _StageSearch:
    """The terms of the objective, by device and link. Devices are indices in the request's cluster."""

    def __init__(self, request: PlanRequest) -> None:
        self._request, self._spec = request, request.spec
        self._devices = request.cluster.devices
        self._blocks = [device.blocks for device in self._devices]
        self._index = index = {device.device_id: number for number, device in enumerate(self._devices)}
        self._links = {(index[link.source], index[link.target]): link for link in request.cluster.links}
        limits = request.limits
        self._steps = limits.prompt_tokens / request.seq_len if limits else 1.0
        self._tokens = limits.new_tokens if limits else 0
        self._token_layer = [token_layer_seconds(self._spec, each, request.num_cached_tokens) for each in self._blocks]
        # Cached: every order and every chunk size needs them.
        self._chunk_layer = lru_cache(None)(self._chunk_layer_seconds)
        self._hop = lru_cache(None)(self._hop_seconds)
        self._bytes = lru_cache(None)(self._stage_bytes)

    # ---- candidates -------------------------------------------------------------------------------------------------

    def subsets(self, count: int) -> Iterator[tuple[int, ...]]:
        """All subsets of `count` devices; if there are too many, only the fastest and the largest devices."""
        all_devices = range(len(self._devices))
        if comb(len(all_devices), count) <= _MAX_ALL_SUBSETS:
            yield from combinations(all_devices, count)
            return
        speeds = [device_capacity(self._request, blocks) for blocks in self._blocks]
        budgets = [device.budget_bytes for device in self._devices]
        fastest = [sorted(all_devices, key=lambda device: -values[device]) for values in (speeds, budgets)]
        chosen = {tuple(sorted(order[:count])) for order in fastest}
        yield from sorted(chosen)

    def orders(self, subset: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Orders of the stages: all of them for few devices, otherwise all rotations of a good ring.

        The last stage sends its row back to the first.
        """
        if len(subset) <= _MAX_DEVICES_ALL_ORDERS:
            yield from permutations(subset)
            return
        ring = best_ring(self._request.cluster.subset(tuple(self._devices[device].device_id for device in subset)))
        along = tuple(self._index[device.device_id] for device in ring.devices)
        for start in range(len(along)):
            yield along[start:] + along[:start]

    def chunk_sizes(self, num_devices: int) -> list[int]:
        """Chunk sizes in rows to try; 0 is the whole step. An encoder's rows attend to each other, so they stay together."""
        if self._request.generation is None or num_devices == 1:
            return [0]
        seq_len = self._request.seq_len
        sizes = [num_grains(num_grains(seq_len, count), ROW_GRAIN) * ROW_GRAIN for count in _CHUNK_COUNTS[1:]]
        return [0, *dict.fromkeys(size for size in sizes if _MIN_CHUNK_ROWS <= size < seq_len)]

    # ---- estimates --------------------------------------------------------------------------------------------------

    def estimate(self, order: tuple[int, ...], chunk_rows: int) -> _Estimate | int:
        """The best split for this order and chunk size, or the number of missing bytes."""
        spec, H = self._spec, self._spec.hidden_size
        num_chunks = len(prompt_chunks(self._request.seq_len, chunk_rows))
        rows = chunk_rows or self._request.seq_len
        rank_pairs = list(zip(order, (*order[1:], order[0]), strict=True)) if len(order) > 1 else []
        hops = [self._hop(*pair, rows * H) for pair in rank_pairs[:-1]]
        chunk_seconds = [self._chunk_layer(device, chunk_rows) for device in order]
        layer_weights = [
            self._steps * seconds + self._tokens * self._token_layer[device]
            for device, seconds in zip(order, chunk_seconds, strict=True)
        ]
        embedding = self._blocks[order[0]].embedding(rows)
        extra_seconds = [embedding if rank == 0 else 0.0 for rank in range(len(order))]
        for rank, hop in enumerate(hops):
            extra_seconds[rank] += hop.sender
            extra_seconds[rank + 1] += hop.receiver
        max_layers, missing = self._max_layers(order, chunk_rows)
        if missing:
            return missing
        split = best_split(
            spec.num_layers, max_layers, layer_weights, chunk_seconds, extra_seconds,
            repeats=self._steps * (num_chunks - 1), link_seconds=max((hop.link for hop in hops), default=0.0),
        )  # fmt: skip
        assert split is not None
        once = embedding + sum(hop.total for hop in hops)
        for_token = token_head_seconds(spec, self._blocks[order[0]]) + sum(
            self._hop(*pair, H).total for pair in rank_pairs
        )
        seconds = split.seconds + self._steps * once + self._tokens * for_token
        return _Estimate(seconds, order, split.layers, chunk_rows)

    def build_plan(self, estimate: _Estimate) -> TransformerPlan:
        ids = tuple(self._devices[device].device_id for device in estimate.order)
        return build_plan(on_subset(self._request, ids), self._body(estimate.layers, estimate.chunk_rows), "pipeline")

    def _body(self, layers: Sequence[int], chunk_rows: int) -> Pipeline:
        return Pipeline.of(self._spec, layers, self._request.seq_len, chunk_rows, self._request.limits)

    def _max_layers(self, order: tuple[int, ...], chunk_rows: int) -> tuple[list[int], int]:
        """The number of layers that each device has room for, and the bytes that all devices together lack (0: none)."""
        per_layer, first, other = self._bytes(len(order), chunk_rows)
        free_bytes = [
            self._devices[device].budget_bytes - (other if rank else first) - per_layer
            for rank, device in enumerate(order)
        ]  # bytes left next to one layer
        max_layers = [1 + free // per_layer if free >= 0 else 0 for free in free_bytes]
        missing_layers = self._spec.num_layers - sum(max(count, 1) for count in max_layers)
        return max_layers, sum(max(-free, 0) for free in free_bytes) + max(missing_layers, 0) * per_layer

    def _stage_bytes(self, num_devices: int, chunk_rows: int) -> tuple[int, int, int]:
        """Bytes of one layer, of the first stage without layers, and of any other stage without layers."""
        one, two = (self._body((count,) * num_devices, chunk_rows) for count in (1, 2))  # need not sum to the model

        def total(body: Pipeline, rank: int) -> int:
            return rank_memory(self._spec, body, rank).total

        per_layer = total(two, 0) - total(one, 0)
        return per_layer, total(one, 0) - per_layer, total(one, num_devices - 1) - per_layer

    def _chunk_layer_seconds(self, device: int, chunk_rows: int) -> float:
        """Seconds of one layer for one chunk: the mean over all chunks, since later ones attend to more rows."""
        chunks = prompt_chunks(self._request.seq_len, chunk_rows)
        return sum(layer_seconds(self._spec, self._blocks[device], rows) for rows in chunks) / len(chunks)

    def _hop_seconds(self, source: int, target: int, values: int) -> _Hop:
        link, format_ = self._links[source, target], self._request.wire.values
        sender, receiver = (wire_seconds(self._blocks[end].wire, values, format_) for end in (source, target))
        moving = values * BYTES_PER_VALUE[format_] / link.bytes_per_second
        return _Hop(sender, moving, receiver, sender + moving + link.round_trip_seconds / 2 + receiver)


class _Hop(NamedTuple):
    """Seconds of a transfer between stages: the sender's CPU, the link, the receiver's CPU, and all of it with latency."""

    sender: float
    link: float
    receiver: float
    total: float
