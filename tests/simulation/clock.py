"""A deterministic event loop on a virtual clock, and the simulated processes whose callbacks it runs.

The clock stands still while a callback runs and jumps to the next timer when nothing is ready. Every callback belongs to the
process in whose context it was scheduled: callbacks of a stopped process wait until it continues, those of a process that was
killed never run, as if the kernel had taken it off the processor.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

THREAD_SECONDS = 0.001  # virtual time that a function in a worker thread takes
_MIN_TASKS_CHECKED = 64  # a process drops its ended tasks when it has this many more than before
MAX_CALLBACKS_AT_ONCE = 100_000  # callbacks at one virtual time; more are an endless loop without a wait

CURRENT_PROCESS: ContextVar[Process | None] = ContextVar("CURRENT_PROCESS", default=None)


class Stuck(Exception):
    """Nothing is ready and no timer is set, or the clock does not advance."""


class Process:
    """A simulated process on a host. Children are killed with it."""

    def __init__(self, loop: VirtualLoop, host: Any, name: str) -> None:
        parent = CURRENT_PROCESS.get()
        self.pid = loop.next_pid()
        self.host = host
        self.name = name
        self.alive = True
        self.stopped = False
        self.exit_code: int | None = None
        self.children: list[Process] = []
        self._tasks: list[asyncio.Task[Any]] = []  # strong references: a killed process must not run `finally` blocks
        self._num_tasks_checked = _MIN_TASKS_CHECKED
        self.at_exit: list[Callable[[], None]] = []  # the kernel's part: closes sockets, tells the parent
        self.variables: dict[str, Any] = {}
        self._loop = loop
        self._waiting: deque[_Handle] = deque()  # callbacks of a stopped process
        self.context: Context = copy_context()
        self.context.run(CURRENT_PROCESS.set, self)
        if parent is not None and parent.host is host:
            parent.children.append(self)

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks of the process that have not ended."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return self._tasks

    def add_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) > self._num_tasks_checked:  # drop those that have ended
            self._num_tasks_checked = 2 * len(self.tasks) + _MIN_TASKS_CHECKED

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of this process."""
        return self.context.run(self._loop.create_task, coroutine)

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        while self._waiting:
            self._loop.add_ready(self._waiting.popleft())

    def kill(self, code: int = -9) -> None:
        """SIGKILL: no callback of the process runs any more."""
        if not self.alive:
            return
        self.alive, self.stopped, self.exit_code = False, False, code
        self._waiting.clear()
        for child in self.children:
            child.kill()
        for callback in self.at_exit:
            callback()

    def hold(self, handle: _Handle) -> None:
        self._waiting.append(handle)

    def __repr__(self) -> str:
        return f"{self.name}[{self.pid}]"


