"""Kind `one-core`: generation on one core by Hearth, an older checkout of it, `transformers` and llama.cpp, interleaved.

Hearth computes with the kernels that its profile chooses, as a served model does. llama.cpp runs in an environment of its own
(`llama_python`), which must have llama-cpp-python and gguf; no package of it enters Hearth's. Its model has the same shape and
random weights in Q4_0.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest
from hearth.errors import BadSetting, DeadlineExceeded, InternalError
from hearth.plan.common import WireFormat
from hearth.plan.kernels import choose_kernels
from hearth.plan.model_spec import WeightFormat
from hearth.plan.profile import ClusterProfile
from tools.bench.drive import EngineRunners, Profiles, StoredModel, made_up_prompt
from tools.bench.experiment import Context, Experiment
from tools.bench.homes import checkout, decoder_directory
from tools.bench.load import interleaved
from tools.bench.measure import MIN_ROUNDS, emulated
from tools.bench.processes import DeviceProcess
from tools.bench.results import Record, Summary, Table
from tools.bench.shapes import LLAMA
from tools.bench.stats import Ratio, paired_ratio
from tools.bench.versions import plan_of_checkout
from tools.testbed import Testbed, load_scenario
from tools.testbed.cluster import check_possible
from tools.testbed.scenario import InstructionSet

NEW, OLD, LLAMA_CPP = "hearth", "hearth, old", "llama.cpp"
_SCRIPT = Path(__file__).parent / "llama_cpp.py"
_CALL_SECONDS = 300.0  # timeout of one answer of llama.cpp, and of writing its model
_RATE = 1e9  # bytes per second of links, which one device does not use

Answer = Mapping[str, Any]


class OneCoreRow(Record):
    """One program and weight format. `prefill` and `decode`: seconds by round; decoding excludes the first token.

    The ratios are speeds of Hearth over this program's, in the same rounds.
    """

    program: str
    weights: str
    instructions: str  # that the testbed allows
    kernels: str  # layout and kernels of the MLP's up projection, by rows; or what the program says
    prompt_tokens: int
    new_tokens: int
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    prefill_gain: Ratio
    decode_gain: Ratio


class OneCore(Experiment[OneCoreRow]):
    """Generation on one core by several programs."""

    model: dict[str, Any] = LLAMA
    weights: tuple[WeightFormat, ...] = Field(("int4", "int8"), min_length=1)
    instructions: InstructionSet = "native"  # of the testbed's device
    # Layouts that are not chosen: onnxruntime uses all instructions, whatever is allowed.
    leave_out: tuple[str, ...] = ()
    prompt_tokens: int = Field(256, ge=1)
    new_tokens: int = Field(64, ge=2)
    transformers: tuple[str, ...] = ("bfloat16", "float32")
    old: Path | None = None  # an older checkout of Hearth
    llama_python: Path | None = None  # the interpreter of an environment with llama-cpp-python and gguf
    rounds: int = Field(MIN_ROUNDS, ge=1)

    def measure(self, context: Context) -> Iterator[OneCoreRow]:
        scenario = load_scenario("whole-cores")
        device = scenario.devices[0].model_copy(update={"instruction_set": self.instructions})
        scenario = scenario.model_copy(update={"devices": (device,)})
        check_possible(scenario)
        old_tree = checkout("old", self.old) if self.old is not None else None
        if self.llama_python is not None and not self.llama_python.is_file():
            raise BadSetting(
                setting="llama_python", reason=f"there is no {self.llama_python}; make it by `python -m venv`, then "
                "`pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf` with its pip",
            )  # fmt: skip
        context.report("making the model")
        directory = decoder_directory(self.model, context.folder, "float32")
        with ExitStack() as stack:
            testbed = stack.enter_context(emulated(scenario, context.folder / "new", real_mbit=True))
            engine = stack.enter_context(EngineRunners(testbed, [device.name]))
            profiles = Profiles(scenario, testbed, engine, context.report)
            runs, kernels = self._others(stack, testbed, device.name, directory, context)
            engines = {NEW: engine}
            if old_tree is not None:
                old_testbed = stack.enter_context(emulated(scenario, context.folder / "old", True, old_tree))
                engines[OLD] = stack.enter_context(EngineRunners(old_testbed, [device.name]))
            for weights in self.weights:
                model = StoredModel(directory, context.folder / "store", weights)
                cluster = profiles.current(model, [device.name], self.prompt_tokens, None)
                context.report(f"loading {weights}")
                kernels[NEW] = self._load(engine, model, cluster)
                if old_tree is not None:
                    tokens = self.prompt_tokens + self.new_tokens
                    plan, text = plan_of_checkout(old_testbed, model, cluster, "local", self.prompt_tokens, tokens)
                    engines[OLD].load("one", plan, model, _RATE, text)
                for program, each in engines.items():
                    runs[program] = partial(each.generate, "one", self._prompt, self.new_tokens)
                found, _ = interleaved(runs, self.rounds, context.report)
                yield from self._rows(found, kernels, weights)
                for each in engines.values():
                    each.unload("one")

    @property
    def _prompt(self) -> list[int]:
        return made_up_prompt(self.model["vocab_size"], self.prompt_tokens)

    def _others(
        self, stack: ExitStack, testbed: Testbed, name: str, directory: Path, context: Context
    ) -> tuple[dict[str, Callable[[], Answer]], dict[str, str]]:
        """Runs of the programs that are not Hearth, and the kernels of those that tell them."""
        runs: dict[str, Callable[[], Answer]] = {}
        kernels: dict[str, str] = {}
        request = {"prompt": self._prompt, "num_tokens": self.new_tokens}
        if self.transformers:
            reference = stack.enter_context(DeviceProcess(testbed, "baselines", name, "transformers"))
        for dtype in self.transformers:
            context.report(f"loading transformers in {dtype}")
            reference.call("load", model_dir=str(directory), dtype=dtype)
            runs[f"transformers {dtype}"] = partial(reference.call, "generate", dtype=dtype, **request)
        if self.llama_python is not None:
            context.report("writing the model of llama.cpp")
            llama = _LlamaCpp(testbed, name, self.llama_python)
            path = str(context.folder / "model.gguf")
            llama.call("make", path=path, config=self.model)
            about = llama.call("load", path=path, context=self.prompt_tokens + self.new_tokens)
            runs[LLAMA_CPP] = partial(llama.call, "generate", **request)
            kernels[LLAMA_CPP] = f"{about['version']}: {about['system']}"
        return runs, kernels

    def _load(self, engine: EngineRunners, model: StoredModel, cluster: ClusterProfile) -> str:
        """Load Hearth with the kernels of its profile; returns the layout and kernels of the largest matrix."""
        expected = GenerationRequest(self.prompt_tokens + self.new_tokens, 1, self.prompt_tokens, self.new_tokens)
        request = PlanRequest(model.spec, cluster, self.prompt_tokens, WireFormat(), "local", generation=expected)
        (device,) = cluster.devices
        times = tuple(time for time in device.blocks.kernels if time.layout not in self.leave_out)
        blocks = device.blocks.model_copy(update={"kernels": times})
        chosen = cluster.model_copy(update={"devices": (device.model_copy(update={"blocks": blocks}),)})
        engine.load("one", plan_transformer(request).plan, model, _RATE, profile=chosen)
        up = max(choose_kernels(times), key=lambda choice: choice.num_outputs, default=None)
        return "" if up is None else f"{up.layout}: " + ", ".join(dict.fromkeys(up.kernels))

    def _rows(
        self, found: Mapping[str, Sequence[Answer]], kernels: Mapping[str, str], weights: str
    ) -> Iterator[OneCoreRow]:
        for program, answers in found.items():
            own = weights if program in (NEW, OLD) else "Q4_0" if program == LLAMA_CPP else program.split()[-1]
            seconds = {part: tuple(each[part] for each in answers) for part in ("prefill", "decode")}
            gains = {
                f"{part}_gain": paired_ratio(each, [answer[part] for answer in found[NEW]])
                for part, each in seconds.items()
            }
            yield OneCoreRow(
                program=program, weights=own, instructions=self.instructions, kernels=kernels.get(program, "-"),
                prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, **seconds, **gains,
            )  # fmt: skip

    def summary(self, rows: Sequence[OneCoreRow]) -> Summary:
        columns = {
            "program": lambda row: row.program,
            "weights": lambda row: row.weights,
            "instructions": lambda row: row.instructions,
            "prefill tok/s": lambda row: f"{row.prompt_tokens / statistics.median(row.prefill):.1f}",
            "decode tok/s": lambda row: f"{(row.new_tokens - 1) / statistics.median(row.decode):.1f}",
            "Hearth's prefill over it": lambda row: row.prefill_gain,
            "Hearth's decode over it": lambda row: row.decode_gain,
            "kernels": lambda row: row.kernels,
        }
        sizes = dict.fromkeys((row.prompt_tokens, row.new_tokens) for row in rows)
        return Summary(tables=tuple(
            Table.of_columns(f"{prompt} + {new} tokens on one core", columns,
                             (row for row in rows if (row.prompt_tokens, row.new_tokens) == (prompt, new)))
            for prompt, new in sizes
        ))  # fmt: skip


class _LlamaCpp:
    """llama.cpp on a device of the testbed, which ends the process."""

    def __init__(self, testbed: Testbed, name: str, python: Path) -> None:
        command = (str(python.absolute()), "-I", str(_SCRIPT))
        self._process = testbed.popen(
            name, *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, memory_limited=False
        )

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method. Raises InternalError if the child has ended, DeadlineExceeded."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": method, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _CALL_SECONDS)[0]:
            raise DeadlineExceeded(action=f"llama.cpp: {method}", seconds=_CALL_SECONDS)
        if not (line := self._process.stdout.readline()):
            raise InternalError(where="llama.cpp", reason="it has ended, with the error above")
        answer: dict[str, Any] = json.loads(line)
        return answer
