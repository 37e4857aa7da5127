"""Times of kernels in the kept profiles, for `hearth devices --kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from coordinator.devices.block_profiling import BLOCKS_PREFIX
from coordinator.devices.profile_cache import MeasuredOn
from coordinator.models.cache_files import read_cached
from hearth.plan.kernels import KernelChoice, KernelTime, choose_kernels
from hearth.wire.messages import BlocksOf


class KernelTable(BaseModel, frozen=True):
    """The part of a kept profile that says how fast each kernel was on one device. Equal devices compute as fast."""

    measured_on: MeasuredOn
    subject: BlocksOf
    kernels: tuple[KernelTime, ...]

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """The kernels with which such a device computes."""
        return choose_kernels(self.kernels, self.subject.deterministic)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.measured_on.model_dump(),
            "weights": self.subject.model.weights,
            "deterministic": self.subject.deterministic,
            "times": [time.model_dump() for time in self.kernels],
            "choices": [choice.model_dump() for choice in self.choices],
        }


def kept_kernel_tables(folder: Path) -> list[KernelTable]:
    """The newest table for each class of device, weight format and set of shapes, among the profiles in `folder`."""
    newest: dict[tuple[object, ...], KernelTable] = {}
    for path in sorted(folder.glob(f"{BLOCKS_PREFIX}-*.json"), key=lambda path: path.stat().st_mtime):
        try:
            table = KernelTable.model_validate_json(read_cached(path))
        except (OSError, ValidationError):  # of a version without this description, or no profile
            continue
        shapes = frozenset((time.num_outputs, time.num_inputs, time.rows) for time in table.kernels)
        hardware = table.measured_on.model_copy(update={"device": ""})
        if shapes:
            newest[hardware, table.subject.model.weights, table.subject.deterministic, shapes] = table
    return list(newest.values())
