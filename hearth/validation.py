"""One-line texts of pydantic's validation errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_SAME: Mapping[str, str] = MappingProxyType({})


def first_error(error: ValidationError, root: str = "", names: Mapping[str, str] = _SAME) -> str:
    """The first invalid field and the reason: `devices.0.name: Field required`.

    `root` is used as the field's name if the input as a whole is invalid; `names` maps field names to the user's names.
    """
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(names.get(str(part), str(part)) for part in first["loc"]) or root
    return f"{where}: {first['msg']}" if where else first["msg"]
