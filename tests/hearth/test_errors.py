"""Every error has texts that use its fields, and a scope that decides what it ends."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import get_args

import pytest

from hearth import errors
from hearth.errors import HearthError, Scope

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, HearthError)]
EXAMPLES = {"int": 3, "float": 0.5, "str": "text"}


def test_all_error_classes_are_registered() -> None:
    assert len(CLASSES) > 40


@pytest.mark.parametrize("error_type", CLASSES)
def test_every_error_has_a_scope_and_valid_texts(error_type: type[HearthError]) -> None:
    assert vars(error_type).get("scope") in get_args(Scope)
    error = error_type(**{field.name: EXAMPLES[str(field.type)] for field in fields(error_type)})
    assert "scope" not in error.details()
    assert "{" not in str(error)
    again = pickle.loads(pickle.dumps(error))  # as a process pool passes it on
    assert (type(again), str(again)) == (error_type, str(error))


@pytest.mark.parametrize(
    ("scope", "names"),
    [
        ("request", "BadRequest TextTooLong ContextTooLong QueueFull FrameTooLarge BadSetting BadCheckpoint"),
        ("worker", "WorkerDied DeviceLost StepFailed LeaseLost"),
        ("plan", "ModelDoesNotFit NoPlacement NoDevices BadPlan NotServing InternalError"),
        ("peer", "DeadlineExceeded Unreachable ConnectionLost BadMessage WrongKey ProtocolMismatch"),
    ],
)
def test_scopes_of_important_errors(scope: Scope, names: str) -> None:
    assert {name: getattr(errors, name).scope for name in names.split()} == dict.fromkeys(names.split(), scope)


def test_only_contradictions_end_hearth_serve() -> None:
    """Devices, memory, keys, disks and free ports may become available later, for instance after a power cut."""
    found = {error_type.__name__ for error_type in CLASSES if error_type.contradiction}
    assert found == {"BadSetting", "BadPlan", "UnsupportedArchitecture", "UnsupportedOperator", "DynamicShape"}