class _Numbered:
    """Its hash, and so its order in sets, does not depend on memory addresses: a number in the order of the first use."""

    number = 0  # none yet

    def __hash__(self) -> int:
        if not self.number:
            self.number = self.get_loop().next_number()  # type: ignore[attr-defined]
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Task(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    """A task whose order in sets repeats."""


class _Future(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    """A future whose order in sets repeats."""


class _Handle(list):  # type: ignore[type-arg]
    """A callback that was scheduled: callback, arguments, context, and the time of a timer.

    A run creates thousands, so it is a list, which C code constructs. The callback is None once it is cancelled.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[0] = None

    def cancelled(self) -> bool:
        return self[0] is None

    def when(self) -> float:
        when: float = self[3]
        return when

    def __repr__(self) -> str:
        return f"{self[0]}{self[1]}"


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    """An event loop without I/O."""

    def __init__(self) -> None:
        super().__init__()
        self.virtual_time = 0.0
        self.num_callbacks = 0
        self._numbers = itertools.count(1)
        self._pids = itertools.count(5_000_000)  # above the kernel's largest pid: /proc has none of them
        self._timers: list[tuple[float, int, _Handle]] = []  # ties fire in the order of their creation
        self.set_task_factory(self._make_task)

    def next_number(self) -> int:
        return next(self._numbers)

    def next_pid(self) -> int:
        return next(self._pids)

    def time(self) -> float:
        return self.virtual_time

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def add_ready(self, handle: _Handle) -> None:
        self._ready.append(handle)

    def call_in(
        self, process: Process | None, delay_seconds: float, callback: Callable[..., object], *args: Any
    ) -> _Handle:
        """Call back after a delay as a part of `process`; None: as a part of the simulated world."""
        when = self.virtual_time + delay_seconds
        timer = _Handle((callback, args, process.context if process is not None else _WORLD, when))
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run the function after `THREAD_SECONDS`, in the loop's own thread."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self.call_later(THREAD_SECONDS, run)
        return future

    async def getaddrinfo(self, host: str, *_: Any, **__: Any) -> Any:
        """No name has an address: the network knows hosts by their names, and the real resolver would take real seconds."""
        raise socket.gaierror(socket.EAI_NONAME, f"{host} is a name of the simulation")

    def add_signal_handler(self, number: int, callback: Callable[..., object], *args: Any) -> None:
        process = CURRENT_PROCESS.get()
        process.variables[f"signal {int(number)}"] = lambda: self.call_in(process, 0.0, callback, *args)

    def remove_signal_handler(self, number: int) -> bool:
        process = CURRENT_PROCESS.get()
        return process is not None and process.variables.pop(f"signal {int(number)}", None) is not None

    def _make_task(self, loop: VirtualLoop, coroutine: Any, **options: Any) -> _Task:
        task = _Task(coroutine, loop=loop, **options)
        process = CURRENT_PROCESS.get()
        if process is not None:
            process.add_task(task)
        return task

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> _Handle:
        handle = _Handle((callback, args, copy_context() if context is None else context, 0.0))
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        when = self.virtual_time + delay
        timer = _Handle((callback, args, copy_context() if context is None else context, when))
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        timer = _Handle((callback, args, copy_context() if context is None else context, when))
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        """Run callbacks until the loop is stopped: more than one, since a call of this method costs as much as a callback."""
        ready, timers, current = self._ready, self._timers, CURRENT_PROCESS
        num_at_once = 0
        while not self._stopping:
            if not ready:
                self.num_callbacks += num_at_once
                num_at_once = 0
                self._jump_to_next_timer(timers, ready)
            num_at_once += 1
            if num_at_once > MAX_CALLBACKS_AT_ONCE:
                raise Stuck(f"{num_at_once} callbacks at {self.virtual_time:.3f} s: an endless loop without a wait")
            handle = ready.popleft()
            callback, args, context, _ = handle
            if callback is None:
                continue
            process = context.get(current)
            if process is not None:
                if not process.alive:
                    continue
                if process.stopped:
                    process.hold(handle)
                    continue
            try:
                context.run(callback, *args)
            except KeyboardInterrupt:
                raise
            except SystemExit as error:
                if process is None:
                    raise
                process.kill(1)
                self.call_exception_handler({"message": f"{process} exited", "exception": error})
            except BaseException as error:
                self.call_exception_handler({"message": f"exception in {handle}", "exception": error})
        self.num_callbacks += num_at_once

    def _jump_to_next_timer(self, timers: list[tuple[float, int, _Handle]], ready: deque[_Handle]) -> None:
        while timers and timers[0][2][0] is None:
            heapq.heappop(timers)
        if not timers:
            raise Stuck(f"nothing can happen any more at {self.virtual_time:.3f} s")
        when = timers[0][0]
        self.virtual_time = max(when, self.virtual_time)
        while timers and timers[0][0] <= when:
            handle = heapq.heappop(timers)[2]
            if handle[0] is not None:
                ready.append(handle)

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


_WORLD: Context = Context()  # no process: the world outside of all of them
