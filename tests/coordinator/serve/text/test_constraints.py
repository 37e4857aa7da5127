"""Grammars of demanded calls and of schemas: random answers that follow them are read as such calls and values."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")
from support.vocabularies import allowed_ids, byte_level_vocabulary, random_answer

from coordinator.serve.text.answer_reader import AnswerForm, AnswerReader, Piece, ToolForm, joined
from coordinator.serve.text.closed_schemas import closed
from coordinator.serve.text.constraints import AnswerGrammars
from coordinator.serve.text.prompts import TextTokenizer
from hearth.errors import BadGrammar
from hearth.grammars import Grammars, Vocabulary
from hearth.wire.messages import AnswerConstraint, Generate

LIGHT = {
    "type": "object", "additionalProperties": False, "required": ["room", "on"],
    "properties": {"room": {"$ref": "#/$defs/room"}, "on": {"type": "boolean"}},
    "$defs": {"room": {"anyOf": [{"enum": ["kitchen", "bath \"2\""]}, {"type": "null"}]}},
}  # fmt: skip
TOOLS = tuple(
    json.dumps({"type": "function", "function": function})
    for function in ({"name": "light", "parameters": LIGHT}, {"name": "time"})
)
FORMS = [
    AnswerForm("hermes"), AnswerForm("hermes", reasons=True), AnswerForm("mistral"),
    AnswerForm("mistral", names_first=True), AnswerForm("llama", reasons=True), AnswerForm("llama"),
]  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, Vocabulary]:
    return byte_level_vocabulary(tmp_path_factory.mktemp("tokenizer"))


def answers(
    known: tuple[TextTokenizer, Vocabulary], form: AnswerForm, request: Generate, count: int = 12
) -> list[Piece]:
    """Random answers that follow the request's grammar, taken apart."""
    tokenizer, vocabulary = known
    grammars = Grammars(vocabulary)
    grammar = AnswerGrammars(grammars, form, {}).grammar(request, False)
    pieces = []
    for seed in range(count):
        tokens = random_answer(grammars.constraint(grammar), vocabulary, seed, 600)
        if tokens is not None:  # endless ones are cut
            reader = AnswerReader(form, bool(request.tools), False, "request")
            pieces.append(joined([reader.push(tokenizer.decode(tokens)), reader.flush()]))
    assert pieces
    return pieces


def follows_light(arguments: Any) -> bool:
    return list(arguments) == ["room", "on"] and arguments["room"] in ("kitchen", 'bath "2"', None)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("parallel", [True, False])
def test_demanded_call_is_read_as_one(
    form: AnswerForm, parallel: bool, known: tuple[TextTokenizer, Vocabulary]
) -> None:
    request = Generate(tools=TOOLS, called_tools=("light",), parallel_calls=parallel)
    for piece in answers(known, form, request):
        assert not piece.text
        assert parallel or len(piece.tool_calls) == 1
        assert {call.name for call in piece.tool_calls} == {"light"}
        assert all(follows_light(json.loads(call.arguments)) for call in piece.tool_calls)


def test_any_tool_may_be_demanded(known: tuple[TextTokenizer, Vocabulary]) -> None:
    request = Generate(tools=TOOLS, called_tools=("light", "time"), parallel_calls=False)
    pieces = answers(known, AnswerForm("llama"), request, 30)
    assert {call.name for piece in pieces for call in piece.tool_calls} == {"light", "time"}


@pytest.mark.parametrize(("inside", "begin"), [(True, "If { so"), (False, "<think>If"), (False, "")])
@pytest.mark.parametrize("is_special", [True, False])
def test_schema_applies_after_the_reasoning(
    inside: bool, begin: str, is_special: bool, known: tuple[TextTokenizer, Vocabulary]
) -> None:
    tokenizer, vocabulary = known
    grammars, value = Grammars(vocabulary), '{"room": null, "on": true}'
    mark = tokenizer.encode("<|user|>")[1:] if is_special else tokenizer.encode("</think>")[1:]
    special = {"</think>": mark[0]} if is_special else {}
    request = Generate(constraint=AnswerConstraint(kind="schema", text=json.dumps(LIGHT)))
    grammar = AnswerGrammars(grammars, AnswerForm(reasons=True), special).grammar(request, inside)
    answer = [
        *tokenizer.encode(begin)[1:],
        *(mark if begin else []),
        *tokenizer.encode(f"\n\n{value}" if begin else value)[1:],
    ]
    constraint = grammars.constraint(grammar)
    ends = [
        set(vocabulary.stop_ids) <= set(allowed_ids(constraint.mask(answer[:n]) or b"")) for n in range(len(answer) + 1)
    ]
    assert ends == [False] * len(answer) + [True]
    assert constraint.mask([*answer[:-1], *mark]) is None


