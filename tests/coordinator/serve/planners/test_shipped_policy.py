"""The policy that ships with Hearth: read once; a file that cannot be used is one warning."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from support.policies import random_policy

from coordinator.plan.graph.latency.doppler.policy import policy_bytes
from coordinator.serve.planners.policies import SHIPPED_POLICY, usable_policy

POLICY = random_policy(np.random.default_rng(0))


def _write(path: Path, data: bytes | None) -> Path:
    if data is not None:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "cannot be read (No such file or directory)"),
        (policy_bytes(POLICY)[:1000], "cut short"),
        (policy_bytes(POLICY).replace(b'"policy_version":"1"', b'"policy_version":"9"'), "its version is 9"),
    ],
    ids=["missing", "cut", "other version"],
)
def test_a_policy_that_cannot_be_used_is_one_warning(
    data: bytes | None, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _write(tmp_path / "policy.safetensors", data)
    with caplog.at_level(logging.WARNING):
        assert usable_policy(path) is None
        assert usable_policy(path) is None
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert str(path) in record.getMessage()


def test_a_policy_file_is_read_once(tmp_path: Path) -> None:
    path = _write(tmp_path / "policy.safetensors", policy_bytes(POLICY))
    first = usable_policy(path)
    path.unlink()
    assert first is not None
    assert usable_policy(path) is first


def test_the_policy_that_ships_can_be_used() -> None:
    assert usable_policy() is not None
    assert SHIPPED_POLICY.stat().st_size < 600_000
