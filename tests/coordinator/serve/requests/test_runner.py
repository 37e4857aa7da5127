"""Requests over several deployments: retries in the order of arrival, probes, requests that make deployments fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.waiting import let_tasks_run

from coordinator.serve.requests.retry import Failures
from coordinator.serve.requests.runner import Requests
from hearth import errors
from hearth.wire.messages import Vectors
from hearth.wire.rpc import Reply

LIMIT_SECONDS = 60.0
DIED = errors.WorkerDied(device="a", reason="killed")
LOST = errors.DeviceLost(device="a", reason="no answer")
FAILED = errors.StepFailed(device="a", reason="rank 1 is silent")


class Home:
    """Deployments are numbers. Each request records the deployment on which it begins, then waits for its turn."""

    def __init__(self, capacity: int = 1, queue_limit: int = 9) -> None:
        self.lost: list[tuple[int, errors.HearthError]] = []
        self.began: list[tuple[str, int]] = []
        self.running: dict[str, asyncio.Future[None]] = {}
        self.probe: Callable[[int], Awaitable[None]] = self._probe_works
        self.requests: Requests[int] = Requests(
            queue_limit,
            lambda: errors.NotServing(state="planning"),
            self._on_loss,
            lambda deployment, _: self.probe(deployment),
        )
        self.capacity = capacity
        self.deploy(1)

    def deploy(self, deployment: int) -> None:
        self.requests.admission.open(deployment, self.capacity)

    def ask(self, name: str, timeout_seconds: float = LIMIT_SECONDS) -> asyncio.Task[Reply]:
        async def compute(deployment: int) -> Any:
            self.began.append((name, deployment))
            self.running[name] = asyncio.get_running_loop().create_future()
            await self.running[name]
            return Vectors(latency_seconds=0.1, num_tokens=1), [name]

        return asyncio.create_task(self.requests.run(compute, self.requests.arrive(timeout_seconds)))

    async def end(self, name: str, error: Exception | None = None) -> None:
        if error is None:
            self.running.pop(name).set_result(None)
        else:
            self.running.pop(name).set_exception(error)
        await let_tasks_run()

    def _on_loss(self, deployment: int, error: errors.HearthError) -> None:
        self.lost.append((deployment, error))
        self.requests.admission.close()

    async def _probe_works(self, deployment: int) -> None:
        await asyncio.sleep(0)


async def test_requests_of_a_lost_plan_run_first_on_the_next_in_their_order() -> None:
    home = Home(capacity=3, queue_limit=1)
    asked = [home.ask(name) for name in "abcd"]
    await let_tasks_run()
    for name in "cba":
        await home.end(name, LOST)
    assert home.requests.admission.num_waiting == 4  # those that return are never refused
    home.began.clear()
    home.deploy(2)
    await let_tasks_run()
    assert home.began == [("a", 2), ("b", 2), ("c", 2)]
    for name in "abcd":
        await home.end(name)
    assert [(await reply).payload for reply in asked] == [["a"], ["b"], ["c"], ["d"]]
    assert (home.requests.num_failed, home.requests.num_served) == (0, 4)


async def test_request_waits_for_the_next_plan_only_until_its_own_deadline() -> None:
    home = Home()
    asked = home.ask("a", timeout_seconds=0.05)
    await let_tasks_run()
    await home.end("a", LOST)
    with pytest.raises(errors.NotServing, match="planning"):
        await asked
    home.deploy(2)
    asked = home.ask("b", timeout_seconds=0.05)
    with pytest.raises(errors.DeadlineExceeded):
        await asked
    assert home.requests.admission.num_running == 1  # it still occupies the workers
    await home.end("b")
    assert home.requests.admission.num_running == 0


async def test_error_of_the_request_itself_is_final() -> None:
    home = Home()
    asked = home.ask("a")
    await let_tasks_run()
    await home.end("a", errors.TextTooLong(index=0, num_tokens=2, max_tokens=1))
    with pytest.raises(errors.TextTooLong):
        await asked
    assert home.lost == []


@pytest.mark.parametrize("error", [FAILED, ValueError("a fault of ours")], ids=lambda error: type(error).__name__)
async def test_failed_step_on_a_plan_that_works_is_repeated_once_and_alone(error: Exception) -> None:
    home = Home(capacity=2)
    asked, other = home.ask("a"), home.ask("b")
    await let_tasks_run()
    await home.end("a", error)
    late = home.ask("late")
    await let_tasks_run()
    assert home.began == [("a", 1), ("b", 1)]  # the others wait: "a" runs alone next
    await home.end("b")
    assert home.began[2:] == [("a", 1)]
    await home.end("a", error)
    with pytest.raises(errors.HearthError) as final:
        await asked
    assert isinstance(final.value, errors.InternalError | errors.StepFailed)
    await let_tasks_run()
    await home.end("late")
    await asyncio.gather(other, late)
    assert (home.lost, home.requests.num_failed) == ([], 1)


async def test_requests_whose_connection_broke_go_on_together_on_a_plan_that_works() -> None:
    home = Home(capacity=3)
    asked = [home.ask(name) for name in "abc"]
    await let_tasks_run()
    for _ in range(3):
        home.began.clear()
        for name in "abc":
            await home.end(name, errors.ConnectionLost(endpoint="a"))
        assert home.began == [("a", 1), ("b", 1), ("c", 1)]
    for name in "abc":
        await home.end(name)
    await asyncio.gather(*asked)
    assert home.lost == []


async def test_admission_pauses_during_a_probe() -> None:
    home, probed = Home(capacity=1), asyncio.Event()

    async def probe(deployment: int) -> None:
        await probed.wait()
        raise DIED

    home.probe = probe
    asked = [home.ask("a"), home.ask("b")]
    await let_tasks_run()
    await home.end("a", FAILED)
    assert (home.began, home.lost) == ([("a", 1)], [])
    probed.set()
    await let_tasks_run()
    assert home.lost == [(1, DIED)]  # the error that is closer to the cause
    home.deploy(2)
    await let_tasks_run()
    assert home.began == [("a", 1), ("a", 2)]
    await home.end("a")
    await home.end("b")
    await asyncio.gather(*asked)


async def test_probe_that_hangs_ends_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.serve.requests.runner._PROBE_SECONDS", 0.01)
    home = Home()

    async def probe(deployment: int) -> None:
        await asyncio.Event().wait()

    home.probe = probe
    asked = home.ask("a")
    await let_tasks_run()
    await home.end("a", FAILED)
    while not home.lost:
        await asyncio.sleep(0.001)
    assert home.lost == [(1, FAILED)]
    home.deploy(2)
    await let_tasks_run()
    await home.end("a")
    await asked


async def test_request_that_kills_workers_runs_alone_and_takes_no_other_with_it() -> None:
    home = Home(capacity=4)
    asked = {name: home.ask(name) for name in ("good", "poison", "other")}
    await let_tasks_run()
    deployment = 1

    async def lose() -> None:
        nonlocal deployment
        deployment += 1
        for name in list(home.running):
            await home.end(name, DIED)
        home.deploy(deployment)
        await let_tasks_run()

    for _ in range(2):
        await lose()
    assert list(home.running) == ["good"]  # all three are suspect now, so they run one by one
    for name in ("good", "poison"):
        assert list(home.running) == [name]
        if name == "good":
            await home.end(name)
    for _ in range(3):
        assert list(home.running) == ["poison"]
        await lose()
    with pytest.raises(errors.WorkerDied):
        await asked["poison"]
    assert list(home.running) == ["other"]
    await home.end("other")
    await asyncio.gather(asked["good"], asked["other"])
    assert len(home.lost) == 9  # by three requests each in the first two losses, then by one


async def test_others_run_with_a_suspect_once_it_has_made_progress() -> None:
    home = Home(capacity=2)
    requests = home.requests
    ticket = requests.arrive(LIMIT_SECONDS)
    for deployment in (2, 3):
        async with requests.slot(requests.arrive(LIMIT_SECONDS)):
            async with requests.slot(ticket):
                raise DIED
        home.deploy(deployment)
    async with requests.slot(ticket):
        asked = home.ask("late")
        await let_tasks_run()
        assert home.began == []
        requests.record_progress(ticket)
        await let_tasks_run()
        assert home.began == [("late", 3)]
    await home.end("late")
    await asked


@pytest.mark.parametrize(
    "error", [LOST, errors.LeaseLost(device="a"), errors.NotServing(state="unloaded")], ids=lambda e: e.code
)
def test_losses_by_devices_and_changes_of_plan_never_count(error: errors.HearthError) -> None:
    failures = Failures()
    assert all(failures.record(error, alone, plan_works=False) for alone in (True, False) for _ in range(50))
    assert not failures.must_run_alone
