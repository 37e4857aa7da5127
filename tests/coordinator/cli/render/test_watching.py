"""The screen of `hearth status --watch`: every line in its width, all of them in its height."""

from __future__ import annotations

import pytest
from rich.console import Console
from support.devices import ready_device
from support.messages import EXAMPLES

from coordinator.cli.render.events import Watched, watch_view
from hearth.wire.messages import PhaseChanged, RecordedEvent, RequestEnded, ServedModel, Status, WorkerStatus

NAMES = ("kitchen", "living-room", "attic")


def shown(watched: Watched, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, record=True)
    console.print(watch_view(watched, 1e9 + 100, height))
    return console.export_text().splitlines()


def watched(num_models: int, num_requests: int = 60) -> Watched:
    workers = tuple(WorkerStatus(deployment=f"model-{n}", state="ready", epoch=1) for n in range(num_models))
    devices = [ready_device(name).info(0.0).model_copy(update={"workers": workers}) for name in NAMES]
    models = tuple(
        ServedModel(
            deployment=f"model-{n}", model=f"/srv/models/a-model-with-a-long-name-{n}", ready=True, phase="serving",
            state=f"serving a-model-with-a-long-name-{n} on kitchen, living-room, attic (hmp)", running_requests=1,
        )
        for n in range(num_models)
    )  # fmt: skip
    requests = [
        RecordedEvent(
            number=n, unix_seconds=1e9 + n,
            event=RequestEnded(
                request_id=str(n), operation="generate", deployment="model-0", model="a-model-with-a-long-name-0",
                app="home-assistant", outcome="served", seconds=1.0, queued_seconds=0.1234, first_token_seconds=0.4567,
                num_tokens=123456, tokens_per_second=12345.6,
            ),
        )
        for n in range(num_requests)
    ]  # fmt: skip
    happened = [
        RecordedEvent(
            number=n,
            unix_seconds=1e9,
            event=PhaseChanged(deployment="model-0", phase="settling", cause=f"event-{n} " + "x" * 90),
        )
        for n in range(30)
    ]
    status = next(each for each in EXAMPLES if isinstance(each, Status))
    return Watched(status, models, devices, requests, happened, "the coordinator does not answer: " + "y" * 100)


@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_everything_fits_the_terminal_with_the_newest_requests_and_events(
    width: int, height: int, num_models: int
) -> None:
    lines = shown(watched(num_models), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) == height
    assert lines[-1] == "Ctrl-C ends this"
    text = "\n".join(lines)
    for part in (*NAMES, "model-0 ready", "event-29 ", "41.0 s"):  # the newest request ended that long ago
        assert part in text
    if num_models > 1:
        assert "model-2  1 running, 0 waiting; serving" in text
    rows = [line for line in lines if ("served" in line and "456.7 ms" in line) or "457 ms" in line]
    assert len(rows) >= 4
    assert all("123 ms" in row and "123456" in row and "12345.6" in row for row in rows)


def test_screen_without_anything_says_why() -> None:
    assert shown(Watched(problem="nothing [yet]"), 80, 24) == ["nothing [yet]", "Ctrl-C ends this"]
