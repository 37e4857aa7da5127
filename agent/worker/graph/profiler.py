"""Profiler of an ONNX graph's operators on this device: `python -m agent.worker.graph.profiler`, a child of the daemon.

Operators are timed by onnxruntime's profiler, after its fusions. The whole run is timed without the profiler, which has an
overhead. The memory of a GPU is read from the CUDA driver, which also knows what onnxruntime takes of it. Not from NVML, as the
agent reads it: Tegra boards have none, and next to a context of its own the difference is the graph's.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import re
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import psutil
from google.protobuf.message import DecodeError

from agent.worker.graph import sessions
from agent.worker.graph.kernels import operators_of
from agent.worker.onnx_runtime import load_cuda, ort
from agent.worker.profiling import Meter, measure_wire_cost, serve_one
from hearth.errors import BadPlan, StoreFull
from hearth.platform.child_main import die_with_parent
from hearth.platform.machine import give_back_freed_buffers, keep_freed_buffers
from hearth.wire.codec import NUMPY_CASTS, Array
from hearth.wire.messages import ComputeDevice, GraphProfile, Kernel, StartProfile

log = logging.getLogger(__name__)

_SAMPLE_SECONDS = 0.05  # of one sample: long compared with the clock's resolution and with pauses by the scheduler
_SAMPLES_PER_MEASUREMENT = 5  # samples, whose median counts: two of them may be disturbed
_MAX_REPEATS = 3  # of a measurement that background load disturbed: bounds the time on a busy device
_MAX_SAMPLE_RATIO = 1.25  # if the slowest sample takes more than this times the fastest, the measurement was disturbed
_PROFILED_SECONDS = 0.5  # total of the profiled runs, within the limits of their number
# Minimum and maximum, after a first run for warm-up: enough for a mean; few enough for the file of events, which all are in.
_PROFILED_RUNS = (4, 40)
_MAX_RUN_RATIO = 1.5  # profiled runs that take longer than this times the median were disturbed and are ignored
_PATTERN_VALUES = 1 << 18  # random values, repeated over all weights: drawing a value for each weight would take long
_KERNEL_SUFFIX = "_kernel_time"
_RESERVE_BYTES = 64 << 20  # kept free on the disk beyond the weights, so that other programs can still write
GRAPH_FILE = "graph.onnx"
_LIBRARY = "libcuda.so.1"  # the driver's; there wherever a CUDA provider can run
_SUCCESS = 0
_IS_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED


class _Memory(NamedTuple):
    """Memory in bytes: resident in this process, anonymous and mapped from files, and free on the GPU."""

    anonymous: int
    mapped: int
    gpu_free: int

    @classmethod
    def now(cls, gpu: GpuMemory | None) -> _Memory:
        status = _status()
        free = gpu.free_bytes() if gpu is not None else 0
        return cls(status["RssAnon"] + status["RssShmem"], status["RssFile"], free)


def profile_graph(folder: Path, device: str, num_threads: int, compute_device: ComputeDevice) -> GraphProfile:
    """Profile the graph in `folder / GRAPH_FILE`. Temporary files go into `folder`, which the caller removes.

    Raises BadPlan if onnxruntime cannot load or run the graph; StoreFull, naming `device`.
    """
    keep_freed_buffers()
    gpu = None
    if compute_device == "cuda":
        load_cuda()
        gpu = gpu_memory()
    before = _Memory.now(gpu)
    try:
        model = onnx.load(folder / GRAPH_FILE, load_external_data=False)
    except DecodeError:
        raise BadPlan(reason="the graph to be profiled is not an ONNX model") from None
    _check_disk_space(model, folder, device)
    path = _with_random_weights(model, folder)
    if gpu is not None:  # the memory of an integrated GPU held the pages of the file that was just written
        before = before._replace(gpu_free=gpu.free_bytes())
    providers = sessions.providers_for(compute_device, folder)
    plain = sessions.make_session(path, "the graph", num_threads, providers)
    give_back_freed_buffers()
    peak_bytes = _status()["VmHWM"]
    loaded = _Memory.now(gpu)
    meter = Meter(_SAMPLE_SECONDS)
    run_seconds = _seconds_per_run(meter, partial(_run, plain, _feeds(plain)))
    after_run = _Memory.now(gpu)
    provider = plain.get_providers()[0]
    del plain
    on_gpu = provider != "CPUExecutionProvider"
    profile_nodes = _in_process_without_queues if on_gpu else kernels_of_graph
    return GraphProfile(
        kernels=profile_nodes(path, num_threads, sessions.without_compilers(providers), run_seconds),
        run_seconds=run_seconds,
        provider=provider,
        **_memory_of_graph(before, loaded, after_run, peak_bytes, gpu if on_gpu else None),
        wire=measure_wire_cost(meter.cpu_per_second, NUMPY_CASTS, on_gpu),
    )


def _memory_of_graph(
    before: _Memory, loaded: _Memory, after_run: _Memory, peak_bytes: int, gpu: GpuMemory | None
) -> dict[str, int]:
    """The memory that a profile names, in bytes: that of the GPU if there is one, since its memory is the device's budget."""
    host_bytes = before.anonymous + before.mapped
    if gpu is not None:
        # The budget of a device with a GPU of its own memory is already without CUDA's context (`GpuReader.read`).
        process_bytes = host_bytes + gpu.context_bytes if gpu.is_integrated else 0
        load_bytes = max(before.gpu_free - loaded.gpu_free, 0)
        return {
            "process_bytes": process_bytes,
            "load_bytes": load_bytes,
            "peak_bytes": max(process_bytes + load_bytes, peak_bytes if gpu.is_integrated else 0),
            "run_bytes": max(loaded.gpu_free - after_run.gpu_free, 0),
        }
    return {
        "process_bytes": host_bytes,
        # Mapped weights that are used in place become resident in the first run.
        "load_bytes": max(loaded.anonymous - before.anonymous, 0) + max(after_run.mapped - before.mapped, 0),
        "peak_bytes": peak_bytes,
        "run_bytes": max(after_run.anonymous - loaded.anonymous, 0),
    }


