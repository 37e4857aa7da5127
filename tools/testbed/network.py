"""Namespaces on one bridge, with a token bucket on both directions of every device's link. No way out of the machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from hearth.errors import BadSetting

# A network card takes large segments from the kernel and cuts them itself; so must the bucket pass them whole, or the
# emulated device pays for every packet. More than that would let a device that was silent send above its rate.
_SEGMENT_BYTES = 16 << 10
_BURST_BYTES = _SEGMENT_BYTES + (4 << 10)
_QUEUE_BYTES = 1 << 20
_COMMAND_SECONDS = 20.0


class Network:
    """The network of testbed `prefix` (a short unique name) in the subnet 10.213.`slot`.0/24."""

    def __init__(self, prefix: str, slot: int, names: Sequence[str]) -> None:
        self._prefix = prefix
        self._slot = slot
        self._names = list(names)
        self._bridge = f"{prefix}br"

    def namespace(self, device: str) -> str:
        return f"{self._prefix}-{device}"

    def address(self, device: str) -> str:
        return f"10.213.{self._slot}.{self._names.index(device) + 1}"

    def create(self, mbit: dict[str, float]) -> None:
        """Raises BadSetting when the kernel does not let us."""
        self.remove()
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for name in self._names:
            namespace, outer = self.namespace(name), self._outer(name)
            _ip("netns", "add", namespace)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", outer, "master", self._bridge, "up")
            for end in (("-n", namespace, "link", "set", "eth0"), ("link", "set", outer)):
                _ip(*end, "gso_max_size", str(_SEGMENT_BYTES))
            _ip("-n", namespace, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "route", "add", "224.0.0.0/4", "dev", "eth0")
            self.set_mbit(name, mbit[name])

    def set_mbit(self, device: str, mbit: float) -> None:
        """Shape both directions of a device's link; takes effect at once."""
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))
        _run("tc", "-n", self.namespace(device), "qdisc", "replace", "dev", "eth0", *shape)
        _run("tc", "qdisc", "replace", "dev", self._outer(device), *shape)

    def cut(self, device: str) -> None:
        """Pull the plug; connections stay, and nothing passes."""
        _ip("link", "set", self._outer(device), "down")

    def mend(self, device: str) -> None:
        _ip("link", "set", self._outer(device), "up")

    def remove(self) -> None:
        """Remove what is there of it; nothing is said about what is not."""
        for name in self._names:
            _quietly("ip", "netns", "del", self.namespace(name))
            _quietly("ip", "link", "del", self._outer(name))
        _quietly("ip", "link", "del", self._bridge)

    def _outer(self, device: str) -> str:
        return f"{self._prefix}v{self._names.index(device)}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except FileNotFoundError:
        raise BadSetting(setting="the testbed", reason=f"{command[0]} is missing: install iproute2") from None
    except subprocess.CalledProcessError as error:
        raise BadSetting(setting="the testbed", reason=f"`{' '.join(command)}`: {error.stderr.strip()}") from None


def _quietly(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True, timeout=_COMMAND_SECONDS)
