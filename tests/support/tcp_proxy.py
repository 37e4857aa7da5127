"""A TCP proxy in this process that can hold back data and reset its connections, for tests."""

from __future__ import annotations

import selectors
import socket
import struct
import threading

_POLL_SECONDS = 0.01  # interval at which the proxy looks for orders of the test


class TcpProxy:
    """Passes connections to its `port` on to `target_port` of this host, until `close`."""

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        self._holds = threading.Event()
        self._resets = threading.Event()
        self._closed = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._thread = threading.Thread(target=self._loop, name="tcp-proxy", daemon=True)
        self._thread.start()

    def swallow(self) -> None:
        """Read what comes to the target from now on, and do not pass it on."""
        self._holds.set()

    def reset(self) -> None:
        """Reset all connections, which loses what was swallowed; new ones are passed on."""
        self._resets.set()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5)

    def _loop(self) -> None:
        while not self._closed.is_set():
            if self._resets.is_set():
                self._end_all()
                self._holds.clear()
                self._resets.clear()
            sources = dict(self._pairs) | {far: near for near, far in self._pairs}
            for each in _readable([self._listener, *sources]):
                if each is self._listener:
                    near, _ = self._listener.accept()
                    self._pairs.append((near, socket.create_connection(("127.0.0.1", self._target))))
                    self.num_connections += 1
                else:
                    self._pass_on(each, sources[each])
        self._end_all()
        self._listener.close()

    def _pass_on(self, source: socket.socket, other: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        to_target = any(near is source for near, _ in self._pairs)
        if not data:
            self._pairs = [pair for pair in self._pairs if source not in pair]
            source.close()
            other.close()
        elif not (to_target and self._holds.is_set()):
            other.sendall(data)

    def _end_all(self) -> None:
        for pair in self._pairs:
            for each in pair:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
                each.close()
        self._pairs = []


def _readable(sockets: list[socket.socket]) -> list[socket.socket]:
    """Those with something to read, at the latest after `_POLL_SECONDS`."""
    with selectors.DefaultSelector() as selector:  # `select.select` takes no descriptor above 1023
        for each in sockets:
            selector.register(each, selectors.EVENT_READ, each)
        return [key.data for key, _ in selector.select(_POLL_SECONDS)]