# ---- kernels --------------------------------------------------------------------------------------------------------


def _in_process_without_queues(
    path: Path, num_threads: int, providers: Sequence[sessions.Provider], run_seconds: float
) -> tuple[Kernel, ...]:
    """`kernels_of_graph` in a process where each kernel ends before the next one starts: its time is not that of starting it.

    CUDA reads that setting when it starts in a process.
    """
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, context, initializer=_without_queues, initargs=(os.getpid(),)) as pool:
            return pool.submit(kernels_of_graph, path, num_threads, providers, run_seconds).result()
    except BrokenProcessPool:
        reason = "the process that times the graph's operators ended early, often for lack of memory"
        raise BadPlan(reason=reason) from None


def _without_queues(parent: int) -> None:
    die_with_parent(parent)
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    load_cuda()


def kernels_of_graph(
    path: Path, num_threads: int, providers: Sequence[sessions.Provider], run_seconds: float
) -> tuple[Kernel, ...]:
    """The kernels of the graph in the file `path`, whose run takes `run_seconds`. Other files go next to it."""
    folder = path.parent
    model = onnx.load(path, load_external_data=False)
    optimised_path = folder / "optimised.onnx"
    (folder / "weights-of-optimised").symlink_to(os.devnull)  # only the nodes are needed, not a copy of the weights

    def configure(options: ort.SessionOptions) -> None:
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        options.optimized_model_filepath = str(optimised_path)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", "weights-of-optimised"
        )
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "256")

    profiled = sessions.make_session(path, "the graph", num_threads, providers, configure)
    feeds = _feeds(profiled)
    began, (min_runs, max_runs) = time.perf_counter(), _PROFILED_RUNS
    for index in range(1 + max_runs):
        _run(profiled, feeds)
        if index >= min_runs and time.perf_counter() - began > _PROFILED_SECONDS:
            break
    events = json.loads(Path(profiled.end_profiling()).read_text())
    optimised = onnx.load(optimised_path, load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value.name for value in model.graph.input if value.name not in weights]
    operators = operators_of(model.graph.node, optimised.graph.node, inputs)
    timed = kernel_times(events, operators)
    # The profiler adds overhead to kernels and misses the time between them, so only their proportions are used.
    scale = run_seconds / max(sum(each.seconds for each in timed), 1e-9)
    return tuple(each.model_copy(update={"seconds": each.seconds * scale}) for each in timed)


