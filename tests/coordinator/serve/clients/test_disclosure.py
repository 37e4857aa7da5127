"""What apps learn about the home."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator

import pytest
from support.messages import EXAMPLES

from coordinator.serve.clients.trust import error_for_app, response_for_app
from hearth import errors
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply

SECRET = "tcp://10.0.0.7:47800/kitchen"


@pytest.mark.parametrize("kind", [each for each in errors.ERROR_TYPES.values() if each.scope != "request"])
def test_no_error_of_the_home_names_a_device(kind: type[errors.HearthError]) -> None:
    samples = {"int": 3, "float": 1.5, "str": SECRET}
    public = {"tag": "embed", "chunk": "0" * 64, "weights": "int8", "kv_cache": "int8", "strategy": "moirai"}
    error = kind(**{each.name: public.get(each.name, samples[str(each.type)]) for each in dataclasses.fields(kind)})
    shown = error_for_app(error)
    assert type(shown) is kind
    assert "10.0.0.7" not in str(shown)


def test_errors_about_the_request_are_unchanged() -> None:
    for error in (errors.BadRequest(reason="no texts"), errors.TextTooLong(index=1, num_tokens=9, max_tokens=8)):
        assert str(error_for_app(error)) == str(error)
    assert error_for_app(errors.ModelDoesNotFit(model="/srv/bert", missing_bytes=7)).details() == {
        "model": "bert",
        "missing_bytes": 7,
    }


def test_readiness_and_traces_name_no_device_and_no_path() -> None:
    ready = wire.Readiness(ready=True, state="serving bert on kitchen, attic (hmp)", model="/srv/models/bert")
    shown = response_for_app(ready)
    assert shown == wire.Readiness(ready=True, state="serving", model="bert")
    traced = next(each for each in EXAMPLES if isinstance(each, wire.Vectors) and each.traces)
    answer = response_for_app(Reply(traced, [b"x"]))
    assert isinstance(answer, Reply)
    assert isinstance(answer.message, wire.Vectors)
    assert answer.payload == [b"x"]
    assert [trace.device for trace in answer.message.traces] == [f"device {trace.rank}" for trace in traced.traces]
    assert answer.message.traces[0].events == traced.traces[0].events


def test_list_of_models_shows_an_app_no_device_and_no_path() -> None:
    model = wire.ServedModel(
        deployment="bert", model="/srv/models/bert", ready=False, phase="failed", state="kitchen is gone", answers="vectors",
        devices=("kitchen",), memory_bytes=5, sent_bytes_per_second=7.0,
    )  # fmt: skip
    (shown,) = response_for_app(wire.ModelList(models=(model,))).models  # type: ignore[union-attr]
    assert shown == wire.ServedModel(
        deployment="bert", model="bert", ready=False, phase="idle", state="the home is not ready", answers="vectors"
    )
    full = model.model_copy(update={"missing_bytes": 7, "state": "chat holds 5 bytes on kitchen"})
    (shown,) = response_for_app(wire.ModelList(models=(full,))).models  # type: ignore[union-attr]
    assert (shown.state, shown.missing_bytes) == ("it does not fit: 7 bytes of memory are missing", 7)
    unloaded = model.model_copy(update={"ready": True, "phase": "unloaded"})
    (shown,) = response_for_app(wire.ModelList(models=(unloaded,))).models  # type: ignore[union-attr]
    assert (shown.phase, shown.state) == ("unloaded", "serving")


async def test_error_inside_a_stream_is_reduced_and_the_stream_is_closed() -> None:
    closed = []

    async def answers() -> AsyncGenerator[wire.Message | Reply, None]:
        try:
            yield wire.TextGenerated(token_ids=(1,), text="a")
            raise errors.StepFailed(device="kitchen", reason="out of memory on kitchen")
        finally:
            closed.append(True)

    stream = response_for_app(answers())
    assert isinstance(stream, AsyncGenerator)
    assert await anext(stream) == wire.TextGenerated(token_ids=(1,), text="a")
    with pytest.raises(errors.StepFailed) as failed:
        await anext(stream)
    assert "kitchen" not in str(failed.value)
    assert closed == [True]


def test_deadline_and_readiness_errors_keep_their_numbers() -> None:
    assert error_for_app(errors.DeadlineExceeded(action=f"Run at {SECRET}", seconds=5.0)).details()["seconds"] == 5.0
    assert "kitchen" not in str(error_for_app(errors.NotServing(state="loading on kitchen")))
    assert "kitchen" not in str(error_for_app(errors.DeviceLost(device="kitchen", reason=SECRET)))
