"""Takes a chat answer apart while it is generated: text, reasoning, and calls of tools. Pure.

Models write calls in the form of their chat template. Known are those of Hermes and Qwen, of Mistral, and of Llama 3. What
begins as a call and is broken, or cut off by the end of the answer, comes back as text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from hearth.wire.messages import ToolCall

ToolForm: TypeAlias = Literal["hermes", "mistral", "llama"]

# Texts around a call; without an end, the call lasts to the end of the answer.
TOOL_MARKS: dict[ToolForm, tuple[str, str | None]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", None),
    "llama": ("<|python_tag|>", None),
}
REASONING = ("<think>", "</think>")
_ID_CHARACTERS = 9  # of the id of a call: what Mistral's templates demand, and enough for one chat


class Piece(NamedTuple):
    """What new text of an answer adds."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class AnswerForm(NamedTuple):
    """How the answers of a model are written, as its chat template shows."""

    tools: ToolForm | None = None
    reasons: bool = False
    names_first: bool = False  # a call is its name, a mark and its arguments, as in newer templates of Mistral

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that mark parts. They may be special tokens, which a reader needs to see."""
        marks = (*TOOL_MARKS[self.tools],) if self.tools is not None else ()
        return tuple(mark for mark in (*marks, *(REASONING if self.reasons else ())) if mark is not None)


def answer_form(template: str | None) -> AnswerForm:
    """The form of the answers of a model with this chat template."""
    template = template or ""
    tools: ToolForm | None = next((form for form, (begin, _) in TOOL_MARKS.items() if begin in template), None)
    if tools is None and "ipython" in template:  # Llama 3.2 writes calls without a mark
        tools = "llama"
    return AnswerForm(tools, REASONING[1] in template, "[ARGS]" in template)


class CallIds:
    """Numbers the calls of one answer. The same answer, by its `name`, has the same ids."""

    def __init__(self, name: str) -> None:
        self.count = 0
        self._name = name

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolCall:
        """The next call of the answer."""
        digest = hashlib.sha256(f"{self._name} {self.count}".encode()).hexdigest()
        self.count += 1
        return ToolCall(id=digest[:_ID_CHARACTERS], name=name, arguments=json.dumps(arguments))


class AnswerReader:
    """Reads one answer. Spaces around calls and after the reasoning belong to no part."""

    def __init__(self, form: AnswerForm, has_tools: bool, begins_with_reasoning: bool, name: str) -> None:
        """`name` makes the ids of calls: the same answer has the same ones.

        `begins_with_reasoning`: the prompt ends inside of it.
        """
        self._tools = form.tools if has_tools else None
        self._reasons = form.reasons
        self._state: Literal["text", "reasoning", "call"] = "reasoning" if begins_with_reasoning else "text"
        self._ids = CallIds(name)
        self._rest = ""  # text that was not read yet
        self._spaces = ""  # at the end of the text so far; released before more text
        self._has_text = self._has_reasoned = False

    def push(self, text: str) -> Piece:
        """What this text adds for certain."""
        self._rest += text
        pieces = []
        while (piece := self._step()) is not None:
            pieces.append(piece)
        return joined(pieces)

    def flush(self, is_cut: bool = False) -> Piece:
        """What was held back; call it at the end of the answer. A call that was cut off shows it by itself."""
        pieces = [self.push("")]
        rest, self._rest = self._rest, ""
        if self._state == "reasoning":
            pieces.append(Piece(reasoning=rest))
        elif self._state == "call":
            pieces.append(self._calls(rest, ended=self._tools != "hermes"))
        elif rest:
            pieces.append(self._text(rest))
        if not self._ids.count:
            pieces.append(Piece(text=self._spaces))
        self._spaces = ""
        return joined(pieces)

    # ---- one part after the other ---------------------------------------------------------------------------------

    def _step(self) -> Piece | None:
        """Read up to the next mark; None if nothing more is certain."""
        if not self._rest:
            return None
        if self._state == "reasoning":
            return self._read_reasoning()
        if self._state == "call":
            return self._read_call()
        return self._read_text()

    def _read_reasoning(self) -> Piece | None:
        end = REASONING[1]
        before, found, after = self._rest.partition(end)
        if found:
            self._state, self._rest, self._has_reasoned = "text", after, True
            return Piece(reasoning=before)
        certain = self._certain([end])
        return Piece(reasoning=certain) if certain else None

    def _read_call(self) -> Piece | None:
        end = TOOL_MARKS[self._tools][1] if self._tools is not None else None
        if end is None or end not in self._rest:
            return None
        call, _, self._rest = self._rest.partition(end)
        self._state = "text"
        return self._calls(call, ended=True)

    def _read_text(self) -> Piece | None:
        if self._tools == "llama" and not self._has_text and self._rest.lstrip().startswith("{"):
            self._state = "call"  # the whole answer is a call, or several
            return Piece()
        begins = [TOOL_MARKS[self._tools][0]] if self._tools is not None else []
        start, first = self._rest.lstrip(), REASONING[0]
        if self._reasons and not self._has_text and (start.startswith(first) or first.startswith(start)):
            begins.append(first)  # reasoning comes first, if at all
        places = sorted((place, mark) for mark in begins if (place := self._rest.find(mark)) >= 0)
        if places:
            place, mark = places[0]
            before, self._rest = self._rest[:place], self._rest[place + len(mark) :]
            self._state = "reasoning" if mark == REASONING[0] else "call"
            return self._text(before)
        certain = self._certain(begins)
        return self._text(certain) if certain else None

    def _text(self, text: str) -> Piece:
        text = self._spaces + text
        if self._has_reasoned and not self._has_text:
            text = text.lstrip()
        shown = text.rstrip()
        self._spaces = text[len(shown) :]
        self._has_text = self._has_text or bool(shown)
        return Piece(text=shown)

    def _certain(self, marks: Sequence[str]) -> str:
        """Take the text that cannot be the beginning of a mark."""
        cut = len(self._rest) - num_uncertain(self._rest, marks)
        certain, self._rest = self._rest[:cut], self._rest[cut:]
        return certain

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _calls(self, written: str, ended: bool) -> Piece:
        """The calls of a text, or the text itself with its marks if it holds something else."""
        assert self._tools is not None
        calls = read_calls(_values(self._tools, written)) if ended else None
        if calls is None:
            begin, end = TOOL_MARKS[self._tools]
            if self._tools == "llama" and written.lstrip().startswith("{"):
                begin = ""
            return self._text(begin + written + (end or "" if ended else ""))
        self._spaces = ""
        return Piece(tool_calls=tuple(self._ids.call(name, arguments) for name, arguments in calls))


def num_uncertain(text: str, marks: Sequence[str]) -> int:
    """Number of characters at the end of `text`, which holds no mark, that may begin one of the marks."""
    for size in range(min(max(map(len, marks), default=0) - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def joined(pieces: Iterable[Piece]) -> Piece:
    """What all of these add."""
    pieces = list(pieces)
    return Piece(
        "".join(piece.text for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
    )


def read_calls(values: Iterable[Any]) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and arguments of the calls that these JSON values are; None if there are none, or one cannot be read."""
    try:
        calls = [(value["name"], value.get("arguments", value.get("parameters", {}))) for value in values]
        calls = [(name, json.loads(given) if isinstance(given, str) else given) for name, given in calls]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not calls or not all(
        isinstance(name, str) and 0 < len(name) <= 256 and isinstance(given, dict) for name, given in calls
    ):
        return None
    return calls


def _values(form: ToolForm, written: str) -> Iterator[Any]:
    """The JSON values of a text that should be calls. Raises ValueError, RecursionError."""
    if form == "mistral" and "[ARGS]" in written:  # name[ARGS]{...}, for each call after its own mark
        for part in written.split("[TOOL_CALLS]"):
            name, _, given = part.partition("[ARGS]")
            yield {"name": name.strip(), "arguments": json.loads(given)}
    elif form == "llama":  # objects one after the other, with or without a semicolon between
        rest = written.strip()
        while rest:
            value, end = json.JSONDecoder().raw_decode(rest)
            yield value
            rest = rest[end:].lstrip("; \n\t")
    else:
        value = json.loads(written)
        yield from value if isinstance(value, list) else [value]
