"""The `response_template` of a tokenizer's configuration: marks around the parts of an answer, and how each part is read.

The form is that of `transformers`, version 1. Patterns come from the model's files, so each search has a time limit; partial
matches at the end of a text that is still generated are why this uses the `regex` library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import regex
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hearth.validation import first_error

_SEARCH_SECONDS = 0.2  # far more than a pattern without exponential backtracking takes for an answer
_MAX_PATTERN_CHARACTERS = 2000
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_OPEN, _CLOSE = "\x01", "\x02"  # around the number of a string that was taken out; no model writes them

ContentForm = Literal["text", "int", "float", "bool", "json", "xml-inline", "kv-lines"]
# How fields of the template are shown; calls of tools and these are known, others are not.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
TEXT_FIELD, CALLS_FIELD = "content", "tool_calls"


class NotReadable(Exception):
    """A part of an answer does not have the form that the template says."""


class Mark(NamedTuple):
    """Where a part begins or ends. `is_fixed`: no further text makes a complete match longer."""

    pattern: regex.Pattern[str]
    is_fixed: bool
    source: str  # as it stands in the template, without backslashes

    def search(self, text: str, is_whole: bool) -> tuple[regex.Match[str] | None, int]:
        """The first match, and where one begins that the text may not hold to its end (the text's length: none does).

        Raises NotReadable.
        """
        try:
            found = self.pattern.search(text, partial=not is_whole, timeout=_SEARCH_SECONDS)
        except TimeoutError:
            raise NotReadable("a pattern takes too long") from None
        if found is None or is_whole:
            return found, len(text)
        may_grow = found.end() == len(text) > found.start() and not self.is_fixed
        return (None, found.start()) if found.partial or may_grow else (found, len(text))


class TemplateField(BaseModel):
    """One part of an answer, as the template declares it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    open: str | tuple[str, ...] | None = None
    open_pattern: str | None = Field(None, max_length=_MAX_PATTERN_CHARACTERS)
    close: str | tuple[str, ...] | None = None
    close_pattern: str | None = Field(None, max_length=_MAX_PATTERN_CHARACTERS)
    content: ContentForm = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False


class _Template(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    defaults: dict[str, Any] = {}
    fields: dict[str, TemplateField] = Field(min_length=1)
    start_anchor: str | tuple[str, ...] | None = None
    start_anchor_pattern: str | None = Field(None, max_length=_MAX_PATTERN_CHARACTERS)

    @model_validator(mode="after")
    def _has_one_part_without_a_mark(self) -> _Template:
        if sum(field.open is None and field.open_pattern is None for field in self.fields.values()) > 1:
            raise ValueError("at most one field may have no mark at its beginning")
        if self.start_anchor is None and self.start_anchor_pattern is None:
            raise ValueError("it names no beginning of an answer")
        return self


class Part(NamedTuple):
    """A field with its marks; `begins` is None for the part that all other text belongs to."""

    name: str
    begins: Mark | None
    ends: Mark | None
    field: TemplateField


class ResponseTemplate(NamedTuple):
    """How the answers of a model are written."""

    anchor: Mark  # the end of the prompt, behind which the answer begins
    parts: tuple[Part, ...]

    @property
    def other(self) -> Part | None:
        """The part that text outside of all marks belongs to."""
        return next((part for part in self.parts if part.begins is None), None)

    @property
    def has_calls(self) -> bool:
        """Whether it says how calls of tools are written."""
        return any(part.name == CALLS_FIELD for part in self.parts)

    def has_mark(self, text: str) -> bool:
        """Whether a special token is part of a mark, so that a reader needs to see it."""
        marks = [mark for part in self.parts for mark in (part.begins, part.ends)]
        return any(mark is not None and text in mark.source for mark in marks)

    def after_anchor(self, prompt: str) -> str:
        """What the prompt holds of the answer already. Empty without an anchor. Raises NotReadable."""
        try:
            ends = [found.end() for found in self.anchor.pattern.finditer(prompt, timeout=_SEARCH_SECONDS)]
        except TimeoutError:
            raise NotReadable("a pattern takes too long") from None
        return prompt[ends[-1] :] if ends else ""


def read_response_template(value: object) -> ResponseTemplate:
    """The template of a tokenizer's configuration. Raises ValueError that says what is wrong with it."""
    try:
        read = _Template.model_validate(value)
    except ValidationError as error:
        raise ValueError(first_error(error)) from None
    anchor = _mark("start_anchor", read.start_anchor, read.start_anchor_pattern)
    assert anchor is not None
    parts = []
    for name, field in read.fields.items():
        begins = _mark(name, field.open, field.open_pattern)
        if begins is not None and begins.pattern.search("", timeout=_SEARCH_SECONDS):
            raise ValueError(f"{name} begins with nothing")
        parts.append(Part(name, begins, _mark(name, field.close, field.close_pattern), field))
    return ResponseTemplate(anchor, tuple(parts))


def _mark(name: str, texts: str | Sequence[str] | None, pattern: str | None) -> Mark | None:
    if texts is not None and pattern is not None:
        raise ValueError(f"{name} has a text and a pattern as its mark")
    if pattern is not None:
        try:
            return Mark(regex.compile(pattern, regex.DOTALL), False, pattern.replace("\\", ""))
        except regex.error as error:
            raise ValueError(f"{name} has a pattern that is no regular expression ({error})") from None
    if texts is None:
        return None
    # The longest is tried first:
    each = sorted({texts} if isinstance(texts, str) else set(texts), key=len, reverse=True)
    if not each or "" in each:
        raise ValueError(f"{name} has an empty mark")
    fixed = not any(a != b and a.startswith(b) for a in each for b in each)
    return Mark(regex.compile("|".join(map(regex.escape, each))), fixed, "\n".join(each))


# ---- contents ---------------------------------------------------------------------------------------------------------


def read_value(field: TemplateField, written: str, captures: Mapping[str, str]) -> Any:
    """The value of a part. `captures`: the named groups of its opening mark. Raises NotReadable."""
    try:
        value = _FORMS[field.content](written, field.content_args)
        if field.transform is None:
            return value
        if not field.transform_each:
            return _filled(field.transform, {**captures, "content": value})
        return [_filled(field.transform, {**captures, **each}) for each in value]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, TimeoutError) as error:
        raise NotReadable(str(error)) from None


def _text(written: str, options: Mapping[str, Any]) -> str:
    return written.strip() if options.get("strip", True) else written


def _json(written: str, options: Mapping[str, Any]) -> Any:
    """JSON, also with other signs around texts (`string_delims`) or without quotes around keys (`unquoted_keys`)."""
    delimiters = options.get("string_delims", ())
    if delimiters and (_OPEN in written or _CLOSE in written):
        raise ValueError("a sign that marks texts")
    texts: list[str] = []

    def take_out(found: regex.Match[str]) -> str:
        texts.append(found[1])
        return f"{_OPEN}{len(texts) - 1}{_CLOSE}"

    plain = written
    for begin, end in delimiters:
        pattern = f"{regex.escape(begin)}(.*?){regex.escape(end)}"
        plain = regex.sub(pattern, take_out, plain, flags=regex.DOTALL, timeout=_SEARCH_SECONDS)
    if options.get("unquoted_keys"):
        plain = regex.sub(r"(?<=[{,])(\w+):", r'"\1":', plain)
    for number, text in enumerate(texts):
        plain = plain.replace(f"{_OPEN}{number}{_CLOSE}", json.dumps(text))
    try:
        return json.loads(plain)
    except ValueError:
        if options.get("allow_non_json"):
            return _text(written, options)
        raise


def _tags(written: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values that `tag_pattern` finds."""
    values: dict[str, Any] = {}
    for found in regex.finditer(options["tag_pattern"], written, flags=regex.DOTALL, timeout=_SEARCH_SECONDS):
        groups = found.groupdict()
        key, value = groups["key"], _inner(groups.get("value") or "", options)
        if key in values and options.get("merge_duplicates"):
            kept = values[key]
            values[key] = [*(kept if isinstance(kept, list) else [kept]), value]
        else:
            values[key] = value
    return values


def _lines(written: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values, one pair in each line."""
    values = {}
    for line in written.split(options.get("line_sep", "\n")):
        key, separator, value = _text(line, options).partition(options.get("kv_sep", ":"))
        if separator:
            values[_text(key, options)] = _inner(_text(value, options), options)
    return values


def _inner(written: str, options: Mapping[str, Any]) -> Any:
    inner = options.get("value_parser")
    return written if inner is None else _FORMS[inner.get("name", "text")](written, inner.get("args", {}))


_FORMS: Mapping[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "int": lambda written, options: int(_text(written, options)),
    "float": lambda written, options: float(_text(written, options)),
    "bool": lambda written, options: _text(written, options).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
}


def _filled(transform: Any, values: Mapping[str, Any]) -> Any:
    """The transform with each `{name.key}` replaced by its value. Raises KeyError, TypeError."""
    if isinstance(transform, dict):
        return {key: _filled(each, values) for key, each in transform.items()}
    if isinstance(transform, list):
        return [_filled(each, values) for each in transform]
    if not isinstance(transform, str) or not (found := _PLACEHOLDER.fullmatch(transform)):
        return transform
    value: Any = values
    for key in found[1].split("."):
        value = value[key]
    return value
