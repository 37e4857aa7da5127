"""Kind `several-models`: a language model, sentence embeddings and an image network at once, on devices with tight memory.

Each model is served alone first, on one device, for the answers that all later ones must equal. With all three up, rounds
measure each model's throughput while the others rest, and of all three together. Then one is stopped and served again under
load of the others, and a device loses its power under load of all three. The kernel limits the memory of each device.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from tools.bench.experiment import Context, Experiment
from tools.bench.homes import agent_names, agents, decoder_directory, hub_scenario, stop_coordinator
from tools.bench.http.models import save_tokenizer
from tools.bench.load import load_between, snapshot
from tools.bench.processes import ClientProcess
from tools.bench.results import Summary
from tools.bench.several_rows import Asked, DeviceRow, LoadRow, PlanRow, Step, summarise_models
from tools.bench.shapes import save_random_model
from tools.bench.stats import rotated
from tools.bench.watch import MemoryWatch
from tools.graph_models import build, export
from tools.testbed import Testbed
from tools.testbed.cluster import check_possible, wait_until
from tools.testbed.scenario import NumBytes

_LLAMA: Mapping[str, Any] = {  # 134 MB
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 8, "vocab_size": 8000, "max_position_embeddings": 512,
}  # fmt: skip
_BERT: Mapping[str, Any] = {  # 89 MB: the shape of MiniLM
    "model_type": "bert", "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12,
    "num_hidden_layers": 6, "vocab_size": 30000, "max_position_embeddings": 512,
}  # fmt: skip
_NUM_TOKENIZER_WORDS = 4000  # of the encoder: few, because its tokenizer is trained here
_NETWORK = "resnet50"
_READY_SECONDS = 240.0  # for the coordinator to profile, plan, push and load on slow devices
_ANSWERS_SECONDS = 300.0  # for requests in progress to end, and for some answers of each model
_KILL_SECONDS = 10.0  # for the processes of a device to end
_AGAIN = 3  # answers of a model for each of its clients, before and after a change


class _Served(NamedTuple):
    """A model: its name, the kind of its requests, options of `hearth serve`, and arguments of the clients."""

    name: str
    load: str
    options: tuple[str, ...]
    fields: dict[str, Any]


class SeveralModels(Experiment):
    """Three models on three devices, none of which could hold all of them."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(LoadRow | PlanRow | DeviceRow)

    devices: int = Field(3, ge=2, le=4)
    limit: Annotated[NumBytes, Field(ge=64 << 20)] = 900 << 20  # of each device's memory, enforced by the kernel
    agent: NumBytes = 96 << 20  # of the limit, for the agent and the process from which workers are forked
    clients: int = Field(2, ge=1)  # of each model, at once
    new_tokens: int = Field(16, ge=1)  # of an answer
    rounds: int = Field(5, ge=1)
    seconds: float = Field(5.0, gt=0)  # of each part of a round
    stopped: Literal["chat", "sentences", "images"] = "images"  # and served again
    mbit: float = Field(1000.0, ge=1)  # real rate of every link

    def measure(self, context: Context) -> Iterator[LoadRow | PlanRow | DeviceRow]:
        scenario = hub_scenario(self.devices, memory_bytes=self.limit)
        check_possible(scenario)
        context.report("making the models")
        paths = _make_models(context.folder)
        limit = ("--memory-bytes", str(self.limit - self.agent))
        with (
            agents(scenario, context.folder, self.mbit, *limit) as testbed,
            ClientProcess(testbed, "several_clients") as clients,
            MemoryWatch({name: testbed.cgroups[name].held_bytes for name in agent_names(testbed)}) as watch,
        ):
            home = _Home(testbed, clients, self, paths, context.report)
            alone = home.serve_each_alone()
            for served in home.served.values():
                home.serve(served)
            devices = home.devices()
            for number in range(self.rounds):
                for names in rotated([*([name] for name in home.served), list(home.served)], number):
                    context.report(f"round {number + 1} of {self.rounds}: {', '.join(names)}")
                    yield home.ask("together" if len(names) > 1 else "alone", names, lambda: time.sleep(self.seconds))
            yield home.stop_one(self.stopped)
            yield home.kill_device()
            after = home.devices()
            home.end()
            for name, (planned, held) in alone.items():
                yield PlanRow(
                    model=name, planned_bytes=planned, held_bytes=held, devices=devices[name], devices_after=after[name]
                )  # fmt: skip
            for name, peak in watch.peak.items():
                killed = testbed.cgroups[name].times_out_of_memory()
                yield DeviceRow(device=name, limit_bytes=self.limit, peak_bytes=peak, killed=killed)

    def models(self) -> list[_Served]:
        """What is served, in this order."""
        generates = {"vocab_size": _LLAMA["vocab_size"], "max_tokens": self.new_tokens}
        return [
            _Served("chat", "generate", ("--context", "128", "--sequences", str(self.clients)), generates),
            _Served("sentences", "embed", (), {}),
            _Served("images", "infer", ("--no-learn", "--time-limit", "5"), {}),
        ]

    def summary(self, rows: Sequence[LoadRow | PlanRow | DeviceRow]) -> Summary:
        return summarise_models(rows)


