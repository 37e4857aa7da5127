"""The grammar of an answer that a client has constrained: by a JSON schema, a regular expression, a grammar, or demanded calls.

Calls have the form of the model's chat template, as `answer_reader` reads them. A model that reasons may do so first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coordinator.serve.text.answer_reader import REASONING, TOOL_MARKS, AnswerForm
from coordinator.serve.text.closed_schemas import closed
from hearth.errors import BadGrammar
from hearth.grammars import MAX_GRAMMAR_CHARACTERS, Grammars
from hearth.wire.messages import Generate

# Of JSON schemas. Endless white space would be valid JSON, and `oneOf` is only supported if any of its schemas may match.
_SCHEMA_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,32}", "coerce_one_of": True}
_MAX_TRIED = 200  # parts of a schema that are compiled to find the one at fault
_PARTS = ("items", "additionalProperties", "contains", "propertyNames", "not")  # keywords that hold one schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # those that hold several
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # those that hold them by name


class AnswerGrammars:
    """Makes the grammars of one model's answers. `special` are its special tokens, by their text."""

    def __init__(self, grammars: Grammars, form: AnswerForm, special: Mapping[str, int]) -> None:
        self._grammars = grammars
        self._form = form
        self._special = special

    def grammar(self, request: Generate, begins_with_reasoning: bool) -> str:
        """The grammar of the answer; empty: it is free. `begins_with_reasoning`: the prompt ends inside of it.

        Raises BadGrammar.
        """
        what: str = "tools"
        rules, starts = [], []
        if request.called_tools:
            rules, starts = self._calls(request), ["calls"]
        elif (constraint := request.constraint) is not None:
            what = constraint.kind
            starts.append("answer")
            if constraint.kind == "grammar":
                return self._checked(constraint.text, "grammar")
            if constraint.kind == "regex":
                pattern = re.sub(r"(?s)(\\.)|/", lambda found: found[1] or r"\/", constraint.text)  # escaped once
                rules.append(f"answer: /{pattern}/")
            else:
                rules.append(f"answer: {_json(_schema(constraint.text))}")
            if request.tools:
                rules += self._calls(request)
                starts.append("calls")
        if not starts:
            return ""
        text = "\n".join([f"start: {self._reasoning(begins_with_reasoning)}({' | '.join(starts)})", *rules])
        if self._form.reasons:
            text += (
                f"\nreasoning: /(?s:.*)/ {self._mark(REASONING[1])} /\\n*/"
                if REASONING[1] in self._special
                else (f"\nreasoning: hidden /\\n*/\nhidden[suffix={json.dumps(REASONING[1])}]: /(?s:.*)/")
            )
        return self._checked(text, what, request)

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _reasoning(self, begins_with_reasoning: bool) -> str:
        if not self._form.reasons:
            return ""
        return "reasoning " if begins_with_reasoning else f"({self._mark(REASONING[0])} reasoning)? "

    def _calls(self, request: Generate) -> list[str]:
        """Rules of calls of the demanded tools, or of any; several only if the client takes several."""
        form = self._form.tools
        assert form is not None  # checked before
        begin, end = TOOL_MARKS[form]
        functions = _functions(request.tools)
        if request.called_tools:
            functions = [function for function in functions if function.name in request.called_tools]
        if not functions:
            raise BadGrammar(what="tool choice", reason=f"no tool has the name {', '.join(request.called_tools)}")
        rules = []
        for number, function in enumerate(functions):
            name = json.dumps(function.name)
            parameters = _json(function.parameters)
            if form == "mistral" and self._form.names_first:
                rules.append(f"call{number}: {json.dumps(function.name + '[ARGS]')} {parameters}")
                continue
            key = "parameters" if form == "llama" else "arguments"
            head = json.dumps(f'{{"name": {name}, "{key}": ')
            rules.append(f'call{number}: {head} {parameters} "}}"')
        call = "call: " + " | ".join(f"call{number}" for number in range(len(functions)))
        several = "*" if request.parallel_calls else ""
        mark = self._mark(begin)
        if form == "hermes":
            assert end is not None
            one = f'{mark} "\\n" call "\\n" {self._mark(end)}'
            calls = f'calls: {one} ("\\n" {one}){several}' if several else f"calls: {one}"
        elif form == "mistral" and self._form.names_first:
            calls = f"calls: ({mark} call)" + ("+" if several else "")
        elif form == "mistral":
            calls = f'calls: {mark} "[" call (", " call)* "]"' if several else f'calls: {mark} "[" call "]"'
        else:
            calls = 'calls: call ("; " call)*' if several else "calls: call"
        return [calls, call, *rules]

    def _mark(self, text: str) -> str:
        """A mark as a term of the grammar: a special token, or its text."""
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text)

    # ---- errors ---------------------------------------------------------------------------------------------------

    def _checked(self, grammar: str, what: str, request: Generate | None = None) -> str:
        """The grammar, which compiles. Raises BadGrammar that names the part at fault."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise BadGrammar(what=what, reason=f"it has more than {MAX_GRAMMAR_CHARACTERS} characters")
        try:
            self._grammars.constraint(grammar)
        except BadGrammar as error:
            if request is None or what == "regex":
                raise BadGrammar(what=what, reason=error.reason) from None
            raise self._located(what, request, error) from None
        return grammar

    def _located(self, what: str, request: Generate, error: BadGrammar) -> BadGrammar:
        """The error of the smallest part of a schema that cannot be compiled alone either."""
        schemas = [(f"tool {each.name}", each.parameters) for each in _functions(request.tools)]
        if request.constraint is not None and what == "schema":
            schemas.insert(0, ("schema", _schema(request.constraint.text)))
        tried = 0
        for name, root in schemas:
            place, schema, reason = "", root, self._reason(root, root)
            tried += 1
            found = reason is not None
            while found and tried < _MAX_TRIED:
                found = False
                for step, part in _parts(schema):
                    tried += 1
                    if (inner := self._reason(part, root)) is not None:
                        place, schema, reason, found = f"{place}/{step}", part, inner, True
                        break
                    if tried >= _MAX_TRIED:
                        break
            if reason is not None:
                where = f" at {place}" if place else ""
                return BadGrammar(what=f"{name}{where}", reason=reason)
        return BadGrammar(what=what, reason=error.reason)

    def _reason(self, schema: Any, root: Mapping[str, Any]) -> str | None:
        """Why a part of a schema cannot be compiled; None: it can."""
        if isinstance(schema, dict):
            schema = {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}
        try:
            self._grammars.constraint(f"start: {_json(schema)}")
        except BadGrammar as error:
            return error.reason.split("\n")[0].rpartition("failed to compile JSON schema: ")[2]
        return None


class _Function(NamedTuple):
    name: str
    parameters: Any  # its JSON schema


def _functions(tools: Sequence[str]) -> list[_Function]:
    functions = []
    for number, text in enumerate(tools):
        try:
            tool = json.loads(text)
            function = tool.get("function", tool)
            parameters = function.get("parameters") or {"type": "object"}
            functions.append(_Function(str(function["name"]), parameters))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise BadGrammar(what=f"tool {number}", reason="it is no JSON object with a name and parameters") from None
    return functions


def _schema(text: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(what="schema", reason=f"it is not valid JSON ({error})") from None
    if not isinstance(schema, dict | bool):
        raise BadGrammar(what="schema", reason="it must be a JSON object")
    return schema


def _json(schema: Any) -> str:
    """A JSON schema as a term of the grammar. Its objects have no properties that it does not name."""
    if isinstance(schema, dict):
        schema = {**closed(schema), "x-guidance": _SCHEMA_OPTIONS}
    return f"%json {json.dumps(schema)}"


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, with their places."""
    if not isinstance(schema, dict):
        return
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{name}", part) for name, part in schema[key].items())
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{number}", part) for number, part in enumerate(schema[key]))
    for key in _PARTS:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