def kernel_times(events: Iterable[dict[str, Any]], operators: Mapping[str, tuple[str, ...]]) -> list[Kernel]:
    """Mean seconds of each node per run, in execution order, from an onnxruntime profile, with its `operators`.

    The mean is used because the pauses of a CPU quota hit few kernels, each for long. The first run and disturbed runs are
    ignored. Nodes inside a loop or a branch count as part of that operator.
    """
    runs: list[tuple[int, int]] = []
    nodes: list[dict[str, Any]] = []
    for event in events:
        if event.get("name") == "model_run":
            runs.append((event["ts"], event["ts"] + event["dur"]))
        elif event.get("cat") == "Node" and event["name"].endswith(_KERNEL_SUFFIX):
            nodes.append(event)
    nodes.sort(key=lambda event: (event["ts"], -event["dur"]))
    per_run = [_outermost(event for event in nodes if start <= event["ts"] < stop) for start, stop in runs[1:]]
    totals = [sum(event["dur"] for event in run) for run in per_run]
    median_total = statistics.median(totals) if totals else 0
    undisturbed = [run for run, total in zip(per_run, totals, strict=True) if total <= _MAX_RUN_RATIO * median_total]
    sums: dict[str, int] = defaultdict(int)
    arguments: dict[str, dict[str, Any]] = {}
    for event in chain.from_iterable(undisturbed):
        name = event["name"].removesuffix(_KERNEL_SUFFIX)
        sums[name] += event["dur"]
        arguments.setdefault(name, event["args"])
    return [
        Kernel(
            name=name[:1024],
            kind=str(arguments[name].get("op_name", ""))[:256],
            provider=str(arguments[name].get("provider", "")),
            seconds=total / len(undisturbed) / 1e6,
            operators=operators.get(name, ()),
        )
        for name, total in sums.items()
    ]


