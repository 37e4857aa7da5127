"""A double of a CUDA device under torch, for machines without one: values are computed on the CPU, and CUDA's rules are kept.

Inside `CudaDouble`, `torch.device("cuda", 0)` works in all threads that start meanwhile: `torch.cuda.Stream`, `Event` and
`current_stream` too. The worker's code and its staging run unchanged. The rules, each of which raises `CudaRule`:

1. An operation does not mix tensors of the device and of the host, except copies, host scalars (0-dimensional tensors) and
   host indexes.
2. Operations of CPU kernels alone (oneDNN, `..._for_cpu`) do not take tensors of the device.
3. `numpy()`, `record_stream` of a host tensor, and asynchronous copies with host memory that is not pinned are refused.
4. An asynchronous copy takes place when somebody waits for it, not before: what reads its target earlier finds garbage (NaN, or
   the largest integers), and what overwrites its host memory earlier is copied.
5. Two accesses to the same bytes of the device from different streams, one of them a write, must be ordered by events.
6. Memory that a stream other than its own has used must be recorded for that stream before it is freed.

`synchronisations` counts how often the host has waited for a value: `item()`, `cpu()`, `nonzero()`, `equal()` and the like, and
events. A wait for an event takes `event_seconds`, as the work before it would. `held_bytes` and `peak_bytes` count the tensors.

Not modelled: speed, the size of memory, CUDA's own rounding, and kernels that exist for some types or shapes only, except
those for int4, which check what torch's check.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own custom)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from agent.worker.transformer.kernels import int4_cuda

CUDA = torch.device("cuda", 0)
_HOST = torch.device("cpu")

_COPIES = ("aten::copy_", "aten::_to_copy")
_HOST_INDEXES = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
_WAITING = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero", "aten::_unique2",
)  # fmt: skip
_CPU_KERNELS = ("mkldnn", "onednn", "_for_cpu")


class CudaRule(AssertionError):
    """A rule of CUDA was broken."""


class OnGpu(Tensor):
    """A tensor on the device; `inner` holds its values. C++ takes it for a tensor without values ("meta")."""

    inner: Tensor
    double: CudaDouble

    @staticmethod
    def __new__(cls, inner: Tensor, double: CudaDouble) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("meta"),
        )  # fmt: skip

    def __init__(self, inner: Tensor, double: CudaDouble) -> None:
        self.inner, self.double = inner, double
        double.memory_of(inner).held_by(self)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """In threads that have no mode."""
        flat, _ = pytree.tree_flatten((args, kwargs or {}))
        return next(each for each in flat if isinstance(each, OnGpu)).double.run(function, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.double.memory_of(self.inner).recorded.add(stream.number)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise CudaRule("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.inner!r})"


class _Access(NamedTuple):
    start: int
    stop: int
    writes: bool
    stream: int


class _Memory:
    """A piece of the device's memory: who has accessed it, and which streams are recorded."""

    def __init__(self, double: CudaDouble, pointer: int, num_bytes: int, stream: int) -> None:
        self._double = double
        self._pointer = pointer
        self.num_bytes = num_bytes
        self._num_tensors = 0
        self.stream = stream
        self.recorded: set[int] = set()
        self.accesses: dict[_Access, int] = {}  # the number of the last one in its stream

    def held_by(self, tensor: OnGpu) -> None:
        self._num_tensors += 1
        weakref.finalize(tensor, self._release)

    def _release(self) -> None:
        self._num_tensors -= 1
        if not self._num_tensors:
            self._double.freed(self._pointer, self)


class Stream:
    """A queue of work. `clock`: for each stream, the number of its last operation that is before all later ones of this one."""

    double: CudaDouble  # of the subclass that `CudaDouble` makes

    def __init__(self, device: object = None, **_: Any) -> None:
        self.number = self.double.add_stream(self)
        self.clock = {self.number: 0}

    def wait_stream(self, other: Stream) -> None:
        self._join(other.clock)

    def wait_event(self, event: Event) -> None:
        self._join(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.double.event_type()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.double.wait_on_host(self.clock)

    def _join(self, clock: dict[int, int]) -> None:
        with self.double.lock:
            for number, count in clock.items():
                self.clock[number] = max(self.clock.get(number, 0), count)


class Event:
    """A moment of a stream."""

    double: CudaDouble

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.double.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.double.current).wait_event(self)

    def synchronize(self) -> None:
        self.double.wait_on_host(self.clock)