class _Home:
    """A home under way: its coordinator, and the clients on the hub."""

    def __init__(
        self,
        testbed: Testbed,
        clients: ClientProcess,
        settings: SeveralModels,
        paths: Mapping[str, Path],
        report: Callable[[str], None],
    ) -> None:
        self._testbed, self._clients, self._settings, self._paths, self._report = (
            testbed, clients, settings, paths, report,
        )  # fmt: skip
        self.served = {each.name: each for each in settings.models()}
        self._load_names = {each.load: each.name for each in self.served.values()}
        self._hub = testbed.address(testbed.scenario.coordinator_device)

    def serve_each_alone(self) -> dict[str, tuple[int, int]]:
        """Serve each model as the only one, on one device, and ask for the references.

        Returns its bytes of memory: by its plan, and what its device held more than an idle one.
        """
        found: dict[str, tuple[int, int]] = {}
        for served in self.served.values():
            local = ("--strategy", "local")
            if not found:
                self._report(f"{served.name} alone: starting")
                options = (*self._options(served), *local, "--min-devices", str(self._settings.devices))
                self._coordinator = self._testbed.start_coordinator(*options)
                self._clients.ready_status(_READY_SECONDS)
            else:
                self.serve(served, *local)
            self._report(f"{served.name} alone: asking")
            self._clients.call("remember", _ANSWERS_SECONDS, load=served.load, **served.fields)
            held = [self._testbed.cgroups[name].held_bytes() for name in agent_names(self._testbed)]
            found[served.name] = self._models()[served.name]["memory_bytes"], max(held) - min(held)
            self.stop(served.name)
        return found

    def serve(self, served: _Served, *options: str) -> None:
        """Have the coordinator serve one more model, until it is ready. Raises InternalError."""
        self._report(f"serving {served.name}")
        self._testbed.hearth("serve", *self._options(served), *options)

    def stop(self, name: str) -> None:
        self._report(f"stopping {name}")
        self._testbed.hearth("stop", name, "--address", self._hub)

    def devices(self) -> dict[str, tuple[str, ...]]:
        """By model, the devices of its plan."""
        return {name: tuple(each["devices"]) for name, each in self._models().items()}

    def ask(self, step: Step, names: Sequence[str], act: Callable[[], Any]) -> LoadRow:
        """Let the clients of these models ask while `act` runs, and until their last requests have been answered."""
        before, began = snapshot(), time.monotonic()
        in_round = step in ("alone", "together")  # processes that are killed count as those of other programs
        loads = [self.served[name].load for name in names]
        self._clients.call("begin", loads=loads, num_clients=self._settings.clients)
        target = act()
        asked = self._clients.call("end", _ANSWERS_SECONDS)
        return LoadRow(
            step=step, asked={self._load_names[load]: Asked.model_validate(each) for load, each in asked.items()},
            target=target or "", seconds=time.monotonic() - began,
            disturbed=load_between([(before, snapshot())]).distrust if in_round else "",
        )  # fmt: skip

    def stop_one(self, name: str) -> LoadRow:
        """Stop a model, and serve it again, under load of the others."""

        def act() -> str:
            self._wait_for_answers()
            self.stop(name)
            self._wait_for_answers()
            self.serve(self.served[name])
            self._wait_for_answers()
            return name

        return self.ask("stopped", [other for other in self.served if other != name], act)

    def kill_device(self) -> LoadRow:
        """Take the power of the device with the most models, under load of all of them."""

        def act() -> str:
            self._wait_for_answers()
            used = [name for names in self.devices().values() for name in names]
            target = statistics.mode(used)
            self._report(f"{target} is gone")
            self._testbed.network.cut(target)
            self._testbed.stop(lambda: set(self._testbed.pids(target)), signal.SIGKILL, _KILL_SECONDS)
            self._wait_for_answers()
            return target

        return self.ask("killed", list(self.served), act)

    def end(self) -> None:
        stop_coordinator(self._coordinator)

    def _wait_for_answers(self) -> None:
        """Wait until the models that are asked have given some more answers. Raises DeadlineExceeded."""
        before: dict[str, int] = self._clients.call("counts")
        count = _AGAIN * self._settings.clients

        def are_there() -> bool:
            return all(answers >= before[load] + count for load, answers in self._clients.call("counts").items())

        wait_until("answers of each model", are_there, _ANSWERS_SECONDS)

    def _options(self, served: _Served) -> tuple[str, ...]:
        return str(self._paths[served.name]), "--as", served.name, *served.options

    def _models(self) -> dict[str, Any]:
        return {each["deployment"]: each for each in self._clients.call("models")["models"]}


def _make_models(folder: Path) -> dict[str, Path]:
    """A checkpoint or file by model."""
    sentences = save_random_model(folder / "sentences", dict(_BERT))
    save_tokenizer(sentences, _NUM_TOKENIZER_WORDS)
    images = export(build(_NETWORK), folder / "images.onnx")
    return {"chat": decoder_directory(_LLAMA, folder, "float32"), "sentences": sentences, "images": images}
