"""A program's settings, read once from command-line flags and environment variables into a frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hearth.errors import BadSetting

_S = TypeVar("_S", bound=BaseModel)


def read_settings(
    settings: type[_S], prefix: str, environ: Mapping[str, str], flags: Mapping[str, Any], defaults: Mapping[str, Any]
) -> _S:
    """Read settings. Precedence: flags that are not None, variables named PREFIX_FIELD, `defaults`, the fields' defaults.

    An empty variable counts as unset. Raises BadSetting that names the flag.
    """
    variables = {name: environ.get(prefix + name.upper()) for name in settings.model_fields}
    given_flags = {name: value for name, value in flags.items() if value is not None}
    try:
        return settings(**{**defaults, **{name: value for name, value in variables.items() if value}, **given_flags})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        raise BadSetting(setting=f"--{name.replace('_', '-')}", reason=first["msg"]) from None
