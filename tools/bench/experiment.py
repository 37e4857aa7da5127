"""Experiments: classes with settings, rows, and the tables made of them. `experiments.toml` names them, with their settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from hearth.errors import BadSetting
from hearth.validation import first_error
from tools.bench.results import Summary
from tools.testbed.scenario import tomllib

R = TypeVar("R", bound=BaseModel)  # one raw row
_FILE = Path(__file__).with_name("experiments.toml")


@dataclass(frozen=True)
class Context:
    """What a run provides to its experiment."""

    folder: Path  # temporary, removed after the run
    report: Callable[[str], None]  # shows the present step; raises KeyboardInterrupt after an interrupt
    known: Sequence[Any] = ()  # rows of an earlier, unfinished run with the same settings


class Experiment(BaseModel, ABC, Generic[R]):
    """The settings of one experiment with rows of type R. Subclasses add theirs; unknown settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


def one_of(known: Collection[str]) -> AfterValidator:
    """Validates a name that a setting gives."""

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"'{name}' is none of {', '.join(known)}")
        return name

    return AfterValidator(check)


def names() -> list[str]:
    """The names of all experiments."""
    return sorted(_named())


def read_settings(name: str, changes: Iterable[str] = ()) -> dict[str, Any]:
    """The settings of an experiment, with `key=value` changes (TOML values). Raises BadSetting."""
    settings = {"name": name, **_entry(name)}
    del settings["class"]
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise BadSetting(setting="--set", reason=f"'{change}' is not of the form key=value")
        settings[key.strip()] = _value(value.strip())
    return settings


def make_experiment(settings: Mapping[str, Any]) -> Experiment[Any]:
    """The experiment of these settings. Raises BadSetting that names the wrong one."""
    name = str(settings.get("name"))
    module, _, kind = _entry(name)["class"].rpartition(".")
    try:
        experiment: Experiment[Any] = getattr(import_module(f"tools.{module}"), kind).model_validate(settings)
    except ValidationError as error:
        raise BadSetting(setting=f"experiment '{name}'", reason=first_error(error, "settings")) from None
    return experiment


def page_of(name: str) -> str:
    """The page of `docs/results` with an experiment's tables; of one that exists no more, named by its first word."""
    return _named().get(name, (name.partition("-")[0],))[0]


@cache
def _named() -> dict[str, tuple[str, dict[str, Any]]]:
    """By name, an experiment's page, and what the file says of it."""
    pages = tomllib.loads(_FILE.read_text())
    return {name: (page, entry) for page, entries in pages.items() for name, entry in entries.items()}


def _entry(name: str) -> dict[str, Any]:
    """The class and settings of an experiment, with those of one that it is `like`. Raises BadSetting."""
    if name not in _named():
        raise BadSetting(setting="the experiment", reason=f"'{name}' is none of {', '.join(names())}")
    entry = dict(_named()[name][1])
    return {**_entry(like), **entry} if (like := entry.pop("like", "")) else entry


def _value(text: str) -> Any:
    """A TOML value; text that is none is a string, so that quotes are not needed."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
