"""How long each device is silent when it is well, kept over a restart of the coordinator and for a standby that takes over.

Each coordinator keeps what it has seen itself, and not what another one has: silences depend on its own link, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from coordinator.devices import registry
from coordinator.devices.registry import Device
from hearth.errors import HearthError
from hearth.files import write_atomically
from hearth.platform.asyncio_tools import loop_time
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.wire.messages import AgentWelcome

log = logging.getLogger(__name__)

_CHECK_SECONDS = 10.0  # interval at which silences are compared with the saved ones, which costs next to nothing
_WRITE_PAUSE_SECONDS = 60.0  # between two writes of the file, at least: an SD card wears out
# A limit that has become longer or shorter by less than this fraction is not saved again: it would be noticed by nobody.
_SAME_FRACTION = 0.2


class KnownSilence(BaseModel):
    """The longest silence of a device. It counts only for the same run of its agent, with the same key and address.

    A device that was started again, or that has another link, may be silent for longer.
    """

    model_config = ConfigDict(frozen=True)

    boot_id: str
    public_key: str
    host: str
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def counts_for(self, welcome: AgentWelcome, host: str) -> bool:
        """Whether an agent that says hello now is the one that was watched."""
        return (self.boot_id, self.public_key, self.host) == (welcome.boot_id, welcome.device_public_key, host)


KnownSilences: TypeAlias = Mapping[str, KnownSilence]  # by device id


class _Content(BaseModel):
    """The content of the file. The holder of the leases is a new one once the coordinator's computer was started again."""

    holder: str
    devices: dict[str, KnownSilence]


def learned(devices: Iterable[Device], now: float) -> dict[str, KnownSilence]:
    """The silences of the devices that are well and have been watched for long enough."""
    return {
        device.device_id: KnownSilence(
            boot_id=device.welcome.boot_id,
            public_key=device.welcome.device_public_key,
            host=device.host,
            seconds=registry.longest_silence(device, now),
        )
        for device in devices
        if device.health == "alive" and registry.is_learned(device, now)
    }


def differ_much(saved: KnownSilences, found: KnownSilences) -> bool:
    """Whether what was found now is worth a write."""
    return any(
        device_id not in saved
        or saved[device_id].model_copy(update={"seconds": each.seconds}) != each
        or not _is_similar(saved[device_id].seconds, each.seconds)
        for device_id, each in found.items()
    )


def _is_similar(one: float, other: float) -> bool:
    before, after = registry.limit_seconds(one), registry.limit_seconds(other)
    return abs(after - before) <= _SAME_FRACTION * before


class SilenceFile:
    """`silences.json` in the coordinator's state directory. `devices` are the saved silences."""

    def __init__(self, state_dir: Path, holder: str) -> None:
        """Read the file. It counts only for this holder of leases, that is, for this run of the coordinator's computer."""
        self._path = state_dir / "silences.json"
        self._holder = holder
        self.devices: KnownSilences = self._read()

    def _read(self) -> KnownSilences:
        try:
            content = _Content.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.info("%s cannot be read; silences of devices are learned again: %s", self._path, error)
            return {}
        return content.devices if content.holder == self._holder else {}

    async def keep(self, devices: Mapping[str, Device]) -> None:
        """Save the silences of these devices, which change, until cancelled: rarely, and only changes that matter."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            found = learned(devices.values(), loop_time())
            if not differ_much(self.devices, found):
                continue
            devices_now = {**self.devices, **found}
            content = _Content(holder=self._holder, devices=devices_now).model_dump_json(indent=1)
            try:
                await on_disk(self._path, FILE_SECONDS, write_atomically, self._path, content)
            except (OSError, HearthError) as error:  # they are learned again after a restart
                log.info("%s cannot be written: %s", self._path, error)
            else:
                self.devices = devices_now
            await asyncio.sleep(_WRITE_PAUSE_SECONDS)
