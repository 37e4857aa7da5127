"""Experiments: modules with the settings of one or more, their rows, and the tables made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hearth.errors import BadSetting
from hearth.validation import first_error
from tools.bench.results import Summary
from tools.testbed.scenario import tomllib

Named: TypeAlias = Mapping[str, Mapping[str, Any]]
R = TypeVar("R", bound=BaseModel)  # one raw row
# Modules of experiments in tools, and their pages of docs/results. A name is looked up in this order.
MODULES = {
    "bench.strategies": "strategies", "bench.scenarios": "scenarios", "bench.generation": "generation",
    "bench.exactness": "generation", "bench.shortcuts": "generation", "bench.graphs": "graphs", "bench.faults": "faults",
    "bench.idle_cost": "faults", "bench.http.experiments": "http", "bench.versions": "versions",
    "bench.one_core": "kernels", "bench.kernel_speed": "kernels", "research.partition": "partition",
    "research.moirai": "moirai", "research.doppler": "doppler",
}  # fmt: skip


@dataclass(frozen=True)
class Context:
    """What a run provides to its experiment."""

    folder: Path  # temporary, removed after the run
    report: Callable[[str], None]  # shows the present step; raises KeyboardInterrupt after an interrupt
    known: Sequence[Any] = ()  # rows of an earlier, unfinished run with the same settings


class Experiment(BaseModel, ABC, Generic[R]):
    """The settings of one experiment with rows of type R. Subclasses add theirs; unknown settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    NAMED: ClassVar[Named] = {}  # the experiments of this class: their settings by name
    # Whether rows name all settings that they depend on: a run that resumes keeps those of other settings.
    ROWS_NAME_SETTINGS: ClassVar[bool] = False

    name: str
    title: str
    source: str = ""  # paper and figure, if it reproduces one

    @abstractmethod
    def measure(self, context: Context) -> Iterator[R]:
        """Yield raw rows as soon as they are measured. Raises BadSetting before the first one."""

    @abstractmethod
    def summary(self, rows: Sequence[R]) -> Summary:
        """Conclusions and tables of these rows. Pure."""

    @classmethod
    def read_rows(cls, raw: Iterable[Mapping[str, Any]]) -> list[R]:
        """The rows of a result file. Raises ValidationError."""
        (kind,) = next(
            args for base in cls.__mro__ if (args := vars(base).get("__pydantic_generic_metadata__", {}).get("args"))
        )
        return [kind.model_validate(row) for row in raw]


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


def make_experiment(settings: Mapping[str, Any]) -> Experiment[Any]:
    """The experiment of these settings. Raises BadSetting that names the wrong one."""
    name = str(settings.get("name"))
    try:
        return _kind_of(name).model_validate(settings)
    except ValidationError as error:
        raise BadSetting(setting=f"experiment '{name}'", reason=first_error(error, "settings")) from None


def page_of(name: str) -> str:
    """The page of `docs/results` with an experiment's tables; of one that exists no more, named by its first word."""
    kind = _find_kind(name)
    return MODULES[kind.__module__.removeprefix("tools.")] if kind is not None else name.partition("-")[0]


def _kinds() -> Iterator[type[Experiment[Any]]]:
    """The classes of all experiments. Modules are imported when they are needed."""
    for name in MODULES:
        module = import_module(f"tools.{name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Experiment) and kind.__module__ == module.__name__:
                yield kind


def _find_kind(name: str) -> type[Experiment[Any]] | None:
    return next((kind for kind in _kinds() if name in kind.NAMED), None)


def _kind_of(name: str) -> type[Experiment[Any]]:
    if (kind := _find_kind(name)) is None:
        raise BadSetting(setting="the experiment", reason=f"'{name}' is none of {', '.join(names())}")
    return kind


def _value(text: str) -> Any:
    """A TOML value; text that is none is a string, so that quotes are not needed."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
