"""A scenario: which devices there are, how fast they and their links are. Read from TOML, checked. Pure but for the read.

A Nano-M at 125 Mbit/s stands as 0.45 core with SSE4.2 kernels at 190 Mbit/s (DESIGN.md "Numbers"): the ratio of compute
to traffic is the paper's, the absolute times are not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hearth.errors import BadSetting
from hearth.units import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCENARIOS = Path(__file__).parent / "scenarios"
_NAME = r"^[a-z][a-z0-9-]{0,9}$"  # becomes part of an interface's name, of which Linux takes 15 bytes


class Device(BaseModel):
    """One emulated device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=_NAME)
    cpu_share: float = Field(gt=0, le=64)  # of one core; more than 1 is several cores
    core: int | None = Field(default=None, ge=0)  # pinned to this core of the host; none: any
    memory_bytes: int | None = Field(default=None, ge=64 << 20)  # of all its processes; none: no limit
    instruction_set: Literal["native", "sse4.2"] = "sse4.2"  # caps the kernels to the class of device
    mbit: float = Field(gt=0, le=100_000)  # its network interface, each way

    @property
    def num_threads(self) -> int:
        return max(1, round(self.cpu_share))

    @property
    def environment(self) -> dict[str, str]:
        if self.instruction_set == "native":
            return {}
        return {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}


class Scenario(BaseModel):
    """Devices on one switch. `coordinator` names the device in whose namespace the coordinator runs (default: the first)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,40}$")
    description: str = ""
    quota_period_ms: float = Field(default=4.0, ge=1.0, le=1000.0)  # a quota slows only work longer than its period
    coordinator: str | None = None
    devices: tuple[Device, ...] = Field(min_length=1, max_length=64)

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise ValueError("two devices have the same name")
        if self.coordinator is not None and self.coordinator not in names:
            raise ValueError(f"the coordinator's device {self.coordinator} is none of {', '.join(names)}")
        return self

    @property
    def coordinator_device(self) -> str:
        return self.coordinator or self.devices[0].name

    def with_mbit(self, mbit: float) -> Scenario:
        """The same with every link at this rate."""
        devices = tuple(device.model_copy(update={"mbit": mbit}) for device in self.devices)
        return self.model_copy(update={"devices": devices})

    def with_devices(self, count: int) -> Scenario:
        """The first `count` devices only."""
        return self.model_copy(update={"devices": self.devices[:count]})


def load_scenario(name_or_path: str | Path) -> Scenario:
    """One of ours by its name (`galaxy-a`), or any TOML file. Raises BadSetting that says what is wrong in it."""
    path = Path(name_or_path)
    if not path.suffix:
        path = SCENARIOS / f"{name_or_path}.toml"
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(found.stem for found in SCENARIOS.glob("*.toml")))
        raise BadSetting(
            setting="scenario", reason=f"'{name_or_path}' is neither a file nor one of ours: {known}"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadSetting(setting=f"scenario {path}", reason=str(error)) from None
    try:
        return Scenario.model_validate({"name": path.stem, **values, "devices": list(map(_device, values["devices"]))})
    except KeyError as error:
        raise BadSetting(setting=f"scenario {path}", reason=f"{error.args[0]} is missing") from None
    except (ValidationError, TypeError, AttributeError, ValueError) as error:
        raise BadSetting(setting=f"scenario {path}", reason=_first(error)) from None


def _device(values: dict[str, Any]) -> dict[str, Any]:
    memory = values.get("memory")
    rest = {key: value for key, value in values.items() if key != "memory"}
    return rest if memory is None else {**rest, "memory_bytes": parse_bytes(str(memory))}


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'scenario'}: {first['msg']}"
