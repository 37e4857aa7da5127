"""Experiments: modules with the settings of one or more, their rows, and the tables made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from hearth.errors import BadSetting
from hearth.validation import first_error
from tools.bench.results import Summary
from tools.toml_files import tomllib

Named: TypeAlias = Mapping[str, Mapping[str, Any]]
# Modules of experiments. A name is looked up in this order.
MODULES = (
    "tools.bench.strategies", "tools.bench.scenarios", "tools.bench.generation", "tools.bench.exactness",
    "tools.bench.shortcuts", "tools.bench.graphs", "tools.bench.faults", "tools.bench.idle_cost",
    "tools.bench.http.experiments", "tools.bench.http.flood", "tools.bench.versions", "tools.bench.one_core",
    "tools.bench.kernel_speed", "tools.research.partition", "tools.research.points", "tools.research.moirai",
    "tools.research.coarsening", "tools.research.doppler",
)  # fmt: skip


@dataclass(frozen=True)
class Context:
    """What a run provides to its experiment."""

    folder: Path  # temporary, removed after the run
    report: Callable[[str], None]  # shows the present step; raises KeyboardInterrupt after an interrupt
    known: Sequence[Any] = ()  # rows of an earlier, unfinished run with the same settings


class Experiment(BaseModel, ABC):
    """The settings of one experiment. Subclasses add theirs; unknown settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    NAMED: ClassVar[Named] = {}  # the experiments of this class: their settings by name
    PAGE: ClassVar[str]  # of docs/results, with their tables
    ROW: ClassVar[TypeAdapter[Any]]  # type of one raw row
    # Whether rows name all settings that they depend on: a run that resumes keeps those of other settings.
    ROWS_NAME_SETTINGS: ClassVar[bool] = False

    name: str
    title: str
    source: str = ""  # paper and figure, if it reproduces one

    @abstractmethod
    def measure(self, context: Context) -> Iterator[Any]:
        """Yield raw rows (pydantic models) as soon as they are measured. Raises BadSetting before the first one."""

    @abstractmethod
    def summary(self, rows: Sequence[Any]) -> Summary:
        """Conclusions and tables of these rows. Pure."""


def checked_names(given: tuple[str, ...], known: Iterable[str]) -> tuple[str, ...]:
    """The names that a setting gives. Raises ValueError for one that is not known."""
    known = list(known)
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"'{unknown[0]}' is none of {', '.join(known)}")
    return given


def names() -> list[str]:
    """The names of all experiments."""
    return sorted(name for kind in _kinds() for name in kind.NAMED)


def read_settings(name: str, changes: Iterable[str] = ()) -> dict[str, Any]:
    """The settings of an experiment, with `key=value` changes (TOML values). Raises BadSetting."""
    settings = {"name": name, **_kind_of(name).NAMED[name]}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise BadSetting(setting="--set", reason=f"'{change}' is not of the form key=value")
        settings[key.strip()] = _value(value.strip())
    return settings


def make_experiment(settings: Mapping[str, Any]) -> Experiment:
    """The experiment of these settings. Raises BadSetting that names the wrong one."""
    name = str(settings.get("name"))
    try:
        return _kind_of(name).model_validate(settings)
    except ValidationError as error:
        raise BadSetting(setting=f"experiment '{name}'", reason=first_error(error, "settings")) from None


def page_of(name: str) -> str:
    """The page of `docs/results` with an experiment's tables; of one that exists no more, named by its first word."""
    kind = _find_kind(name)
    return kind.PAGE if kind is not None else name.partition("-")[0]


def _kinds() -> Iterator[type[Experiment]]:
    """The classes of all experiments. Modules are imported when they are needed."""
    for module in MODULES:
        for kind in vars(import_module(module)).values():
            if isinstance(kind, type) and issubclass(kind, Experiment) and kind.__module__ == module:
                yield kind


def _find_kind(name: str) -> type[Experiment] | None:
    return next((kind for kind in _kinds() if name in kind.NAMED), None)


def _kind_of(name: str) -> type[Experiment]:
    if (kind := _find_kind(name)) is None:
        raise BadSetting(setting="the experiment", reason=f"'{name}' is none of {', '.join(names())}")
    return kind


def _value(text: str) -> Any:
    """A TOML value; text that is none is a string, so that quotes are not needed."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