def test_schema_and_tools_leave_the_choice(known: tuple[TextTokenizer, Vocabulary]) -> None:
    constraint = AnswerConstraint(kind="schema", text='{"enum": [1, 2]}')
    pieces = answers(
        known, AnswerForm("hermes"), Generate(tools=TOOLS, constraint=constraint, parallel_calls=False), 30
    )
    assert {bool(piece.tool_calls) for piece in pieces} == {True, False}
    assert all(piece.tool_calls or piece.text.strip() in "12" for piece in pieces)


@pytest.mark.parametrize("slash", ["/", r"\/"])
def test_regular_expression_is_the_whole_answer(known: tuple[TextTokenizer, Vocabulary], slash: str) -> None:
    request = Generate(constraint=AnswerConstraint(kind="regex", text=f"[ab]{slash}[0-9]{{2}}"))
    assert all(
        piece.text[0] in "ab" and piece.text[1] == "/" and piece.text[2:].isdigit() and len(piece.text) == 4
        for piece in answers(known, AnswerForm(), request)
    )


BAD_PART = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"items": {"type": "nothing"}}}}


@pytest.mark.parametrize(
    ("request_", "what", "reason"),
    [
        (Generate(constraint=AnswerConstraint(kind="schema", text=json.dumps(BAD_PART))),
         "schema at /properties/b/items", "Invalid type: nothing"),
        (Generate(constraint=AnswerConstraint(kind="schema", text='{"$ref": "#/$defs/no"}')), "schema", "does not exist"),
        (Generate(constraint=AnswerConstraint(kind="schema", text="{")), "schema", "not valid JSON"),
        (Generate(constraint=AnswerConstraint(kind="schema", text="3")), "schema", "JSON object"),
        (Generate(constraint=AnswerConstraint(kind="regex", text="(")), "regex", "unclosed group"),
        (Generate(constraint=AnswerConstraint(kind="grammar", text="start: x")), "grammar", "unknown name"),
        (Generate(tools=(json.dumps({"name": "f", "parameters": BAD_PART}),), called_tools=("f",)),
         "tool f at /properties/b/items", "Invalid type"),
        (Generate(tools=("3",), called_tools=("f",)), "tool 0", "name and parameters"),
        (Generate(tools=TOOLS, called_tools=("no",)), "tool choice", "no tool has the name no"),
    ],
)  # fmt: skip
def test_errors_name_what_and_where(
    request_: Generate, what: str, reason: str, known: tuple[TextTokenizer, Vocabulary]
) -> None:
    with pytest.raises(BadGrammar) as error:
        AnswerGrammars(Grammars(known[1]), AnswerForm("hermes"), {}).grammar(request_, False)
    assert error.value.what == what
    assert reason in error.value.reason


def test_special_tokens_stand_for_marks(known: tuple[TextTokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = known
    user = tokenizer.encode("<|user|>")[-1]
    grammars = Grammars(vocabulary)
    marks: dict[str, int] = {"<tool_call>": user}
    request = Generate(tools=TOOLS, called_tools=("light",), parallel_calls=False)
    form: ToolForm = "hermes"
    grammar = AnswerGrammars(grammars, AnswerForm(form), marks).grammar(request, False)
    tokens = random_answer(grammars.constraint(grammar), vocabulary, 1)
    assert tokens[0] == user


LAMP = {"properties": {"on": {"type": "boolean"}}, "required": ["on"], "type": "object"}
NO_OTHERS = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (LAMP, {**LAMP, **NO_OTHERS}),
        ({"type": "array", "items": LAMP}, {"type": "array", "items": {**LAMP, **NO_OTHERS}}),
        ({"anyOf": [LAMP, {"type": "null"}]}, {"anyOf": [{**LAMP, **NO_OTHERS}, {"type": "null"}]}),
        (
            {"properties": {"lamp": {"$ref": "#/$defs/lamp"}}, "$defs": {"lamp": LAMP}},
            {"properties": {"lamp": {"$ref": "#/$defs/lamp"}}, "$defs": {"lamp": {**LAMP, **NO_OTHERS}}, **NO_OTHERS},
        ),
        *(
            (schema, schema)
            for schema in (
                {"type": "object"}, True, {**LAMP, "additionalProperties": {"type": "integer"}},
                {**LAMP, "required": ["on", "name"]}, {**LAMP, "minProperties": 2}, {**LAMP, "anyOf": [LAMP, LAMP]},
                {"allOf": [LAMP, {"properties": {"name": {}}}]}, {"$ref": "#/$defs/a", "properties": {}, "$defs": {"a": LAMP}},
            )
        ),
    ],
)  # fmt: skip
def test_objects_are_closed_unless_they_may_have_other_properties(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


def test_answers_invent_no_properties(known: tuple[TextTokenizer, Vocabulary]) -> None:
    """Random answers to an open schema went on until they were cut."""
    request = Generate(constraint=AnswerConstraint(kind="schema", text=json.dumps(LAMP)))
    pieces = answers(known, AnswerForm(), request)
    assert len(pieces) == 12
    assert all(list(json.loads(piece.text)) == ["on"] for piece in pieces)
