"""Experiments as data: what a settings file of `experiments/` becomes, and what each kind of experiment provides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from hearth.errors import BadSetting
from hearth.validation import first_error
from tools.bench.results import Summary
from tools.toml_files import read_settings_file, tomllib

EXPERIMENTS = Path(__file__).parent / "experiments"
# Module and class of each kind; imported when it is used.
KINDS: dict[str, tuple[str, str]] = {
    "strategies": ("strategies", "Strategies"),
    "generation": ("generation", "Generation"),
    "speculation": ("speculation", "SpeculativeDecoding"),
    "prefix-cache": ("prefix_cache", "PrefixCache"),
    "graph-throughput": ("graphs", "GraphThroughput"),
    "graph-latency": ("graphs", "GraphLatency"),
    "versions": ("versions", "Versions"),
    "partition": ("partition", "Partition"),
    "moirai": ("moirai", "Moirai"),
    "coarsening": ("coarsening", "Coarsening"),
    "doppler-policy": ("doppler.policy", "DopplerPolicy"),
    "doppler": ("doppler.evaluation", "Doppler"),
    "doppler-real": ("doppler.real", "DopplerReal"),
    "doppler-loss": ("doppler.loss", "DopplerLoss"),
    "faults": ("faults", "Faults"),
    "idle-cost": ("idle_cost", "IdleCost"),
    "kernels": ("kernel_speed", "KernelSpeed"),
    "http-overhead": ("http.overhead", "HttpOverhead"),
    "http-turns": ("http.turns", "HttpTurns"),
    "one-core": ("one_core", "OneCore"),
    "scenarios": ("scenarios", "Scenarios"),
}


@dataclass(frozen=True)
class Context:
    """What a run provides to its experiment."""

    folder: Path  # temporary, removed after the run
    report: Callable[[str], None]  # shows the present step; raises KeyboardInterrupt after an interrupt
    known: Sequence[Any] = ()  # rows of an earlier, unfinished run with the same settings


class Experiment(BaseModel, ABC):
    """The settings of one experiment. Subclasses add theirs; unknown settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ROW: ClassVar[TypeAdapter[Any]]  # type of one raw row
    # Whether rows name all settings that they depend on: a run that resumes keeps those of other settings.
    ROWS_NAME_SETTINGS: ClassVar[bool] = False

    kind: str
    title: str
    source: str = ""  # paper and figure, if it reproduces one

    @abstractmethod
    def measure(self, context: Context) -> Iterator[Any]:
        """Yield raw rows (pydantic models) as soon as they are measured. Raises BadSetting before the first one."""

    @abstractmethod
    def summary(self, rows: Sequence[Any]) -> Summary:
        """Conclusions and tables of these rows. Pure."""


def names() -> list[str]:
    """The names of all experiments."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def read_settings(name_or_path: str, changes: Iterable[str] = ()) -> dict[str, Any]:
    """Read an experiment file, by name or path, with `key=value` changes (TOML values). Raises BadSetting."""
    _, settings = read_settings_file("experiment", name_or_path, EXPERIMENTS)
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise BadSetting(setting="--set", reason=f"'{change}' is not of the form key=value")
        settings[key.strip()] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    """A TOML value; text that is none is a string, so that quotes are not needed."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def make_experiment(settings: dict[str, Any]) -> Experiment:
    """The experiment of these settings. Raises BadSetting that names the wrong one."""
    kind = settings.get("kind")
    if kind not in KINDS:
        raise BadSetting(setting="kind", reason=f"'{kind}' is none of {', '.join(KINDS)}")
    module, name = KINDS[kind]
    try:
        experiment: Experiment = getattr(import_module(f"tools.bench.{module}"), name).model_validate(settings)
    except ValidationError as error:
        raise BadSetting(
            setting=f"experiment '{settings.get('title', kind)}'", reason=first_error(error, "file")
        ) from None
    return experiment
