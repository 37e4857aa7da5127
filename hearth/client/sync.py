"""The client library for programs without an event loop: blocking calls to an `AsyncHome` that runs in its own thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from hearth.client.answers import Generation, RunCoroutine
from hearth.client.events import Events
from hearth.client.home import CALL_SECONDS, AsyncHome
from hearth.errors import ConnectionLost, HearthError
from hearth.platform.security import Credential, coordinator_access, resolve_credential

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 2 * CALL_SECONDS  # of `close`, which takes milliseconds: longer than its parts may take

_P = ParamSpec("_P")
_T = TypeVar("_T")
_A = TypeVar("_A")


def _blocking(
    call: Callable[Concatenate[AsyncHome, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Home, _P], _T]:
    """Make a blocking method of `Home` from a method of `AsyncHome`, with the same parameters and docstring."""

    @functools.wraps(call)
    def wrapper(self: Home, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._run(call(self._home, *args, **kwargs))

    return wrapper


def _blocking_iterator(
    call: Callable[Concatenate[AsyncHome, _P], _A],
    blocking: Callable[[_A, RunCoroutine, asyncio.AbstractEventLoop], _T],
) -> Callable[Concatenate[Home, _P], _T]:
    """As `_blocking`, for a method that returns an asynchronous iterator; `blocking` makes the blocking one of it."""

    @functools.wraps(call)
    def wrapper(self: Home, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return blocking(call(self._home, *args, **kwargs), self._run, self._loop)

    wrapper.__doc__ = str(call.__doc__).replace("async for", "for")
    return wrapper


class Home(AbstractContextManager["Home"]):
    """A connection to the home's coordinator, safe to share between threads. Create it with `connect`."""

    def __init__(self, home: AsyncHome) -> None:
        self._home = home
        self._loop = asyncio.new_event_loop()
        self._pending: set[concurrent.futures.Future[Any]] = set()  # results that callers' threads wait for
        self._close_lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="hearth-client", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connection; calls in progress raise ConnectionLost. May be called more than once."""
        with self._close_lock:  # no call may start once the loop is about to stop
            already, self._closed = self._closed, True
        if already:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(_CLOSE_SECONDS)
        except concurrent.futures.TimeoutError:
            log.warning("the connection did not close within %g s; its thread is left behind", _CLOSE_SECONDS)
        else:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        for future in list(self._pending):
            future.cancel()

    def __exit__(self, *_: object) -> None:
        self.close()

    embed = _blocking(AsyncHome.embed)
    request_embeddings = _blocking(AsyncHome.request_embeddings)
    hidden_states = _blocking(AsyncHome.hidden_states)
    generate = _blocking_iterator(AsyncHome.generate, Generation)
    infer = _blocking(AsyncHome.infer)
    request_inference = _blocking(AsyncHome.request_inference)
    model_info = _blocking(AsyncHome.model_info)
    models = _blocking(AsyncHome.models)
    readiness = _blocking(AsyncHome.readiness)
    ready = _blocking(AsyncHome.ready)
    wait_ready = _blocking(AsyncHome.wait_ready)
    devices = _blocking(AsyncHome.devices)
    keep_loaded = _blocking(AsyncHome.keep_loaded)
    status = _blocking(AsyncHome.status)
    serve_model = _blocking(AsyncHome.serve_model)
    stop_model = _blocking(AsyncHome.stop_model)
    events = _blocking_iterator(AsyncHome.events, Events)
    metrics = _blocking(AsyncHome.metrics)
    add_app = _blocking(AsyncHome.add_app)
    revoke_app = _blocking(AsyncHome.revoke_app)
    add_device = _blocking(AsyncHome.add_device)
    revoke_device = _blocking(AsyncHome.revoke_device)
    apps = _blocking(AsyncHome.apps)
    _open = _blocking(AsyncHome.open)

    def _run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop's thread and wait for its result. Ctrl-C in the caller cancels it."""
        with self._close_lock:
            if self._closed:
                call.close()
                raise ConnectionLost(endpoint="the coordinator")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
            self._pending.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # another thread has closed the connection
            raise ConnectionLost(endpoint="the coordinator") from None
        except BaseException:
            future.cancel()
            raise
        finally:
            self._pending.discard(future)

    async def _finish(self) -> None:
        """Close the connection and cancel the calls of other threads before the loop stops."""
        await self._home.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CALL_SECONDS)


def connect(
    address: str | None = None,
    key: str | Path | Credential | None = None,
    timeout_seconds: float = 10.0,
    interfaces: Sequence[str] | None = None,
) -> Home:
    """Connect to the home's coordinator at `address` ("host" or "host:port"), or find it by mDNS.

    `key` is a credential, its one-line text, or the path of its file; the default is the file that `hearth key import`
    writes. `interfaces` are the local addresses to use for mDNS. Use the result as a context manager, or call `close()`.

    Raises KeyMissing, NoCoordinator, Unreachable, NotServing, WrongKey, ProtocolMismatch.
    """
    home = Home(AsyncHome(coordinator_access(resolve_credential(key)), address, interfaces))
    try:
        home._open(timeout_seconds)
    except HearthError:
        home.close()
        raise
    return home
