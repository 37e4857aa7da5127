"""Kind `speculation`: tokens per second of speculative decoding by the share of guesses that are right.

The answers are known from a run without guesses; an oracle in rank 0's process guesses their tokens, each right with the same
probability. The number of guesses adapts, as in service. Runs with and without guesses are interleaved. With a draft model, the
oracle's tokens take the place of those that the model has computed: its time counts, and its weights do not matter.

The bound of a row is the speed-up of the best fixed number of guesses by the run's own median times of steps and of the draft
model, if the share of right guesses were known from the start. Guessing takes no other time in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest
from hearth.plan.model_spec import WeightFormat
from hearth.plan.plan import TransformerPlan
from tools.bench.drive import EngineRunners, StoredModel, made_up_prompt
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.homes import Model, decoder_directory
from tools.bench.load import load_between, snapshot
from tools.bench.measure import MIN_ROUNDS, emulated
from tools.bench.plans import describe
from tools.bench.profiles import Profiles
from tools.bench.results import Summary, Table
from tools.bench.stats import Ratio, paired_ratio, rotated
from tools.testbed import load_scenario
from tools.testbed.cluster import check_possible

# A Llama of 90 million weights.
_MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 16000, "max_position_embeddings": 2048,
    "eos_token_id": None,
}  # fmt: skip
_NO_GUESSES = -1.0


class SpeculationRow(BaseModel):
    """One plan and oracle. `seconds`: of the second half of the answer, when the number of guesses has adapted, by round."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    devices: str
    weights: str
    right: float  # probability; -1: without guesses
    num_tokens: int  # of the second half
    seconds: tuple[float, ...]
    speed_up: Ratio  # over the same rounds without guesses
    num_drafted: int  # in all rounds, both halves
    num_accepted: int
    same_tokens: bool  # as without guesses
    bound: float | None = None  # of the speed-up; None: not kept, in older results
    draft_seconds: float = 0.0  # for one guess
    disturbed: str = ""  # why times cannot be trusted


