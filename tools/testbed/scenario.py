"""Scenarios of the testbed: devices, their speed and their links, read from TOML and checked. Pure except for reading.

A Nano-M at 125 Mbit/s (a device of the Galaxy paper) is emulated by 0.45 core with SSE4.2 kernels at 190 Mbit/s. The ratio
of compute to traffic is the paper's; the absolute times are not.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hearth.errors import BadSetting
from hearth.platform.units import parse_bytes
from hearth.validation import first_error

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCENARIOS = Path(__file__).parent / "scenarios"
# Seconds of one BERT-Large encoder layer (284 rows, one thread) on a whole core of the machine on which the scenarios'
# rates were set; 0.539 s on a device of 0.45 core. With `scale_links`, rates are multiplied by this value divided by the
# time that `calibrate` measures here, which keeps the ratio of compute to traffic.
NOMINAL_CORE_SECONDS = 0.243
InstructionSet = Literal["native", "avx2", "sse4.2"]
_MIN_QUOTA_MICROSECONDS = 1000  # the kernel refuses smaller quotas
# Measured: with periods shorter than a kernel tick a device gets up to a fifth less than its share.
_MIN_PERIOD_MICROSECONDS = 4000
MIN_CPU_SHARE = (
    0.002  # of a core: with it the smallest quota has a period of 0.5 s; the kernel refuses periods above 1 s
)
_NAME = r"^[a-z][a-z0-9-]{0,9}$"  # part of an interface name, which Linux limits to 15 bytes


class Device(BaseModel):
    """One emulated device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=_NAME)
    cpu_share: float = Field(ge=MIN_CPU_SHARE, le=64)  # in cores; may be more than 1
    core: int | None = Field(default=None, ge=0)  # host core to pin to; None: any
    memory_bytes: int | None = Field(default=None, ge=64 << 20)  # of all its processes; None: no limit
    instruction_set: InstructionSet = "sse4.2"  # newest instructions that compute kernels may use
    mbit: float = Field(gt=0, le=100_000)  # rate of its network interface in each direction

    @property
    def num_threads(self) -> int:
        return max(1, round(self.cpu_share))

    @property
    def environment(self) -> dict[str, str]:
        return capped_environment(self.instruction_set)


class Scenario(BaseModel):
    """Devices on one switch. `coordinator` names the device whose namespace the coordinator shares (default: the first)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,40}$")
    description: str = ""
    scale_links: bool = False  # scale rates with the speed of this machine (NOMINAL_CORE_SECONDS)
    coordinator: str | None = None
    devices: tuple[Device, ...] = Field(min_length=1, max_length=64)

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise ValueError("two devices have the same name")
        if "switch" in names:
            raise ValueError("no device may be called switch: the name is used for the network switch")
        if self.coordinator is not None and self.coordinator not in names:
            raise ValueError(f"the coordinator's device {self.coordinator} is none of {', '.join(names)}")
        return self

    @property
    def coordinator_device(self) -> str:
        return self.coordinator or self.devices[0].name

    def with_mbit(self, mbit: float) -> Scenario:
        """A copy with every link at this rate."""
        devices = tuple(device.model_copy(update={"mbit": mbit}) for device in self.devices)
        return self.model_copy(update={"devices": devices})

    def with_devices(self, count: int) -> Scenario:
        """A copy with only the first `count` devices."""
        return self.model_copy(update={"devices": self.devices[:count]})


_CAPS: dict[InstructionSet, dict[str, str]] = {
    "native": {},
    "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse4.2": {
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",  # AMD processors ignore MKL_ENABLE_INSTRUCTIONS
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}


def capped_environment(instruction_set: InstructionSet) -> dict[str, str]:
    """Environment variables that limit torch to the instruction set of the emulated device."""
    return _CAPS[instruction_set]


def quota_and_period(cpu_share: float) -> tuple[int, int]:
    """CFS quota and period of a CPU share, in microseconds: the shortest period that the kernel enforces accurately.

    Short, because a quota differs from a slow core: it delays only work longer than the quota, then stops it for the rest
    of the period.
    """
    period = max(math.ceil(_MIN_QUOTA_MICROSECONDS / cpu_share), _MIN_PERIOD_MICROSECONDS)
    return round(cpu_share * period), period


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Load a built-in scenario by name (`galaxy-a`) or a TOML file. Raises BadSetting with the error in it."""
    path = Path(name_or_path)
    if not path.suffix:
        path = SCENARIOS / f"{name_or_path}.toml"
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(found.stem for found in SCENARIOS.glob("*.toml")))
        raise BadSetting(
            setting="scenario", reason=f"'{name_or_path}' is neither a file nor a built-in scenario: {known}"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadSetting(setting=f"scenario {path}", reason=str(error)) from None
    try:
        return Scenario.model_validate({"name": path.stem, **values, "devices": _devices(values)})
    except (ValidationError, ValueError) as error:
        raise BadSetting(setting=f"scenario {path}", reason=_first(error)) from None


def _devices(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The [[devices]] tables, with memory such as "1.5GiB" converted to bytes. Raises ValueError."""
    tables = values.get("devices")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError("devices is missing: give one [[devices]] table per device")
    found = []
    for index, table in enumerate(tables):
        rest = {key: value for key, value in table.items() if key != "memory"}
        try:
            found.append(rest if "memory" not in table else {**rest, "memory_bytes": parse_bytes(str(table["memory"]))})
        except ValueError as error:
            raise ValueError(f"devices.{index}.memory: {error}") from None
    return found


def _first(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return first_error(error, "scenario")
