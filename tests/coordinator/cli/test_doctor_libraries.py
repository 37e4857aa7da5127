"""`hearth doctor` on the worker's libraries: a table of what can be wrong, and those that are installed here."""

from __future__ import annotations

from typing import Any

import pytest
from support.devices import ready_device

from coordinator.cli.doctor_libraries import Libraries, check_gpu_in_service, check_libraries, read_libraries

FINE: dict[str, Any] = {
    "numpy": "2.2.6", "torch": "2.10.0", "onnxruntime": "1.23.2", "providers": ("CPUExecutionProvider",),
    "onnxruntime_distributions": ("onnxruntime",),
}  # fmt: skip


def findings(**changes: Any) -> list[tuple[str, str, str]]:
    return [(each.status, each.what, each.do) for each in check_libraries(Libraries(**{**FINE, **changes}))]


NUMPY_1 = "was built for NumPy 1, and NumPy 2.2.6 is installed"


@pytest.mark.parametrize(
    ("changes", "status", "says", "advice"),
    [
        ({"numpy": "1.26.4"}, "ok", "NumPy 1.26.4", ""),
        ({"arrays_problem": "Numpy is not available"}, "problem", NUMPY_1, "pip install 'numpy<2'"),
        (
            {"onnxruntime": None, "onnxruntime_problem": "ImportError: numpy.core.multiarray failed to import"},
            "problem", NUMPY_1, "pip install 'numpy<2'",
        ),
        (
            {"torch": None, "torch_problem": "OSError: libcudnn.so.9: cannot open shared object file"},
            "problem", "torch cannot be imported: OSError: libcudnn.so.9", "",
        ),
        (
            {"gpu": "Orin"},
            "warning", "torch computes on Orin, but onnxruntime 1.23.2 only on the CPU", "onnxruntime-gpu",
        ),
        (
            {"gpu": "Orin", "onnxruntime_distributions": ("onnxruntime", "onnxruntime-gpu")},
            "warning", "onnxruntime and onnxruntime-gpu are both installed", "",
        ),
    ],
    ids=["NumPy 1", "torch for NumPy 1", "onnxruntime for NumPy 1", "import", "no GPU", "two builds"],
)  # fmt: skip
def test_one_finding_says_what_is_wrong_and_what_to_do(
    changes: dict[str, Any], status: str, says: str, advice: str
) -> None:
    ((found, what, do),) = findings(**changes)
    assert found == status
    assert says in what
    assert advice in do


def test_libraries_that_agree_are_named_with_the_providers() -> None:
    ((status, what, do),) = findings(providers=("CUDAExecutionProvider", "CPUExecutionProvider"))
    assert (status, do) == ("ok", "")
    assert what == "torch 2.10.0, NumPy 2.2.6, onnxruntime 1.23.2 (CUDA, CPU)"


def test_device_without_a_worker_is_fine_but_one_with_half_of_it_is_not() -> None:
    assert findings(torch=None, onnxruntime=None)[0][0] == "ok"
    ((status, what, _),) = findings(onnxruntime=None)
    assert (status, what) == ("warning", "onnxruntime is not installed")


def test_failing_look_at_the_libraries_is_a_problem_with_its_reason() -> None:
    ((status, what),) = [(each.status, each.what) for each in check_libraries("importing them ended with signal 4: ")]
    assert status == "problem"
    assert "signal 4" in what


def test_libraries_installed_here_agree() -> None:
    """The child process imports them really."""
    found = read_libraries()
    assert isinstance(found, Libraries), found
    assert found.numpy is not None
    assert [each.what for each in check_libraries(found) if each.status == "problem"] == []
    pytest.importorskip("torch")
    assert found.torch is not None
    assert "CPUExecutionProvider" in found.providers


def test_gpu_that_only_this_user_sees_is_a_warning_about_the_service() -> None:
    fine = ready_device("kitchen").telemetry
    inside = fine.model_copy(update={"gpu_problem": "torch 2.10.0 finds no usable GPU"})
    seen = Libraries(**FINE, gpu="Orin")
    ((check, status, what, do),) = check_gpu_in_service(seen, {"kitchen": inside})
    assert (check, status) == ("GPU", "warning")
    assert "Orin computes for this user, but not inside kitchen's service: torch 2.10.0 finds no usable GPU" in what
    assert "DeviceAllow=" in do
    assert check_gpu_in_service(seen, {"kitchen": fine}) == []
    assert check_gpu_in_service(Libraries(**FINE), {"kitchen": inside}) == []