def _outermost(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    outermost, end = [], -1
    for event in events:
        if event["ts"] >= end:
            outermost.append(event)
            end = event["ts"] + event["dur"]
    return outermost


# ---- the graph's weights and inputs -----------------------------------------------------------------------------------


def _with_random_weights(model: onnx.ModelProto, folder: Path) -> Path:
    """Write the model with random weights for its placeholders, in one external file that onnxruntime maps."""
    rng = np.random.default_rng(0)
    pattern = rng.standard_normal(_PATTERN_VALUES, dtype=np.float32)
    offset = 0
    with (folder / "weights").open("wb") as file:
        for tensor in sessions.placeholders_of(model):
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            num_bytes = 0
            for block in _random_blocks(tuple(tensor.dims), dtype, pattern):
                num_bytes += file.write(block.tobytes())
            sessions.set_external_data(tensor, "weights", offset, num_bytes)
            offset += num_bytes
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _check_disk_space(model: onnx.ModelProto, folder: Path, device: str) -> None:
    """Raise StoreFull if the weights do not fit on the disk."""
    needed = sum(map(sessions.data_bytes, sessions.placeholders_of(model)))
    free = max(shutil.disk_usage(folder).free - _RESERVE_BYTES, 0)
    if needed > free:
        raise StoreFull(device=device, needed_bytes=needed, free_bytes=free)


def _random_blocks(shape: Sequence[int], dtype: np.dtype[Any], pattern: Array) -> Iterable[Array]:
    """Random weights that preserve the scale of activations, so that none become infinite or denormal, which are slower."""
    size = int(np.prod(shape, dtype=np.int64))
    if dtype.kind in "iub":  # ones, which are valid as numbers and as indices
        values = np.ones(_PATTERN_VALUES, dtype)
    elif len(shape) < 2:  # norms and biases; a variance must be positive
        values = (0.5 + np.abs(pattern) / 8).astype(dtype)
    else:
        fan_in = shape[0] if len(shape) == 2 else size // max(shape[0], 1)
        values = (pattern / np.sqrt(max(fan_in, 1))).astype(dtype)
    for start in range(0, size, _PATTERN_VALUES):
        yield values[: size - start]


def _feeds(session: ort.InferenceSession) -> dict[str, Array]:
    """Random inputs; ones for integers, which are often indices. Raises BadPlan for an input of unknown size or type."""
    rng, feeds = np.random.default_rng(1), {}
    for value in session.get_inputs():
        dtype = sessions.DTYPES.get(value.type)
        if dtype is None or not all(isinstance(size, int) for size in value.shape):
            raise BadPlan(reason=f"the input {value.name} is {value.type} {value.shape}: its size or type is not known")
        if np.dtype(dtype).kind == "f":
            feeds[value.name] = rng.standard_normal(value.shape).astype(dtype)
        else:
            feeds[value.name] = np.ones(value.shape, dtype)
    return feeds


def _run(session: ort.InferenceSession, feeds: dict[str, Array]) -> None:
    try:
        session.run(None, feeds)
    except Exception as error:  # onnxruntime's errors have no common base class
        raise BadPlan(reason=f"onnxruntime cannot run the graph: {sessions.brief_message(error)}") from None


# ---- measuring --------------------------------------------------------------------------------------------------------


def _seconds_per_run(meter: Meter, run: Callable[[], object]) -> float:
    """Seconds per run: the median of samples after a warm-up run. If samples differ, measure again; the least counts."""
    run()
    least = float("inf")
    for _ in range(1 + _MAX_REPEATS):
        samples = [meter.sample(run) for _ in range(_SAMPLES_PER_MEASUREMENT)]
        least = min(least, statistics.median(samples))
        if max(samples) <= _MAX_SAMPLE_RATIO * min(samples):
            break
    return least


def _status() -> dict[str, int]:
    """Memory figures of this process in bytes, from /proc/self/status; 0 if not available."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        text = ""
    fields = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s*(\d+) kB$", text, re.MULTILINE)}
    return {name: fields.get(name, 0) for name in ("RssAnon", "RssShmem", "RssFile", "VmHWM")}


def _profile_request(start: StartProfile) -> GraphProfile:
    return profile_graph(Path(start.folder), start.device, start.num_threads, start.compute_device)


if __name__ == "__main__":
    serve_one(_profile_request)


class GpuMemory:
    """Reads the free memory of the GPU. Starts CUDA in this process; `context_bytes` of the system's memory went to that.

    Raises OSError if there is no driver or no device.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        device, self._context, integrated = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        available_bytes = psutil.virtual_memory().available
        _check(self._library.cuInit(0))
        _check(self._library.cuDeviceGet(ctypes.byref(device), 0))
        _check(self._library.cuDeviceGetAttribute(ctypes.byref(integrated), _IS_INTEGRATED, device))
        _check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))
        self.is_integrated = bool(integrated.value)  # the GPU uses the system's memory, as a Jetson's does
        self.context_bytes = max(available_bytes - psutil.virtual_memory().available, 0)

    def free_bytes(self) -> int:
        """Free memory, of all processes. Raises BadPlan if the driver no longer answers."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        try:
            _check(self._library.cuCtxSetCurrent(self._context))
            _check(self._library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        except OSError as error:
            raise BadPlan(reason=f"the GPU's memory cannot be read: {error}") from None
        return free.value


def gpu_memory() -> GpuMemory | None:
    """The memory of the GPU; None, with a warning, if it cannot be read."""
    try:
        return GpuMemory()
    except (OSError, AttributeError) as error:  # AttributeError: an old driver that lacks a function
        log.warning("the GPU's memory cannot be read, so that plans of graphs count main memory: %s", error)
        return None


def _check(status: int) -> None:
    if status != _SUCCESS:
        raise OSError(f"the CUDA driver answers with error {status}")
