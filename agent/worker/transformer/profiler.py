"""Profiler of one layer's blocks on this device: `python -m agent.worker.transformer.profiler`, a child of the daemon.

Galaxy's profiler (section III-C), with two additions: attention is measured in three parts, and so is the CPU cost of
communication.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from agent.worker.profiling import Meter, measure_wire_cost, serve_one
from agent.worker.transformer import blocks
from agent.worker.transformer.comm.staging import TorchCasts, make_staging
from agent.worker.transformer.generation.block_pool import num_blocks_for
from agent.worker.transformer.kernel_times import layer_bytes, measure_kernels, synchroniser
from agent.worker.transformer.paged_cache import PagedRows, SequenceCache
from agent.worker.transformer.shard import LayerShard, filled_layer, filled_matrix, neutral_embedding, without_matrices
from hearth.errors import BadRequest
from hearth.plan.geometry import COLUMN_GRAIN, ROW_GRAIN, Span
from hearth.plan.kept_caches import CacheBlock
from hearth.plan.kernels import KernelChoice, choose_kernels
from hearth.plan.layer import layer_matrices
from hearth.plan.model_spec import ModelSpec
from hearth.plan.profile import BlockProfile, LatencyCurve, fit_curve, suspicious_point
from hearth.platform.machine import give_back_freed_buffers, keep_freed_buffers
from hearth.wire.messages import BlocksOf, ComputeDevice, NewSequence, Sampling, StartProfile

# Of the whole size: three points are the least that can tell a line from a curve.
_MEASURED_FRACTIONS = (0.25, 0.5, 1.0)
# Of the rows of an MLP: with few of them, as a slow device may have, a GEMM waits for its weights.
_ROW_FRACTIONS = (0.125, *_MEASURED_FRACTIONS)
_SAMPLE_SECONDS = 0.03  # of one sample: long compared with the clock's resolution and with pauses by the scheduler
_SAMPLES_PER_POINT = 3  # samples, whose median counts: one of them may be disturbed
# Rows of a quick profile, which takes one sample of each point: enough for a GEMM that is bound by compute. Decoding uses just
# more weights than most caches hold, and each block a single copy.
_QUICK_ROWS = 64
_QUICK_DECODE_BYTES = 64 << 20
# GEMM kernels compute rows in groups, so that time grows in steps: by a fifth from 96 to 104 rows in oneDNN with SSE4.2. A
# matrix with few columns has the same steps as a wide one.
_STEP_COLUMNS = 512
_STEP_ROWS = 8  # row counts are measured at this distance, or at a multiple of it if there are more than `_MAX_STEPS`
_MAX_STEPS = 40
_STEP_SAMPLE_SECONDS = 0.01
_STEP_TURNS = 3  # samples of each row count, of which the least counts
_MAX_REPEATS = 3  # of points that background load disturbed: bounds the time on a busy device
# Measurements cycle through copies of the weights, as through a model's layers, so that weights come from memory, not cache.
_MAX_COPIES_BYTES = 160 << 20
_MAX_COPIES = 4  # copies of a small layer: more would only take longer to create
# Decoding is measured over more weights than any cache holds, as far as the model has that many.
_DECODE_WEIGHT_BYTES = 256 << 20
_TURNS_PER_SAMPLE = 2  # samples of a block whose least counts, for each sample of one whose median does
_DECODE_CACHED_TOKENS = 2048  # of the longer KV cache: attention to them takes a good part of a layer's time
# Minimum fraction of a layer's time that counts as reading weights, and as the rest: both are positive for every layer.
_MIN_READ_FRACTION = 0.01


def profile_blocks(
    spec: ModelSpec,
    seq_len: int,
    num_threads: int,
    compute_device: ComputeDevice,
    deterministic: bool = False,
    quick: bool = False,
) -> BlockProfile:
    """Measure kernels, then one layer's blocks with the chosen ones.

    Each point of a block is the median of several samples after a warm-up run. `quick`: no kernels, one sample of each point,
    and few rows, whose times are scaled up.
    """
    if quick and seq_len > _QUICK_ROWS:
        few = profile_blocks(spec, _QUICK_ROWS, num_threads, compute_device, deterministic, quick=True)
        return few.with_rows(seq_len)
    torch.set_num_threads(num_threads)
    device = make_staging(compute_device).device
    S = seq_len
    H, d = spec.hidden_size, spec.head_dim
    on_one_thread = device.type == "cpu" and num_threads == 1
    measure = _BlockMeter(_SAMPLE_SECONDS, synchroniser(device), 1 if quick else _SAMPLES_PER_POINT, on_one_thread)
    with torch.inference_mode():
        times = () if quick else measure_kernels(spec, seq_len, device, deterministic)
        give_back_freed_buffers()
        kernels = choose_kernels(times, single=deterministic)
        # Measured while nothing else is in memory: a device may hold little more than these copies.
        decode_bytes = _QUICK_DECODE_BYTES if quick else _DECODE_WEIGHT_BYTES
        whole = _measure_whole_layers(spec, measure, device, kernels, decode_bytes, S) if spec.causal else None
    give_back_freed_buffers()
    layers = [without_matrices(filled_layer(spec, device), device)] * (1 if quick else _num_copies(spec))
    embedding = neutral_embedding(spec, device)
    x_TH = torch.randn(S, H, device=device)
    all_rows = Span(0, S)

    def gemm(x_sk: Tensor) -> Callable[[], object]:
        copies = cycle([filled_matrix(H, x_sk.shape[1], device, spec.weights, kernels) for _ in layers])
        return lambda: next(copies).matmul(x_sk)

    def qkv(heads: int) -> Callable[[], object]:
        out = x_TH.new_empty(S, spec.qkv_width(heads))
        width = spec.qkv_width(heads)
        copies = cycle(
            [
                replace(
                    layer,
                    qkv_blocks=(Span(0, heads),),
                    matrices={"qkv": filled_matrix(width, H, device, spec.weights, kernels)},
                )
                for layer in layers
            ]
        )
        return lambda: blocks.project_qkv(spec, next(copies), 0, x_TH, rows, all_rows, out)

    def core(heads: int) -> Callable[[], object]:
        q_Tw, k_Tk, v_Tk = blocks.split_qkv(spec, heads, torch.randn(S, spec.qkv_width(heads), device=device))
        return lambda: blocks.attention(spec, 0, q_Tw, k_Tk, v_Tk, rows, all_rows)

    def out(heads: int) -> Callable[[], object]:
        return gemm(torch.randn(S, heads * d, device=device))

    def up(columns: int, num_rows: int = S) -> Callable[[], object]:
        x_sH = x_TH[:num_rows]
        copies = cycle([_with_columns(spec, layer, columns, device, kernels) for layer in layers])
        return lambda: blocks.mlp_up(spec, next(copies), x_sH)

    def down(columns: int, num_rows: int = S) -> Callable[[], object]:
        return gemm(torch.randn(num_rows, columns, device=device))

    def mlp_rows(num_rows: int) -> Callable[[], object]:
        parts = up(spec.ffn_size, num_rows), down(spec.ffn_size, num_rows)
        return lambda: (parts[0](), parts[1]())

    def connective(num_rows: int) -> Callable[[], object]:
        layer, x_sH = layers[0], x_TH[:num_rows]
        return lambda: blocks.pre_norm(
            spec, layer, blocks.MLP, blocks.add_residual(spec, layer, blocks.ATTENTION, x_sH, x_sH)
        )

    def embed(num_rows: int) -> Callable[[], object]:
        positions = torch.arange(num_rows, device=device) % spec.max_positions
        return lambda: blocks.finish_embedding(spec, embedding, x_TH[:num_rows], positions)

    def few_columns() -> Callable[[int], Callable[[], object]]:
        few = min(_STEP_COLUMNS, spec.ffn_size)
        copies = cycle([_with_columns(spec, layer, few, device, kernels) for layer in layers])
        return lambda num_rows: lambda: blocks.mlp_up(spec, next(copies), x_TH[:num_rows])

    heads, columns = _sizes(spec.num_heads, spec.group_size), _sizes(spec.ffn_size, COLUMN_GRAIN)
    row_counts = _sizes(S, ROW_GRAIN)
    with torch.inference_mode():
        rows = blocks.pack_rows(spec, torch.zeros(S, dtype=torch.int64), [all_rows], [None], device)
        curves = {
            "qkv": measure.curve(heads, qkv),
            "core": measure.curve(heads, core),
            "out": measure.curve(heads, out),
            "up": measure.curve(columns, up),
            "down": measure.curve(columns, down),
            "connective": measure.curve(row_counts, connective),
            "embedding": measure.curve(row_counts, embed),
            "mlp_rows": measure.curve(_sizes(S, ROW_GRAIN, _ROW_FRACTIONS), mlp_rows),
        }
        if device.type == "cpu" and not quick:
            step_seconds = measure.step_seconds(_step_sizes(S, curves["mlp_rows"].sizes), few_columns())
            curves["mlp_rows"] = curves["mlp_rows"].with_steps(step_seconds)
    wire = measure_wire_cost(measure.cpu_per_second, TorchCasts(), device.type != "cpu")
    profile = BlockProfile(seq_len=S, wire=wire, kernels=times, **curves, **(whole.decoding if whole else {}))
    return profile.with_layer_seconds(spec.num_heads, spec.ffn_size, whole.prompt_seconds) if whole else profile


def _with_columns(
    spec: ModelSpec, layer: LayerShard, columns: int, device: torch.device, kernels: Sequence[KernelChoice]
) -> LayerShard:
    """A layer with this number of MLP columns, for `blocks.mlp_up` only."""
    by_column = [each.part for each in layer_matrices(spec) if each.kind == "mlp" and each.axis == 0]
    shape = columns, spec.hidden_size
    return replace(
        layer,
        matrices={part: filled_matrix(*shape, device, spec.weights, kernels) for part in by_column},
        biases={part: layer.biases[part][:columns] for part in by_column if part in layer.biases},
    )


class _WholeLayers(NamedTuple):
    """Times of whole layers: of decoding by field of `BlockProfile`, and of one layer with the rows of a prompt."""

    decoding: dict[str, float]
    prompt_seconds: float


def _measure_whole_layers(
    spec: ModelSpec,
    measure: _BlockMeter,
    device: torch.device,
    kernels: Sequence[KernelChoice],
    weight_bytes: int,
    prompt_rows: int,
) -> _WholeLayers:
    """Time whole layers with one row and with many.

    The times of decoding are slopes and intercept of the times of a layer, of a share of it, as ranks hold them, and of a layer
    with a longer KV cache, each with all its calls. Weights come from memory, as in a model, and have then driven everything
    else from the caches: norms and other small calls take several times as long as in a loop of their own.
    """
    weight_bytes = min(weight_bytes, spec.num_layers * layer_bytes(spec))

    def layers(part: ModelSpec) -> list[LayerShard]:
        return [filled_layer(part, device, kernels) for _ in range(max(-(-weight_bytes // layer_bytes(part)), 1))]

    half = _half_of_layer(spec)
    num_bytes, half_bytes = layer_bytes(spec), layer_bytes(half)
    num_cached = min(_DECODE_CACHED_TOKENS, spec.max_positions, spec.window(0) or _DECODE_CACHED_TOKENS)
    whole_layers = layers(spec)
    lengths = (1, num_cached)
    whole, cached = measure.least_seconds([_layer(spec, whole_layers, device, length) for length in lengths])
    prompt_seconds = measure.seconds(_layer(spec, whole_layers, device, prompt_rows, prompt_rows))
    shared = whole
    if half_bytes < num_bytes:
        del whole_layers  # a device may have no room for both
        give_back_freed_buffers()
        (shared,) = measure.least_seconds([_layer(half, layers(half), device)])
    num_values = (num_cached - 1) * 2 * spec.kv_width(spec.num_heads)
    whole, shared, cached = (seconds * measure.seconds_per_clock_second for seconds in (whole, shared, cached))
    decoding = decoding_times((num_bytes, whole), (half_bytes, shared), (num_values, cached))
    return _WholeLayers(decoding, prompt_seconds)


def decoding_times(layer: tuple[int, float], share: tuple[int, float], longer: tuple[int, float]) -> dict[str, float]:
    """The times of decoding by field of `BlockProfile`, given the seconds of three layers.

    `layer` and `share`: bytes of weights, and seconds. `longer`: the cached values that the whole layer reads in addition, and
    its seconds.
    The bounds hold for layers so small that noise exceeds their reading, and for those that cannot be divided.
    """
    num_bytes, seconds = layer
    slope = (seconds - share[1]) / max(num_bytes - share[0], 1)
    least, most = (fraction * seconds / num_bytes for fraction in (_MIN_READ_FRACTION, 1 - _MIN_READ_FRACTION))
    per_byte = min(max(slope, least), most)
    return {
        "decode_seconds_per_byte": per_byte,
        "decode_layer_seconds": seconds - per_byte * num_bytes,
        "decode_seconds_per_cached_value": max(longer[1] - seconds, 0.0) / max(longer[0], 1),
    }


def _half_of_layer(spec: ModelSpec) -> ModelSpec:
    """The model with half of a layer's KV heads and columns, if there are as many, as on one of two equal devices."""
    num_groups = max(spec.num_kv_heads // 2, 1)
    columns = max(spec.ffn_size // COLUMN_GRAIN // 2, 1) * COLUMN_GRAIN
    columns = min(columns, spec.ffn_size)
    heads = {"num_heads": num_groups * spec.group_size, "num_kv_heads": num_groups}
    return spec.model_copy(update={**heads, "ffn_size": columns})


def _layer(
    spec: ModelSpec, layers: Sequence[LayerShard], device: torch.device, num_tokens: int = 1, num_rows: int = 1
) -> Callable[[], object]:
    """Run one layer for the last `num_rows` of `num_tokens` tokens of one sequence; each call runs the next layer."""
    copies = cycle(layers)
    first_layer = CacheBlock(Span(0, 1), Span(0, spec.num_kv_heads))
    num_blocks = num_blocks_for(num_tokens)
    memory = PagedRows(spec, first_layer, num_blocks, device)
    memory.values.zero_()  # else all pages would be the system's one page of zeros
    earlier = (0,) * (num_tokens - num_rows)
    cache = SequenceCache(
        memory,
        NewSequence(
            blocks=tuple(range(num_blocks)), cached_tokens=earlier, num_prompt_tokens=num_tokens, sampling=Sampling()
        ),
    )
    cache.extend((0,) * num_rows)
    rows = blocks.pack_rows(spec, torch.zeros(num_rows, dtype=torch.int64), [Span(0, num_rows)], [cache], device)
    x_sH = torch.randn(num_rows, spec.hidden_size, device=device)

    return lambda: blocks.whole_layer(spec, 0, next(copies), x_sH, rows)


class _BlockMeter(Meter):
    """Measures latency curves of blocks. `num_samples`: of each point; one alone is not measured again.

    `on_one_thread`: all is computed in the calling thread.
    """

    def __init__(
        self, sample_seconds: float, synchronise: Callable[[], None], num_samples: int, on_one_thread: bool
    ) -> None:
        super().__init__(sample_seconds, synchronise)
        self._num_samples = num_samples
        self._on_one_thread = on_one_thread

    def curve(self, sizes: Iterable[int], block: Callable[[int], Callable[[], object]]) -> LatencyCurve:
        """Measure each size; suspicious points are measured again, and the least time counts."""
        measured = {size: self.seconds(block(size)) for size in sizes}
        give_back_freed_buffers()
        for _ in range(_MAX_REPEATS if self._num_samples > 1 else 0):
            suspicious = suspicious_point(measured)
            if suspicious is None:
                break
            measured[suspicious] = min(measured[suspicious], self.seconds(block(suspicious)))
        return fit_curve(measured)

    def step_seconds(self, sizes: Sequence[int], block: Callable[[int], Callable[[], object]]) -> dict[int, float]:
        """Seconds of a block by size, for their ratios: the least of short samples, by the clock of `least_seconds`."""
        short = Meter(_STEP_SAMPLE_SECONDS, self._synchronise)
        turns = [{size: short.sample(block(size), self._clock) for size in sizes} for _ in range(_STEP_TURNS)]
        return {size: min(turn[size] for turn in turns) for size in sizes}

    def seconds(self, block: Callable[[], object]) -> float:
        """Seconds per run: the median of several samples after a warm-up run."""
        block()
        return statistics.median(self.sample(block) for _ in range(self._num_samples))

    def least_seconds(self, blocks: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds per run of each block: the least of samples that take turns, for differences of these times.

        On one thread it is processor time, to which load in the background hardly adds; see `seconds_per_clock_second`.
        """
        for block in blocks:
            block()
        num_turns = _TURNS_PER_SAMPLE * self._num_samples
        turns = [[self.sample(block, self._clock) for block in blocks] for _ in range(num_turns)]
        return [min(samples) for samples in zip(*turns, strict=True)]

    @property
    def _clock(self) -> Callable[[], float]:
        return time.thread_time if self._on_one_thread else time.perf_counter

    @property
    def seconds_per_clock_second(self) -> float:
        """Wall time per second of `least_seconds`: more than 1 under a CPU quota."""
        return 1 / min(self.cpu_per_second, 1.0) if self._on_one_thread else 1.0


def _num_copies(spec: ModelSpec) -> int:
    return max(1, min(_MAX_COPIES, _MAX_COPIES_BYTES // layer_bytes(spec)))


def _sizes(total: int, grain: int, fractions: Sequence[float] = _MEASURED_FRACTIONS) -> list[int]:
    """The sizes to measure: multiples of the grain, up to the whole."""
    return sorted({min(-(-int(total * part) // grain) * grain or grain, total) for part in fractions})


def _step_sizes(num_rows: int, measured: Sequence[int]) -> list[int]:
    """The row counts at which to look for steps of the kernels: those that were `measured`, and at most `_MAX_STEPS` more."""
    step = _STEP_ROWS * -(-num_rows // (_STEP_ROWS * _MAX_STEPS))
    return sorted({*range(step, num_rows, step), *measured})


def _profile_request(start: StartProfile) -> BlockProfile:
    subject = start.profile.subject
    if not isinstance(subject, BlocksOf):
        raise BadRequest(reason="this profiler measures blocks of transformers")
    return profile_blocks(
        subject.model, subject.seq_len, start.num_threads, start.compute_device, subject.deterministic, subject.quick
    )


if __name__ == "__main__":
    keep_freed_buffers()
    serve_one(_profile_request)