class AsyncCopy(NamedTuple):
    """An asynchronous copy: what is before it in its stream, and what makes it."""

    stream: int
    clock: dict[int, int]
    to_host: bool
    make: Callable[[], object]

    def waits_for(self, stream: Stream) -> bool:
        """Whether anything that `stream` has computed is before it."""
        return self.clock.get(stream.number, 0) > 0


class CudaDouble:
    """Context manager: the device. `capability`: its compute capability."""

    def __init__(self, capability: tuple[int, int] = (9, 0), event_seconds: float = 0.0) -> None:
        self.lock = threading.RLock()
        self.synchronisations = 0
        self.held_bytes = self.peak_bytes = 0  # of the device's memory; the most so far
        self.broken: list[CudaRule] = []  # rules that were broken where nothing can be raised
        self._capability = capability
        self._event_seconds = event_seconds
        self._streams: list[Stream] = []
        self._memories: dict[int, _Memory] = {}
        self._pinned: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.copies: list[AsyncCopy] = []  # all so far
        self._pending: list[AsyncCopy] = []  # those that have not taken place
        self._threads = threading.local()
        self.stream_type = type("Stream", (Stream,), {"double": self})
        self.event_type = type("Event", (Event,), {"double": self})
        self._default = self.stream_type()
        self._patches = ExitStack()

    def __enter__(self) -> CudaDouble:
        _make_operators()
        replaced: dict[str, Any] = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda device=None: self._capability,
            "get_device_properties": lambda device=None: SimpleNamespace(name="double", L2_cache_size=1 << 20),
            "mem_get_info": lambda device=None: (1 << 30, 1 << 30),
            "synchronize": lambda device=None: [stream.synchronize() for stream in self._streams],
            "Stream": self.stream_type,
            "Event": self.event_type,
            "current_stream": lambda device=None: self.current,
            "stream": self._on_stream,
        }
        double, run = self, threading.Thread.run

        def run_with_modes(thread: threading.Thread) -> None:
            with double.modes():
                run(thread)

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            raise CudaRule(f"record_stream of a host tensor of {tensor.dtype}")

        self._patches.enter_context(mock.patch.object(Tensor, "record_stream", record_stream))
        for name, value in replaced.items():
            self._patches.enter_context(mock.patch.object(torch.cuda, name, value))
        self._patches.enter_context(mock.patch.object(threading.Thread, "run", run_with_modes))
        self._patches.enter_context(self.modes())
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._patches.close()
        if self.broken and failure is None:
            raise self.broken[0]

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Tensors of the device in this thread."""
        with _Functions(), _Operations(self):
            yield

    @contextmanager
    def _on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._threads.stream = self.current, stream
        try:
            yield
        finally:
            self._threads.stream = before

    @property
    def current(self) -> Stream:
        """The current stream of this thread."""
        stream: Stream = getattr(self._threads, "stream", self._default)
        return stream

    def add_stream(self, stream: Stream) -> int:
        self._streams.append(stream)
        return len(self._streams) - 1

    # ---- memory -----------------------------------------------------------------------------------------------------

    def memory_of(self, inner: Tensor) -> _Memory:
        pointer = inner.untyped_storage().data_ptr()
        with self.lock:
            if pointer not in self._memories:
                num_bytes = inner.untyped_storage().nbytes()
                self._memories[pointer] = _Memory(self, pointer, num_bytes, self.current.number)
                self.held_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            return self._memories[pointer]

    def freed(self, pointer: int, memory: _Memory) -> None:
        """Nothing refers to this memory any more."""
        with self.lock:
            if self._memories.get(pointer) is memory:
                del self._memories[pointer]
                self.held_bytes -= memory.num_bytes
            foreign = {access.stream for access in memory.accesses} - {memory.stream} - memory.recorded
            if foreign and pointer:
                self.broken.append(CudaRule(f"memory was freed that the streams {foreign} use without `record_stream`"))

    def _touch(self, stream: Stream, tensor: Tensor, writes: bool) -> None:
        """Note an access, after a check that all that conflict with it are before it."""
        if not tensor.numel():
            return
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.data_ptr()
        stop = start + span * tensor.element_size()
        accesses = self.memory_of(tensor).accesses
        for access, count in accesses.items():
            ordered = count <= stream.clock.get(access.stream, 0)
            if not ordered and (writes or access.writes) and access.start < stop and start < access.stop:
                kinds = ("writes" if writes else "reads", "writes" if access.writes else "reads")
                raise CudaRule(
                    f"stream {stream.number} {kinds[0]} what stream {access.stream} {kinds[1]}, in no certain order"
                )
        accesses[_Access(start, stop, writes, stream.number)] = stream.clock[stream.number]

    # ---- work -------------------------------------------------------------------------------------------------------

    def wait_on_host(self, clock: dict[int, int]) -> None:
        """The host waits until this moment."""
        if self._event_seconds:
            time.sleep(self._event_seconds)
        with self.lock:
            self.synchronisations += 1
            self._carry_out(clock, to_host=True)

    def _carry_out(self, clock: dict[int, int], to_host: bool) -> None:
        """Make the copies up to this moment; those to the host only if the host waits."""
        due = [
            each
            for each in self._pending
            if each.clock[each.stream] <= clock.get(each.stream, 0) and (to_host or not each.to_host)
        ]
        self._pending = [each for each in self._pending if each not in due]
        with torch.inference_mode():
            for each in due:
                each.make()

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation: on the device if one of its tensors is, or is to be."""
        flat, _ = pytree.tree_flatten((args, kwargs))
        ours = [each for each in flat if isinstance(each, OnGpu)]
        if not ours and not _is_gpu(kwargs.get("device")):
            return self._run_on_host(function, args, dict(kwargs))
        # All tensors of the device are ordinary ones: views of an inference tensor are refused outside that mode.
        with self.lock, torch.inference_mode(False), torch.no_grad():
            return self._run(function, args, dict(kwargs), flat, ours)

    def _run_on_host(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pin = kwargs.pop("pin_memory", None)
        result = function(*args, **kwargs)
        if pin:
            self._pinned[result.untyped_storage().data_ptr()] = result
        return result

    def _run(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Any], ours: list[OnGpu]
    ) -> Any:
        name, target = function._schema.name, kwargs.get("device")
        to_device = target is None or _is_gpu(target)
        self._check_places(name, flat, ours)
        if to_device and target is not None:
            kwargs["device"] = _HOST
        elif ours and target is not None:  # a copy to the host
            self._wait_for_stream()
        if name in _WAITING:
            self._wait_for_stream()
        stream = self.current
        stream.clock[stream.number] += 1
        self._carry_out(stream.clock, to_host=False)
        if name == "aten::copy_":
            return self._copy(stream, *args, **kwargs)
        written = _written(function, args, kwargs)
        for tensor in ours:
            self._touch(stream, tensor.inner, any(tensor is each for each in written))
        inner_args, inner_kwargs = pytree.tree_map(_inner, (args, kwargs))
        emulated = _EMULATED.get(name)
        result = emulated(*inner_args, **inner_kwargs) if emulated else function(*inner_args, **inner_kwargs)
        known = {id(tensor.inner): tensor for tensor in ours}

        def outer(value: Any) -> Any:
            if not isinstance(value, Tensor) or not to_device:
                return value
            return known[id(value)] if id(value) in known else OnGpu(value, self)

        wrapped = pytree.tree_map(outer, result)
        if not _is_view(function):
            for tensor in pytree.tree_leaves(wrapped):
                if isinstance(tensor, OnGpu) and id(tensor.inner) not in known:
                    self._touch(stream, tensor.inner, writes=True)
        return wrapped

    def _check_places(self, name: str, flat: list[Any], ours: list[OnGpu]) -> None:
        if ours and any(kernel in name for kernel in _CPU_KERNELS):
            raise CudaRule(f"{name} has no kernel for CUDA")
        host = [each for each in flat if isinstance(each, Tensor) and not isinstance(each, OnGpu) and each.dim()]
        if ours and host and name not in _COPIES and not (name in _HOST_INDEXES and flat[0] is ours[0]):
            raise CudaRule(f"{name} takes tensors on different devices, cuda:0 and cpu")

    def _wait_for_stream(self) -> None:
        self.wait_on_host(self.current.clock)

    def _copy(self, stream: Stream, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        into_inner, source_inner = _inner(into), _inner(source)
        for tensor, writes in ((source, False), (into, True)):
            if isinstance(tensor, OnGpu):
                self._touch(stream, tensor.inner, writes)
        host = next((each for each in (into, source) if not isinstance(each, OnGpu)), None)
        if host is not None and non_blocking and host.dim():
            if host.untyped_storage().data_ptr() not in self._pinned:
                raise CudaRule("an asynchronous copy with host memory that is not pinned")
            to_host = host is into
            values = source_inner.clone() if to_host else source_inner
            _fill_with_garbage(into_inner)
            copy = AsyncCopy(stream.number, dict(stream.clock), to_host, lambda: into_inner.copy_(values))
            self.copies.append(copy)
            self._pending.append(copy)
            return into
        into_inner.copy_(source_inner)
        if host is into:
            self._wait_for_stream()
        return into


@cache
def _make_operators() -> None:
    """Make Python's objects of all operators.

    torch makes each at its first dispatch and keeps it without a reference (2.13, `getTorchApiFunction`). When two threads
    do so at once, the second object replaces the first, which is freed, and the process dies.
    """
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        getattr(packet, schema.overload_name or "default", None)


class _Operations(TorchDispatchMode):
    def __init__(self, double: CudaDouble) -> None:
        super().__init__()
        self._double = double

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._double.run(function, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What reaches no dispatcher: tensors that are made of Python's numbers, and lists as indexes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and _is_gpu(kwargs.get("device")):
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1], dtype=torch.int64), *args[2:])  # C++ would make it on "meta"
        return function(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    """Whether this is the device, which is "meta" to C++."""
    return device is not None and torch.device(device).type in ("cuda", "meta")


@contextmanager
def gpu(event_seconds: float = 0.0) -> Iterator[CudaDouble | None]:
    """The CUDA device of this machine (None), or its double."""
    if torch.cuda.is_available():
        yield None
        return
    try:
        with CudaDouble(event_seconds=event_seconds) as double:
            yield double
    finally:
        forget_devices()


def forget_devices() -> None:
    """Forget what is known of the kernels of a device: it holds for one double."""
    int4_cuda._packing.cache_clear()
    int4_cuda.has_int4_kernel.cache_clear()


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


def _is_view(function: Any) -> bool:
    return any(each.alias_info is not None for each in function._schema.returns)


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operation writes to."""
    found = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += pytree.tree_leaves(value)
    return found


def _fill_with_garbage(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


# ---- torch's kernels for int4 ---------------------------------------------------------------------------------------

# The inputs of a word's halves of 16 bits, from the low bits on, for the first of the four words of an output in a block of 32
# inputs. This is the layout of torch 2.11 on an H200, as found by packing known weights.
_WORD_INPUTS = (0, 8, 16, 24, 1, 9, 17, 25)


def pack_int4(steps: Tensor, inner_tiles: int) -> Tensor:
    """`_convert_weight_to_int4pack` with two tiles: two steps in a byte [n, k / 2], the first one in the high half."""
    if steps.dtype is not torch.uint8 or inner_tiles != 2 or steps.shape[0] % 8 or steps.shape[1] % 16:
        raise RuntimeError("Expected a uint8 tensor of whole blocks")
    whole = torch.stack([steps >> 4, steps & 15], dim=2).flatten(1).long()
    blocks = whole.unflatten(1, (-1, 32)).unflatten(0, (-1, 8)).transpose(1, 2)  # [n / 8, k / 32, 8, 32]
    words = torch.zeros(*blocks.shape[:3], 4, dtype=torch.int64)
    for place, first in enumerate(_WORD_INPUTS):
        words |= blocks[..., first : first + 8 : 2] << 4 * place
    return words.flatten(2).to(torch.int32)[..., None]


def unpack_int4(packed: Tensor) -> Tensor:
    """The steps [n,k] int64."""
    words = packed.squeeze(-1).unflatten(2, (8, 4)).long()
    blocks = words.new_empty(*words.shape[:3], 32)
    for place, first in enumerate(_WORD_INPUTS):
        blocks[..., first : first + 8 : 2] = words >> 4 * place & 15
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


def _multiply_int4(x: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """`_weight_int4pack_mm`: (step - 8) * scale + zero, rounded to bfloat16."""
    if x.dtype is not torch.bfloat16 or scales_and_zeros.dtype is not torch.bfloat16 or not x.is_contiguous():
        raise RuntimeError("Expected contiguous tensors of bfloat16")
    steps = unpack_int4(packed).unflatten(1, (-1, group)) - 8
    scales, zeros = (part.t()[..., None].float() for part in scales_and_zeros.unbind(2))
    weight = (steps * scales + zeros).bfloat16().flatten(1)
    return (x.float() @ weight.float().t()).bfloat16()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, compute_log_sumexp: bool, dropout: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """CUDA's fused attention, by the CPU's. The log-sum-exps are padded to a multiple of 32 queries."""
    if bias is not None:
        return F.scaled_dot_product_attention(query, key, value, bias, scale=scale), *(torch.empty(0),) * 3
    context, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=is_causal, scale=scale
    )
    padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.nan)
    return context, padded, torch.empty(0), torch.empty(0)


_EMULATED: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_efficient_attention": _attend,
    "aten::_convert_weight_to_int4pack": pack_int4,
    "aten::_weight_int4pack_mm": _multiply_int4,
}
