"""Scenarios of the testbed: devices, their speed and their links, read from TOML and checked. Pure except for reading.

A Nano-M at 125 Mbit/s (a device of the Galaxy paper) is emulated by 0.45 core with SSE4.2 kernels at 190 Mbit/s. The ratio
of compute to traffic is the paper's; the absolute times are not.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hearth.errors import BadSetting
from hearth.platform.units import parse_bytes
from hearth.validation import first_error
from tools.testbed.medium import Medium

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli

    tomllib = tomli

SCENARIOS = Path(__file__).parent / "scenarios"
# Seconds of one BERT-Large encoder layer (284 rows, one thread) on a whole core of the machine on which the scenarios'
# rates were set; 0.539 s on a device of 0.45 core. With `scale_links`, rates are multiplied by this value divided by the
# time that `calibrate` measures here, which keeps the ratio of compute to traffic.
NOMINAL_CORE_SECONDS = 0.243
InstructionSet = Literal["native", "avx2", "sse4.2"]
_MIN_QUOTA_MICROSECONDS = 1000  # the kernel refuses smaller quotas
# Measured: with periods shorter than a kernel tick a device gets up to a fifth less than its share.
_MIN_PERIOD_MICROSECONDS = 4000
# Of a core. With it the smallest quota has a period of 0.5 s; the kernel refuses periods above 1 s.
MIN_CPU_SHARE = 0.002
NumBytes = Annotated[int, BeforeValidator(lambda value: parse_bytes(str(value)))]  # a number, or text such as "1.5GiB"
_NAME = r"^[a-z][a-z0-9-]{0,9}$"  # part of an interface name, which Linux limits to 15 bytes
_ENVIRONMENTS: dict[InstructionSet, dict[str, str]] = {
    "native": {},
    "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse4.2": {
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",  # AMD processors ignore MKL_ENABLE_INSTRUCTIONS
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}


class EmulatedDevice(BaseModel):
    """One emulated device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=_NAME)
    cpu_share: float = Field(ge=MIN_CPU_SHARE, le=64)  # in cores; may be more than 1
    core: int | None = Field(default=None, ge=0)  # host core to pin to; None: any
    # Of all its processes; None: no limit.
    memory_bytes: Annotated[NumBytes, Field(ge=64 << 20)] | None = Field(
        default=None, validation_alias=AliasChoices("memory", "memory_bytes")
    )
    instruction_set: InstructionSet = "sse4.2"  # newest instructions that compute kernels may use
    mbit: float = Field(gt=0, le=100_000)  # rate of its network interface in each direction
    medium: str | None = None  # the shared medium of its link; None: a wire of its own to the switch

    @property
    def num_threads(self) -> int:
        return max(1, round(self.cpu_share))

    @property
    def environment(self) -> dict[str, str]:
        """Variables that limit torch to the instruction set of the emulated device."""
        return _ENVIRONMENTS[self.instruction_set]


class Scenario(BaseModel):
    """Devices on one switch. `coordinator` names the device whose namespace the coordinator shares (default: the first)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,40}$")
    description: str = ""
    scale_links: bool = False  # scale rates with the speed of this machine (NOMINAL_CORE_SECONDS)
    coordinator: str | None = None
    media: tuple[Medium, ...] = Field((), max_length=16)
    devices: tuple[EmulatedDevice, ...] = Field((), max_length=64)

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        if not self.devices:
            raise ValueError("devices is missing: give one [[devices]] table per device")
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise ValueError("two devices have the same name")
        if "switch" in names:
            raise ValueError("no device may be called switch: the name is used for the network switch")
        media = [medium.name for medium in self.media]
        if len(set(media)) != len(media):
            raise ValueError("two media have the same name")
        if unknown := [each.medium for each in self.devices if each.medium not in (None, *media)]:
            raise ValueError(f"no medium is called {unknown[0]}: give it a table in media")
        if idle := set(media) - {each.medium for each in self.devices}:
            raise ValueError(f"no device uses the medium {min(idle)}")
        if self.coordinator is not None and self.coordinator not in names:
            raise ValueError(f"the coordinator's device {self.coordinator} is none of {', '.join(names)}")
        return self

    @property
    def coordinator_device(self) -> str:
        return self.coordinator or self.devices[0].name

    def stations(self, medium: str) -> list[str]:
        """The devices on a medium."""
        return [device.name for device in self.devices if device.medium == medium]

    def with_mbit(self, mbit: float) -> Scenario:
        """A copy with every link a wire at this real rate, whatever the speed of this machine."""
        devices = tuple(device.model_copy(update={"mbit": mbit, "medium": None}) for device in self.devices)
        return self.model_copy(update={"devices": devices, "scale_links": False, "media": ()})


def quota_and_period(cpu_share: float) -> tuple[int, int]:
    """CFS quota and period of a CPU share, in microseconds: the shortest period that the kernel enforces accurately.

    Short, because a quota differs from a slow core: it delays only work longer than the quota, then stops it for the rest
    of the period.
    """
    period = max(math.ceil(_MIN_QUOTA_MICROSECONDS / cpu_share), _MIN_PERIOD_MICROSECONDS)
    return round(cpu_share * period), period


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Load a built-in scenario by name (`galaxy-a`) or a TOML file. Raises BadSetting with the error in it.

    In the file, `every_device` has the values that all `devices` share.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = SCENARIOS / f"{name_or_path}.toml"
    try:
        values = tomllib.loads(path.read_text())
        if every := values.pop("every_device", None):
            values["devices"] = [{**every, **device} for device in values.get("devices", ())]
        return Scenario.model_validate({"name": path.stem, **values})
    except FileNotFoundError:
        known = ", ".join(sorted(found.stem for found in SCENARIOS.glob("*.toml")))
        reason = f"'{name_or_path}' is neither a file nor a built-in scenario: {known}"
        raise BadSetting(setting="scenario", reason=reason) from None
    except ValidationError as error:
        raise BadSetting(setting=f"scenario {path}", reason=first_error(error, "scenario")) from None
    except TypeError:
        reason = "every_device and each of devices must be a table"
        raise BadSetting(setting=f"scenario {path}", reason=reason) from None
    except (OSError, ValueError) as error:  # no text, or no TOML
        raise BadSetting(setting=f"scenario {path}", reason=str(error)) from None
