"""The client's connection to one of the home's coordinators: finds them, connects to one that answers, changes to another.

An mDNS record is only a hint, since any host on the network can send one. A coordinator counts as found once the encrypted
handshake with its key and the exchange of `Hello` have succeeded. So is the endpoint where one answered last, which is kept in
the user's cache folder: it is tried first.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import zmq.asyncio

from hearth import errors
from hearth.files import write_atomically
from hearth.platform.asyncio_tools import cancel_all, loop_time, with_timeout
from hearth.platform.curve import fingerprint
from hearth.platform.disk import on_disk
from hearth.platform.network import bracketed
from hearth.platform.security import Access
from hearth.wire import messages as wire
from hearth.wire.rpc import RpcClient

log = logging.getLogger(__name__)

COORDINATOR_PORT = 47830  # default TCP port of a coordinator: the first after an agent's ports, 47800 to 47829
# The other coordinators are greeted for this long before the one that failed is greeted again: an encrypted handshake takes a
# few round trips.
_HEAD_START_SECONDS = 0.3
# Greetings at once in a search over mDNS. Each takes a few sockets, and each forged record costs one.
_MAX_GREETINGS = 32
# A search over mDNS goes on for this long after a coordinator has refused our key: anybody on the network can forge a refusal,
# and the coordinator itself answers its greeting meanwhile.
_REFUSED_SECONDS = 2.0
_GREETING_SECONDS = 1.0  # of one greeting in a search over mDNS; an answer takes milliseconds, and the next turn comes
# Errors of a greeting that may pass, and the pause before the next one: a standby that takes over refuses for a moment.
_PASSING = (errors.Unreachable, errors.ConnectionLost, errors.DeadlineExceeded, errors.NotServing)
_AGAIN_SECONDS = 0.1
_MAX_KNOWN = 8  # endpoints that are remembered from earlier searches; a home has one to three coordinators

_HINT_SECONDS = 0.3  # to read or write the last endpoint: a client waits for it

_Found = tuple[int, int, str]  # an endpoint: its turn, its number in the order of discovery, and itself


class Connection:
    """A connection to a coordinator, shared by all calls of a client.

    `addresses` is a comma-separated list of "host" or "host:port"; None: search over mDNS.
    """

    def __init__(self, access: Access, addresses: str | None, interfaces: Sequence[str] | None) -> None:
        self.closed = False
        self._access = access
        self._given = endpoints_of(addresses) if addresses is not None else ()
        self._interfaces = interfaces
        self._context = zmq.asyncio.Context()
        self._client: RpcClient | None = None
        self._retired: list[RpcClient] = []  # replaced while calls were in progress
        self._known: list[str] = []  # endpoints that answered earlier, the newest last
        self._hint_path = _hint_path(access.server_public)
        self._hint = ""  # the content of that file
        self._changing = asyncio.Lock()
        self._search: asyncio.Task[Any] | None = None  # the last change of the connection

    async def client(self, failed: RpcClient | None, timeout_seconds: float) -> RpcClient:
        """The connection. If it is `failed`, change to another coordinator, or to the same one if no other answers.

        Raises NoCoordinator, Unreachable, NotServing, WrongKey, ProtocolMismatch, DeadlineExceeded.
        """
        end_of_search = loop_time() + timeout_seconds - error_margin(timeout_seconds)

        async def change() -> RpcClient:
            async with self._changing:  # others that wait here use the connection that the first one opened
                if (client := self._usable(failed)) is None:
                    self._search = asyncio.current_task()
                    client = await self._change(max(end_of_search - loop_time(), 0.001))
                return client

        if self.closed:
            raise errors.ConnectionLost(endpoint="the coordinator")
        if (client := self._usable(failed)) is not None:
            return client
        try:
            return await with_timeout(timeout_seconds, change())
        except asyncio.TimeoutError:
            raise self._not_found(timeout_seconds) from None
        except asyncio.CancelledError:
            if self.closed:  # the search was cancelled, not the caller
                raise errors.ConnectionLost(endpoint="the coordinator") from None
            raise

    async def close(self) -> None:
        """Close the connection; calls in progress raise ConnectionLost."""
        self.closed = True
        if self._search is not None:
            await cancel_all([self._search])
        for client in [*self._retired, *([self._client] if self._client is not None else [])]:
            await client.close()
        self._retired, self._client = [], None
        self._context.destroy(linger=0)

    def _usable(self, failed: RpcClient | None) -> RpcClient | None:
        """The connection, unless another is needed. The socket connects again by itself to the only address.

        A connection that is broken is not used: its coordinator may never come back.
        """
        client = self._client
        if client is None or self._given == (client.endpoint,):
            return client
        return client if client is not failed and client.is_connected else None

    async def _change(self, timeout_seconds: float) -> RpcClient:
        """Greet all coordinators at once; the first that answers becomes the connection."""
        before, client = self._client, await self._first_to_answer(timeout_seconds)
        self._client = client
        if before is not None and before is not client:
            self._retired.append(before)
        self._known = [*(other for other in self._known if other != client.endpoint), client.endpoint][-_MAX_KNOWN:]
        if not self._given and self._hint != (found := client.endpoint.removeprefix("tcp://")):
            self._hint, path = found, self._hint_path
            with suppress(OSError, errors.DiskHung):  # then the next search takes longer
                await on_disk(path, _HINT_SECONDS, lambda: write_atomically(path, found, private=True))
        for retired in [each for each in self._retired if not each.pending]:
            self._retired.remove(retired)
            await retired.close()
        return client

    async def _first_to_answer(self, timeout_seconds: float) -> RpcClient:
        """Connect to the endpoints that were given or found. The present connection is used if no other answers at once.

        Endpoints that fail are greeted again while another may still answer: that one may be stopped, and never answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop_time() + timeout_seconds
        present = self._client
        answer: asyncio.Future[RpcClient] = loop.create_future()
        ended = asyncio.Event()  # our key was refused, or all endpoints have failed
        failed: set[int] = set()
        failures: list[errors.HearthError] = []

        async def greet(client: RpcClient, seconds: float) -> errors.HearthError | None:
            """Returns the error. Closes the client, unless it is the first that answered."""
            try:
                await client.hello(wire.CoordinatorWelcome, timeout_seconds=max(seconds, 0.001))
                if not answer.done():
                    answer.set_result(client)
            except errors.HearthError as error:
                failures.append(error)
                if isinstance(error, errors.AppRevoked):
                    ended.set()  # only the coordinator itself can say so, over the encrypted connection
                elif isinstance(error, errors.WrongKey) and not self._given:
                    loop.call_later(_REFUSED_SECONDS, ended.set)
                return error
            finally:
                if client is not present and not (answer.done() and answer.result() is client):
                    await client.close()
            return None

        async def greet_endpoint(endpoint: str, seconds: float) -> errors.HearthError | None:
            client = RpcClient(self._context, endpoint, self._access, name="client", quick=True)
            return await greet(client, seconds)

        async def greet_again(endpoint: str, number: int) -> None:
            """Greet a named endpoint until it answers. The search ends once all of them have failed.

            A coordinator that does not serve yet has not failed: it starts or takes over, and answers then.
            """
            again = present if present is not None and endpoint == present.endpoint else None
            if again is not None:
                await asyncio.sleep(_HEAD_START_SECONDS)
            while True:
                seconds = deadline - loop_time()
                error = await (greet_endpoint(endpoint, seconds) if again is None else greet(again, seconds))
                if error is None:
                    return
                if not isinstance(error, errors.NotServing):
                    failed.add(number)
                    if len(failed) == len(calls):
                        ended.set()
                if not isinstance(error, _PASSING):
                    return
                await asyncio.sleep(_AGAIN_SECONDS)

        async def greet_found(endpoints: asyncio.PriorityQueue[_Found]) -> None:
            """Greet the endpoints of a queue in turn, until cancelled."""
            while True:
                turn, number, endpoint = await endpoints.get()
                error = await greet_endpoint(endpoint, min(deadline - loop_time(), _GREETING_SECONDS))
                if isinstance(error, _PASSING):
                    await asyncio.sleep(_AGAIN_SECONDS)
                    endpoints.put_nowait((turn + 1, number, endpoint))

        async with self._found_endpoints(present.endpoint if present is not None else None) as found:
            calls: list[Coroutine[Any, Any, object]]
            named = [*self._given, *([present.endpoint] if present is not None else [])]
            calls = [greet_again(endpoint, number) for number, endpoint in enumerate(dict.fromkeys(named))]
            if not self._given:
                calls += [greet_found(found) for _ in range(_MAX_GREETINGS)]
            tasks = [asyncio.create_task(call) for call in calls]
            ending = asyncio.create_task(ended.wait())
            futures: set[asyncio.Future[Any]] = {answer, ending}
            try:
                await asyncio.wait(futures, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                if answer.done() and answer.result() is not present:
                    await answer.result().close()
                raise
            finally:
                await cancel_all([*tasks, ending])
        if answer.done():
            return answer.result()
        for kind in (errors.ProtocolMismatch, errors.AppRevoked, errors.WrongKey):
            for error in failures:
                if isinstance(error, kind):
                    raise error
        raise failures[0] if failures and self._given else self._not_found(timeout_seconds)

    @asynccontextmanager
    async def _found_endpoints(self, present: str | None) -> AsyncIterator[asyncio.PriorityQueue[_Found]]:
        """A queue of the endpoints of this home's coordinators other than `present`: the known ones, then those of mDNS.

        The first address of each record comes before the second one of any. Empty if addresses were given.
        """
        endpoints: asyncio.PriorityQueue[_Found] = asyncio.PriorityQueue()
        if self._given:
            yield endpoints
            return
        from hearth.platform.discovery import COORDINATOR_SERVICE, Browser, DiscoveredService

        seen = {present}

        def add(turn: int, endpoint: str) -> None:
            if endpoint not in seen:
                seen.add(endpoint)
                endpoints.put_nowait((turn, len(seen), endpoint))

        def on_found(service: DiscoveredService) -> None:
            for turn, host in enumerate(service.hosts if service.is_of(self._access.server_public) else ()):
                add(turn, _endpoint(host, service.port))

        if not self._known:
            await self._read_hint()
        for known in reversed(self._known):
            add(0, known)
        browser = Browser(COORDINATOR_SERVICE, on_found, self._interfaces)
        try:
            await browser.start()
        except OSError as error:  # without a network, only a coordinator of this device can answer
            log.warning("coordinators cannot be found over mDNS: %s", error)
        try:
            yield endpoints
        finally:
            await browser.stop()

    async def _read_hint(self) -> None:
        with suppress(OSError, ValueError, errors.HearthError):  # there is none, or another program wrote it
            self._hint = await on_disk(self._hint_path, _HINT_SECONDS, self._hint_path.read_text)
            self._known = list(endpoints_of(self._hint)[:1])

    def _not_found(self, seconds: float) -> errors.HearthError:
        if self._given:
            return errors.Unreachable(endpoint=", ".join(self._given), seconds=seconds)
        return errors.NoCoordinator(seconds=seconds)


def _hint_path(server_public: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The file of the endpoint where the coordinator with this key answered last, in the cache folder of the user or unit."""
    folder = environ.get("CACHE_DIRECTORY", "").split(":")[0] or environ.get("XDG_CACHE_HOME")
    folder = folder or str(Path(environ.get("HOME", "/nonexistent")) / ".cache")
    return Path(folder) / "hearth" / f"coordinator-{fingerprint(server_public)}"


def error_margin(timeout_seconds: float) -> float:
    """How much sooner than its caller somebody gives up whose error says more than a timeout: 10 %, at most 1 s."""
    return min(0.1 * timeout_seconds, 1.0)


def endpoints_of(addresses: str) -> tuple[str, ...]:
    """The ZeroMQ endpoints of a list of "host", "host:port" or "[v6]:port". The default port is the coordinator's."""
    from hearth.platform.discovery import parse_static_peers

    return tuple(_endpoint(host, port) for host, port in parse_static_peers(addresses, default_port=COORDINATOR_PORT))


def _endpoint(host: str, port: int) -> str:
    return f"tcp://{bracketed(host)}:{port}"
