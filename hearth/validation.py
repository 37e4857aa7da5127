"""Checks with pydantic: texts of its errors, and a program's settings, read once from flags and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hearth.errors import BadSetting

_S = TypeVar("_S", bound=BaseModel)

_SAME: Mapping[str, str] = MappingProxyType({})


def first_error(error: ValidationError, root: str = "", names: Mapping[str, str] = _SAME) -> str:
    """The first invalid field and the reason: `devices.0.name: Field required`.

    `root` is used as the field's name if the input as a whole is invalid; `names` maps field names to the user's names.
    """
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(names.get(str(part), str(part)) for part in first["loc"]) or root
    return f"{where}: {first['msg']}" if where else first["msg"]


def read_settings(
    settings: type[_S], prefix: str, environ: Mapping[str, str], flags: Mapping[str, Any], defaults: Mapping[str, Any]
) -> _S:
    """Read settings into a frozen object.

    Precedence: flags that are not None, variables named PREFIX_FIELD, `defaults`, the fields' defaults.
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
