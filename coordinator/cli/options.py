"""Command-line options that several commands share, as types of parameters or as dataclasses of options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from hearth.client.home import AsyncHome, connect_async
from hearth.client.sync import Home, connect
from hearth.platform.security import Credential

_R = TypeVar("_R")

AsJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
KeyPathOption = Annotated[Path | None, typer.Option(help="Key file. Default: $HEARTH_KEY, else ~/.config/hearth/key.")]
DevicesOption = Annotated[
    str | None, typer.Option("--devices", help="Agent addresses, host[:port],host2[:port], where multicast is blocked.")
]
InterfacesOption = Annotated[str | None, typer.Option(help="Local addresses to use for mDNS, comma-separated.")]
TimeoutOption = Annotated[float, typer.Option(help="Timeout in seconds.", min=0.1)]
ServedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Name of a served model, as `hearth ps` shows it. Default: the oldest one of the kind that is asked.",
        metavar="NAME",
    ),
]


def interface_list(interfaces: str | None) -> list[str] | None:
    """The addresses of a comma-separated list; None (all interfaces) if there are none."""
    return [part.strip() for part in (interfaces or "").split(",") if part.strip()] or None


@dataclass(frozen=True)
class HomeOptions:
    """How to reach the running coordinator, and with which key."""

    address: Annotated[
        str | None,
        typer.Option(help="Coordinator addresses, host[:port],host2[:port]. Default: discover it over mDNS."),
    ] = None
    mdns_interfaces: InterfacesOption = None
    key: KeyPathOption = None

    @property
    def interfaces(self) -> list[str] | None:
        return interface_list(self.mdns_interfaces)

    def connect(self, timeout_seconds: float = 10.0, key: Credential | None = None) -> Home:
        """Connect to the coordinator, with `key` in place of the key file if it is given. Raises as `hearth.connect`."""
        return connect(self.address, key or self.key, timeout_seconds, self.interfaces)

    async def connect_async(self, timeout_seconds: float = 10.0) -> AsyncHome:
        """As `connect`, for asyncio."""
        return await connect_async(self.address, self.key, timeout_seconds, self.interfaces)


def _sampling(text: str) -> Any:
    """An option of sampling."""
    return typer.Option(help=text, rich_help_panel="Sampling")


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling settings of `AsyncHome.generate`."""

    temperature: Annotated[
        float | None,
        _sampling("0 takes the most likely token; 1 samples from the model's distribution."),
    ] = None
    top_k: Annotated[int | None, _sampling("Sample from the k most likely tokens (0 disables).")] = None
    top_p: Annotated[
        float | None,
        _sampling("Sample from the smallest set of likely tokens with this total probability."),
    ] = None
    min_p: Annotated[
        float | None,
        _sampling("Drop tokens less likely than this fraction of the top token."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling("Values above 1 penalise tokens already in the context."),
    ] = None
    seed: Annotated[int | None, _sampling("Random seed: the same seed gives the same tokens.")] = None


@dataclass(frozen=True)
class AnswerOptions:
    """Arguments of `AsyncHome.generate` for an answer of any kind."""

    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens to generate. Default: the model's setting, else 512.")
    ] = None
    model: ServedModelOption = None
    timeout_seconds: Annotated[
        float, typer.Option("--timeout", help="Timeout of the whole answer in seconds.", min=0.1)
    ] = 600.0


def expanded(command: Callable[..., _R]) -> Callable[..., _R]:
    """The command as typer reads it: a parameter that is a dataclass of options becomes one parameter for each field."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(group, type)
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            option = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default)
            parameters.append(option.replace(annotation=hints[field.name]))

    @functools.wraps(command)
    def wrapper(**given: Any) -> _R:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapper
