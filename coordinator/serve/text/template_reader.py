"""Takes a chat answer apart while it is generated, as the model's `response_template` says.

It is compared with `transformers`' own reader, from which it differs where that loses text: several texts are all kept, and
a call that is broken or cut comes back as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

from coordinator.serve.text.answer_reader import CallIds, Piece, joined, read_calls
from coordinator.serve.text.response_template import (
    CALLS_FIELD,
    REASONING_FIELDS,
    Mark,
    NotReadable,
    Part,
    ResponseTemplate,
    read_value,
)


class _Shown:
    """The text of one kind, from several parts. Spaces around each are left out, unless the template wants them."""

    def __init__(self) -> None:
        self._is_empty = True
        self._join = ""
        self._begins = True  # a part, whose spaces at the beginning are left out
        self._spaces = ""  # at the end so far

    def begin(self, join: str) -> None:
        self._begins, self._spaces = True, ""
        self._join = "" if self._is_empty else join

    def add(self, text: str, strips: bool) -> str:
        """What of this text can be shown now."""
        if strips:
            text = self._spaces + text
            text = text.lstrip() if self._begins else text
            shown = text.rstrip()
            self._spaces = text[len(shown) :]
        else:
            shown = text
        if not shown:
            return ""
        self._begins = self._is_empty = False
        join, self._join = self._join, ""
        return join + shown


class TemplateReader:
    """Reads one answer."""

    def __init__(self, template: ResponseTemplate, prompt: str, tools: Sequence[str], name: str) -> None:
        """`prompt`: its end, which may begin the answer. `tools`: those of the request, as JSON.

        `name` makes the ids of calls.
        """
        self._parameters = _parameters(tools)
        self._parts = [part for part in template.parts if tools or part.name != CALLS_FIELD]
        self._other = template.other if template.other in self._parts else None
        self._ids = CallIds(name)
        self._rest = ""  # text that was not read yet
        self._part = self._other
        self._is_open = False  # the part has begun
        self._opened, self._captures = "", {}  # type: tuple[str, Mapping[str, str]]
        self._written: list[str] = []  # of a call
        self._text, self._reasoning = _Shown(), _Shown()
        self._is_plain = False  # a pattern has failed: all further text is shown as it is
        try:
            self.push(template.after_anchor(prompt))
        except NotReadable:
            self._is_plain = True
        self._text = _Shown()  # what the prompt holds is no part of the answer

    def push(self, text: str) -> Piece:
        """What this text adds for certain."""
        self._rest += text
        return joined(self._read(is_whole=False))

    def flush(self, is_cut: bool) -> Piece:
        """What was held back; call it at the end of the answer. `is_cut`: the model would have gone on."""
        pieces = [*self._read(is_whole=True)]
        if self._rest:
            pieces.append(self._add(self._take(len(self._rest))))
        if self._is_open:
            lacks_end = self._part is not None and self._part.ends is not None
            pieces.append(self._end("", broken=is_cut and lacks_end))
        return joined(pieces)

    # ---- one part after the other ---------------------------------------------------------------------------------

    def _read(self, is_whole: bool) -> Iterator[Piece]:
        while self._rest and not self._is_plain:
            try:
                found, certain = self._next_mark(is_whole)
            except NotReadable:
                self._is_plain = True
                break
            if found is None:
                if certain:
                    yield self._add(self._take(certain))
                return
            part, match = found
            start, end, captures = match.start(), match.end(), match.groupdict()
            if start:
                yield self._add(self._take(start))
            mark = self._take(end - start)
            if part.begins is not None and part is not self._part:
                yield self._end("")
                self._begin(part, mark, {name: text for name, text in captures.items() if text is not None})
            elif self._is_open or mark:
                yield self._end(mark)
            else:
                return  # the end of nothing, without a text: it would be found again
        if self._is_plain and self._rest:
            yield self._add(self._take(len(self._rest)))

    def _next_mark(self, is_whole: bool) -> tuple[tuple[Part, Any] | None, int]:
        """The next mark that is certain, with its part; and how much text before any mark is certain. Raises NotReadable."""
        marks: list[tuple[Mark, Part, bool]] = []
        if self._part is self._other:
            marks = [(part.begins, part, True) for part in self._parts if part.begins is not None]
        if self._part is not None and self._part.ends is not None:
            marks.append((self._part.ends, self._part, False))
        best, certain = None, len(self._rest)
        for mark, part, begins in marks:
            found, uncertain_from = mark.search(self._rest, is_whole)
            certain = min(certain, uncertain_from)
            if found is not None:  # the first; of those the longest, and a beginning before an end
                key = (found.start(), -(found.end() - found.start()), not begins, part.name)
                best = min((key, part, found), best, key=lambda each: each[0]) if best else (key, part, found)
        if best is None or (best[2].start() >= certain and not is_whole):
            return None, certain
        return (best[1], best[2]), certain

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _begin(self, part: Part, mark: str, captures: Mapping[str, str]) -> None:
        self._part, self._is_open, self._opened, self._captures, self._written = part, True, mark, captures, []
        self._shown(part).begin(part.field.join or "\n")

    def _add(self, text: str) -> Piece:
        """Text of the current part."""
        part = self._part
        if part is None:  # the template has no place for it
            return Piece(text=self._text.add(text, strips=True))
        if not self._is_open:
            self._is_open = True
            self._shown(part).begin(part.field.join or "\n")
        if part.name == CALLS_FIELD and not self._is_plain:
            self._written.append(text)
            return Piece()
        shown = self._shown(part).add(text, part.field.content_args.get("strip", True) is not False)
        return Piece(reasoning=shown) if part.name in REASONING_FIELDS else Piece(text=shown)

    def _end(self, mark: str, broken: bool = False) -> Piece:
        """End the current part: other text follows."""
        part, self._part, is_open, self._is_open = self._part, self._other, self._is_open, False
        if part is None or not is_open or part.name != CALLS_FIELD:
            return Piece()
        written = "".join(self._written)
        calls = None
        if not broken:
            with suppress(NotReadable):
                calls = _calls(read_value(part.field, written, self._captures), self._parameters)
        if calls is None:
            self._text.begin("\n")
            return Piece(text=self._text.add(self._opened + written + mark, strips=True))
        return Piece(tool_calls=tuple(self._ids.call(name, given) for name, given in calls))

    def _shown(self, part: Part) -> _Shown:
        return self._reasoning if part.name in REASONING_FIELDS else self._text


# ---- calls ------------------------------------------------------------------------------------------------------------


def _calls(value: Any, parameters: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and arguments of the calls in a value; None if it holds anything else."""
    values = value if isinstance(value, list) else [value]
    calls = read_calls(each.get("function", each) if isinstance(each, dict) else each for each in values)
    if calls is None:
        return None
    return [
        (name, {key: _typed(argument, parameters.get(name, {}).get(key)) for key, argument in given.items()})
        for name, given in calls
    ]


def _parameters(tools: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The schemas of the parameters, by the names of the tools."""
    found = {}
    for text in tools:
        try:
            tool = json.loads(text)
            function = tool.get("function", tool)
            found[function["name"]] = dict(function["parameters"]["properties"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # a tool without parameters
    return found


def _typed(argument: Any, schema: Any) -> Any:
    """An argument that is written as a text, in the type of its schema if it has that form."""
    types = _types(schema)
    if isinstance(argument, list) and types and "array" not in types:
        return [_typed(each, schema) for each in argument]
    if not isinstance(argument, str):
        return argument
    for each in types:
        try:
            return _cast(argument, each)
        except (ValueError, OverflowError, RecursionError):
            continue
    return argument


def _types(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else [*declared] if isinstance(declared, list) else []
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        types += [each for choice in choices or [] for each in _types(choice)]
    return [*types, *(["null"] if schema.get("nullable") else [])]


def _cast(text: str, type_: str) -> Any:
    """Raises ValueError if the text does not have this type."""
    bare = text.strip().lower()
    if type_ in ("integer", "number"):
        number = float(text)
        if number != number or number in (float("inf"), float("-inf")):
            raise ValueError("no number of JSON")
        if type_ == "integer" and not number.is_integer():
            raise ValueError("no integer")
        has_fraction = type_ == "number" and "." in text
        return number if has_fraction or not number.is_integer() else int(Decimal(text))
    if type_ == "boolean" and bare in ("true", "1", "false", "0"):
        return bare in ("true", "1")
    if type_ == "null" and text.strip() in ("null", "None"):
        return None
    if type_ in ("object", "array") and isinstance(value := json.loads(text), dict if type_ == "object" else list):
        return value
    raise ValueError("another type")
