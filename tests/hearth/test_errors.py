"""Every error has texts that its fields fill, and names the scope that decides what it ends."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from hearth import errors
from hearth.errors import HearthError, Scope

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, HearthError)]
EXAMPLES = {"int": 3, "float": 0.5, "str": "text"}


def test_all_errors_are_found() -> None:
    assert len(CLASSES) > 40


@pytest.mark.parametrize("error_type", CLASSES)
def test_every_error_states_its_scope_and_has_texts_of_its_fields(error_type: type[HearthError]) -> None:
    assert vars(error_type).get("scope") in get_args(Scope)
    error = error_type(**{field.name: EXAMPLES[str(field.type)] for field in fields(error_type)})
    assert "scope" not in error.details()
    assert "{" not in str(error)


@pytest.mark.parametrize(
    ("scope", "names"),
    [
        ("request", "BadRequest TextTooLong ContextTooLong QueueFull FrameTooLarge BadSetting BadCheckpoint"),
        ("worker", "WorkerDied DeviceLost StepFailed LeaseLost"),
        ("plan", "ModelDoesNotFit NoPlacement NoDevices BadPlan NotServing InternalError"),
        ("peer", "DeadlineExceeded Unreachable ConnectionLost BadMessage WrongKey ProtocolMismatch"),
    ],
)
def test_the_errors_that_decisions_depend_on_have_these_scopes(scope: Scope, names: str) -> None:
    assert {name: getattr(errors, name).scope for name in names.split()} == dict.fromkeys(names.split(), scope)


def test_contradictions_end_hearth_serve_and_what_may_still_come_does_not() -> None:
    """Devices, memory, keys, disks and free ports may come later, for instance after a power cut."""
    found = {error_type.__name__ for error_type in CLASSES if error_type.contradiction}
    assert found == {"BadSetting", "BadPlan", "UnsupportedArchitecture", "UnsupportedOperator", "DynamicShape"}