class SpeculativeDecoding(Experiment):
    """A decoder of random weights on one device and on two, with oracles of several qualities and without guesses."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(SpeculationRow)
    PAGE = "generation"
    NAMED: ClassVar[Named] = {
        "speculation": {"title": "Speculative decoding by the share of guesses that are right"},
        "speculation-draft": {
            "title": "Speculative decoding with a draft model by the share of guesses that are right", "rounds": 5,
            "new_tokens": 96,
            "draft": {  # it reads a fifteenth of the model's weights for a token, most of them of its head
                "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4,
                "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 16000, "max_position_embeddings": 2048,
            },
        },
    }  # fmt: skip

    scenario: str = "whole-cores"
    model: Model = _MODEL
    weights: WeightFormat = "float32"
    mbit: float = Field(500.0, ge=1)  # real rate
    draft: Model | None = None  # None: guesses take no time, as those that are looked up
    strategies: tuple[Literal["local", "hmp"], ...] = ("local", "hmp")
    right: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9)
    prompt_tokens: int = Field(32, ge=1)
    new_tokens: int = Field(160, ge=16)
    rounds: int = Field(MIN_ROUNDS, ge=1)

    def measure(self, context: Context) -> Iterator[SpeculationRow]:
        scenario = load_scenario(self.scenario)
        check_possible(scenario)
        context.report("making the model")
        model = StoredModel(
            decoder_directory(self.model, context.folder, "float32"), context.folder / "store", self.weights
        )
        draft = None
        if self.draft is not None:
            folder = context.folder / "draft"
            draft = StoredModel(decoder_directory(self.draft, folder, "float32"), folder / "store", self.weights)
        names = [device.name for device in scenario.devices]
        with (
            emulated(scenario, context.folder / "testbed", real_mbit=True) as testbed,
            EngineRunners(testbed, names) as engine,
        ):
            testbed.set_mbit(self.mbit)
            profiles = Profiles(scenario, testbed, engine, context.report, repeat_disturbed=False)
            cluster = profiles.current(model, names, self.prompt_tokens, self.mbit)
            tokens = self.prompt_tokens + self.new_tokens
            for strategy in self.strategies:
                used = cluster.subset((cluster.devices[0].device_id,)) if strategy == "local" else cluster
                expected = GenerationRequest(
                    tokens, 4, self.prompt_tokens, self.new_tokens, draft=draft.spec if draft is not None else None
                )
                request = PlanRequest(model.spec, used, self.prompt_tokens, strategy=strategy, generation=expected)
                plan = plan_transformer(request).plan
                context.report(f"loading {strategy}")
                engine.load(
                    strategy, plan, model, plan.num_ranks > 1, self.mbit * 1e6 / 8, profile=cluster, draft=draft
                )
                yield from self._rows(context, engine, plan, model.spec.vocab_size)
                engine.unload(strategy)

    def _rows(
        self, context: Context, engine: EngineRunners, plan: TransformerPlan, vocab_size: int
    ) -> Iterator[SpeculationRow]:
        strategy = plan.body.strategy
        prompt = made_up_prompt(vocab_size, self.prompt_tokens)
        text = [*prompt, *engine.generate(strategy, prompt, self.new_tokens)["tokens"]]

        def generate(right: float) -> dict[str, Any]:
            guesses = {} if right == _NO_GUESSES else {"text": text, "right": right}
            return engine.generate(strategy, prompt, self.new_tokens, **guesses)

        qualities = (_NO_GUESSES, *self.right)
        found: dict[float, list[dict[str, Any]]] = {right: [] for right in qualities}
        for right in qualities[::-1]:
            generate(right)  # warms up, and measures steps of many rows
        began = snapshot()
        for index in range(self.rounds):
            context.report(f"{strategy}: round {index + 1} of {self.rounds}")
            for right in rotated(qualities, index):
                found[right].append(generate(right))
        disturbed = load_between([(began, snapshot())]).distrust
        for right, answers in found.items():
            seconds = _seconds(answers)
            yield SpeculationRow(
                strategy=strategy, devices=describe(plan), weights=self.weights, right=right,
                num_tokens=self.new_tokens - self.new_tokens // 2, seconds=seconds,
                speed_up=paired_ratio(_seconds(found[_NO_GUESSES]), seconds),
                num_drafted=sum(each["drafted"] for each in answers),
                num_accepted=sum(each["accepted"] for each in answers),
                same_tokens=all(each["tokens"] == text[self.prompt_tokens :] for each in answers),
                bound=statistics.median(
                    speed_up_bound(right, each["step_seconds"], each["draft_seconds"]) for each in answers
                ),
                draft_seconds=statistics.median(each["draft_seconds"] for each in answers), disturbed=disturbed,
            )  # fmt: skip

    def summary(self, rows: Sequence[SpeculationRow]) -> Summary:
        columns = ("devices", "ran", "guesses right", "tokens/s", "speed-up", "bound", "guessed", "accepted")
        said = [f"{row.strategy}: {row.disturbed}" for row in rows if row.disturbed and row.right == _NO_GUESSES]
        drafts = [
            f"{row.strategy}: {row.draft_seconds * 1e3:.2f} ms" for row in rows if row.draft_seconds and row.right == 0
        ]
        said += [f"A guess of the draft model takes {', '.join(drafts)}."] if drafts else []
        return Summary(
            conclusions=tuple(said),
            tables=(Table.of("Decoding of the second half of an answer", columns, map(_cells, rows)),),
            failure="" if all(row.same_tokens for row in rows) else "answers differ with guesses and without",
        )


def speed_up_bound(right: float, step_seconds: Sequence[float], draft_seconds: float) -> float:
    """The largest expected speed-up by guesses that are right with a probability. `step_seconds`: of 1, 2, ... rows."""
    if right == _NO_GUESSES or not step_seconds:
        return 1.0
    expected = accumulate(right**count for count in range(len(step_seconds)))
    return max(
        tokens * step_seconds[0] / (seconds + count * draft_seconds)
        for count, (tokens, seconds) in enumerate(zip(expected, step_seconds, strict=True))
    )


def _seconds(answers: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """Seconds of the second half of each answer."""
    return tuple(each["times"][-1] - each["times"][len(each["times"]) // 2 - 1] for each in answers)


def _cells(row: SpeculationRow) -> tuple[str, ...]:
    drafted = "none" if row.right == _NO_GUESSES else f"{row.right:.0%}"
    bound = f"{row.bound:.2f}" if row.bound is not None else "-"
    return (
        row.strategy, f"{row.devices}, {row.weights}", drafted, f"{row.num_tokens / statistics.median(row.seconds):.1f}",
        f"{row.speed_up.median:.2f} {row.speed_up.interval}", bound, str(row.num_drafted), str(row.num_accepted),
    )  # fmt: skip
