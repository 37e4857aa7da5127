"""pydantic's errors as one line for people."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_SAME: Mapping[str, str] = MappingProxyType({})


def first_error(error: ValidationError, whole: str = "", names: Mapping[str, str] = _SAME) -> str:
    """The first field that is wrong, and why: `devices.0.name: Field required`.

    `whole` stands for the field where the input as a whole is wrong; `names` are those of the user for our fields.
    """
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(names.get(str(part), str(part)) for part in first["loc"]) or whole
    return f"{where}: {first['msg']}" if where else first["msg"]
