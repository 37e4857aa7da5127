"""The deployments of a coordinator: what it serves at the same time, each with its own life cycle, plan, queue and workers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from pathlib import Path, PurePath

from coordinator.devices.registry import Device
from coordinator.models.graph_file import GraphFile
from coordinator.plan.methods import REGISTRY
from coordinator.serve.goal import TransformerModel
from coordinator.serve.kinds.kind import SharedServices
from coordinator.serve.model.controller import Controller
from coordinator.serve.opening import open_checked
from coordinator.serve.state import Goal, SavedDeployment
from hearth.errors import BadPlan, BadSetting, HearthError, NotServing, UnknownModel
from hearth.plan.plan import Plan
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.disk import on_disk
from hearth.wire import messages as wire

# For reading a model without its weights. It is mostly computing: the largest graphs and tokenizers take a Raspberry Pi a
# minute. As long as a worker may take to load.
_OPEN_SECONDS = 300.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
MAX_DEPLOYMENTS = 64  # each device runs a worker for those that it takes part in, of at most 256

# What the model answers that a request without a name is for.
_ANSWERS: dict[type[wire.ClientRequest], wire.AnswerKind] = {
    wire.Generate: "text",
    wire.Embed: "vectors",
    wire.GetHiddenStates: "vectors",
    wire.Infer: "arrays",
    wire.GetModelInfo: "arrays",
}


class Deployments:
    """The deployments by name, oldest first. The oldest of each kind is the default for requests that name no model."""

    def __init__(self, services: SharedServices) -> None:
        self.controllers: dict[str, Controller] = {}
        self.proofs: dict[str, Callable[[], bool]] = {}  # whether each life cycle goes on; for the watchdog
        self._services = services
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of those that run
        # Since the start; the others were served before, or asked for by the command line.
        self._added: set[str] = set()
        self._failed: dict[str, HearthError] = {}  # those that cannot be served, as long as they are not stopped
        self._adding = asyncio.Lock()
        self._runs = self._stops = False
        self._ended: asyncio.Future[None] | None = None

    # ---- which ones there are -----------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Create the saved deployments; a new home has none. Raises as `open_model` does if none of them can be created."""
        saved = self._services.state.current
        errors = [await self._restore(name, each) for name, each in saved.deployments.items()]
        if not self.controllers and (error := next(filter(None, errors), None)) is not None:
            raise error
        if not saved.deployments:
            self._services.report("no model is served; add one with `hearth serve MODEL`")

    async def create(self, goal: Goal, plan: Plan | None, name: str = "") -> None:
        """Create the deployment of the command line, and the saved ones that were added while a coordinator ran.

        The other saved ones, of earlier command lines, are forgotten. Raises as `open_model` and `Controller` do; nothing is
        forgotten then.
        """
        state = self._services.state
        known = state.current.deployments
        saved = {each: known[each] for each in known if not name or each == name}
        same = next((each for each in saved if saved[each].goal.serves_the_same(goal)), None)
        last = saved[same].plan if same is not None and plan is None else None
        name = same or (checked_name(name) if name else default_name(goal, ()))
        self._create(name, SavedDeployment(goal=goal, plan=plan), await self._opened(goal), _deployed(last))
        state.put_first(name)
        for other in known.keys() - {name}:
            if not known[other].added:
                self._services.report(f"{other} is served no longer")
                state.remove(other)
        for other in [each for each in known if known[each].added and each != name]:
            await self._restore(other, known[other])
        await state.file.saved()

    async def _restore(self, name: str, saved: SavedDeployment) -> HearthError | None:
        """Create a saved deployment. One whose model cannot be read stays saved; returns why, then."""
        goal = self._supported_goal(name, saved)
        try:
            model = await self._opened(goal)
        except HearthError as error:
            self._services.report(f"{name} is not served now, but stays saved: {error}")
            return error
        running = None if saved.unloaded else _deployed(saved.plan)
        unloaded = saved.unloaded and goal.keep_alive_seconds is not None
        saved = saved.model_copy(update={"goal": goal, "unloaded": unloaded})
        try:
            self._create(name, saved, model, running)
        except BadPlan as error:  # saved with keep_plan, but the model has changed since
            self._services.report(f"the saved plan of {goal.path} is no longer used: {error.reason}")
            goal = goal.model_copy(update={"keep_plan": False})
            self._create(name, SavedDeployment(goal=goal, added=saved.added), model)
        return None

    def _supported_goal(self, name: str, saved: SavedDeployment) -> Goal:
        """The saved goal without what no longer exists, which is reported."""
        goal = saved.goal
        for setting in saved.gone:
            self._services.report(f"{name}: the saved setting {setting} no longer exists and is ignored")
        if goal.strategy not in ("auto", *REGISTRY[goal.kind].names()):
            self._services.report(f"{name}: the strategy {goal.strategy} no longer exists; plans are made by auto")
            goal = goal.model_copy(update={"strategy": "auto"})
        return goal

    async def add(self, goal: Goal, plan: Plan | None, name: str = "") -> str:
        """Serve one more model, and return its name. Raises BadSetting, and as `open_model` and `Controller` do."""
        async with self._adding:
            if self._stops:
                raise NotServing(state="the coordinator stops")
            name = checked_name(name) if name else default_name(goal, self.controllers)
            if name in self.controllers:
                reason = f"'{name}' is served already; stop it with `hearth stop {name}`, or take another name"
                raise BadSetting(setting="--as", reason=reason)
            if len(self.controllers) >= MAX_DEPLOYMENTS:
                raise BadSetting(setting="MODEL", reason=f"{MAX_DEPLOYMENTS} models are served already")
            saved = SavedDeployment(goal=goal, plan=plan, added=True)
            controller = self._create(name, saved, await self._opened(goal))
            self._added.add(name)
            if self._runs:
                self._start(name, controller)
            await self._services.state.file.saved()
            return name

    async def remove(self, name: str) -> str:
        """End a deployment, once its running requests have finished, and forget it. Returns its name. Raises UnknownModel."""
        state = self._services.state
        # A model that could not be read at the start is saved, but not served.
        if name not in self.controllers and name in state.current.deployments:
            state.remove(name)
            return name
        controller = self.named(name)
        name = controller.name
        controller.stop()
        if (task := self._tasks.get(name)) is not None:
            await asyncio.wait({task})
        if self.controllers.get(name) is controller:
            del self.controllers[name], self.proofs[f"the deployment {name}"]
            self._tasks.pop(name, None)
            self._failed.pop(name, None)
            state.remove(name)
            self._services.report(f"{name} is served no longer")
            await state.file.saved()
        return name

    def named(self, name: str) -> Controller:
        """The deployment of this name, else the oldest one whose model has it. Raises UnknownModel."""
        if name in self.controllers:
            return self.controllers[name]
        for controller in self.controllers.values():
            path = PurePath(controller.goal.path)
            if name in (path.name, path.stem):
                return controller
        raise UnknownModel(model=name, served=", ".join(self.controllers) or "none")

    def for_request(self, message: wire.ClientRequest) -> Controller:
        """The deployment that a request names; without a name, the default of its kind. Raises UnknownModel, NotServing."""
        if message.deployment is not None:
            return self.named(message.deployment)
        controllers = list(self.controllers.values())
        if not controllers:
            raise NotServing(state="no model is served")
        answers = _ANSWERS.get(type(message))
        handling = [each for each in controllers if type(message) in each.kind.handlers]
        of_kind = [each for each in controllers if each.kind.answers == answers]
        return next(iter([*of_kind, *handling, *controllers]))

    @property
    def state(self) -> str:
        """One line for systemd."""
        if len(self.controllers) == 1:
            return next(iter(self.controllers.values())).state
        return "; ".join(f"{name}: {each.state}" for name, each in self.controllers.items()) or "no model is served"

    # ---- running them -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all deployments until `stop` was called and they have ended.

        Raises the error of one that cannot be served, if none of those from the start can, and none was added.
        """
        self._runs, self._ended = True, asyncio.get_running_loop().create_future()
        try:
            for name, controller in self.controllers.items():
                self._start(name, controller)
            self._check_end()
            await self._ended
        finally:
            self._stops = True
            await cancel_all(self._tasks.values())

    def stop(self) -> None:
        """Drain all deployments, then end; they stay saved. A second call ends at once."""
        self._stops = True
        for controller in self.controllers.values():
            controller.stop()
        self._check_end()

    def keep_workers(self) -> None:
        """Leave the workers to another coordinator at the end."""
        for controller in self.controllers.values():
            controller.keep_workers = True

    def lose_all(self, error: HearthError) -> None:
        """Report all deployments as lost."""
        for controller in self.controllers.values():
            controller.lose_deployment(error)

    def device_changed(self, device: Device) -> None:
        """Callback of the fleet: each deployment that runs on the device sees whether that breaks it."""
        for controller in list(self.controllers.values()):
            controller.device_changed(device)

    async def _opened(self, goal: Goal) -> TransformerModel | GraphFile:
        """The model of a goal. Raises as `open_checked` does, and DiskHung."""
        return await on_disk(Path(goal.path), _OPEN_SECONDS, open_checked, goal, self._services.settings.state_dir)

    def _create(
        self, name: str, saved: SavedDeployment, model: TransformerModel | GraphFile, running: Plan | None = None
    ) -> Controller:
        controller = Controller(name, saved, model, self._services, running=running, others=self.controllers.values)
        self.controllers[name] = controller
        self.proofs[f"the deployment {name}"] = controller.has_worked
        return controller

    def _start(self, name: str, controller: Controller) -> None:
        task = self._tasks[name] = asyncio.create_task(self._run(name, controller))
        task.add_done_callback(lambda _: self._check_end())

    async def _run(self, name: str, controller: Controller) -> None:
        try:
            await controller.run()
        except HearthError as error:
            self._failed[name] = error
            controller.requests.admission.close(error)
            self._services.report(f"{name} cannot be served: {error}")

    def _check_end(self) -> None:
        """Complete `run` if all have ended after `stop`, if one ended by a bug, or if nothing can be served."""
        if self._ended is None or self._ended.done():
            return
        ended = [task for task in self._tasks.values() if task.done() and not task.cancelled()]
        bugs = [error for task in ended if (error := task.exception()) is not None]
        if bugs:
            self._ended.set_exception(bugs[0])
        elif self._failed and not self._added and self._failed.keys() == self.controllers.keys():
            self._ended.set_exception(next(iter(self._failed.values())))
        elif self._stops and all(task.done() for task in self._tasks.values()):
            self._ended.set_result(None)


def checked_name(name: str) -> str:
    """The name that a user gave to a deployment. Raises BadSetting."""
    if not _NAME.fullmatch(name):
        reason = f"'{name}' is not a name of at most 64 letters, digits and any of _ . + -, which begins with one of the former"
        raise BadSetting(setting="--as", reason=reason)
    return name


def default_name(goal: Goal, taken: Collection[str]) -> str:
    """The name of a deployment without a name of its own: that of its model, with a number if that is taken."""
    path = PurePath(goal.path)
    model = path.stem if goal.kind == "graph" else path.name
    plain = re.sub(r"[^A-Za-z0-9_.+-]", "-", model).lstrip("_.+-")[:56] or "model"
    names = [plain, *(f"{plain}-{number}" for number in range(2, MAX_DEPLOYMENTS + 2))]
    return next(name for name in names if name not in taken)


def _deployed(plan: Plan | None) -> Plan | None:
    """The plan, if it was deployed; a plan that was only given by the user has no epoch."""
    return plan if plan is not None and plan.epoch > 0 else None
