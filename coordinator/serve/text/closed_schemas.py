"""JSON schemas whose objects have no other properties than those that they name. Pure.

Under a mask, a schema permits every further property that it does not forbid, and a model that is free to invent some may go on
until its answer is cut. OpenAI's strict schemas and other servers close objects as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# With one of these, an object may have properties that another part of the schema names.
_COMBINED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "minProperties"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"})
_NAMED = ("properties", "$defs", "definitions")  # keywords that hold schemas by name
_LISTS = ("anyOf", "oneOf", "prefixItems")  # those that hold several


def closed(schema: Any) -> Any:
    """The schema with closed objects. What it permits, the schema that was given permits, too.

    Objects that say themselves which further properties they have stay as they are. So does a whole schema of which parts are
    joined in one object (`allOf`, properties next to a reference): closed parts would exclude each other.
    """
    if any("allOf" in each or {"$ref", "properties"} <= each.keys() for each in _dicts(schema)):
        return schema
    try:
        return _closed(schema)
    except RecursionError:  # what compiles it says so
        return schema


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            result[key] = {name: _closed(part) for name, part in schema[key].items()}
    for key in _LISTS:
        if isinstance(schema.get(key), list) and not (key != "prefixItems" and "properties" in schema):
            result[key] = [_closed(part) for part in schema[key]]
    if isinstance(schema.get("items"), dict):
        result["items"] = _closed(schema["items"])
    properties = schema.get("properties")
    if isinstance(properties, dict) and not schema.keys() & (_COMBINED | _OPEN):
        required = schema.get("required", [])
        if isinstance(required, list) and all(each in properties for each in required):
            result["additionalProperties"] = False
    return result


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects within a JSON value."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
