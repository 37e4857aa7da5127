"""Answers of chats taken apart, however the stream is split."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.serve.text.answer_reader import AnswerForm, AnswerReader, Piece, ToolForm, answer_form, joined

LIGHT = '{"name": "turn_on", "arguments": {"name": "kitchen", "level": 7}}'
LLAMA = LIGHT.replace("arguments", "parameters")
BROKEN = '<tool_call>{"name": "turn_on", "argum</tool_call>'
NAMELESS = '<tool_call>{"name": 5, "arguments": {}}</tool_call>'
PARTS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", " ", "a", LIGHT, "[TOOL_CALLS]"]
CALL = ("turn_on", {"name": "kitchen", "level": 7})


def read(parts: Iterable[str], form: ToolForm | None, inside: bool = False, has_tools: bool = True) -> Piece:
    reader = AnswerReader(AnswerForm(form, reasons=True), has_tools, inside, "request")
    return joined([*(reader.push(part) for part in parts), reader.flush()])


@pytest.mark.parametrize(
    ("form", "written", "text", "reasoning", "calls"),
    [
        ("hermes", f"Yes. <tool_call>\n{LIGHT}\n</tool_call>", "Yes.", "", [CALL]),
        ("hermes", f"<tool_call>{LIGHT}</tool_call>\n<tool_call>{LIGHT}</tool_call> Done", " Done", "", [CALL, CALL]),
        ("hermes", f"<think>Which?</think>\n\n<tool_call>{LIGHT}</tool_call>", "", "Which?", [CALL]),
        ("hermes", "<think>Which?</think>\n\nNone. ", "None. ", "Which?", []),
        ("hermes", BROKEN, BROKEN, "", []),
        ("hermes", f"<tool_call>{LIGHT}", f"<tool_call>{LIGHT}", "", []),
        ("hermes", NAMELESS, NAMELESS, "", []),
        ("hermes", "a < b <tool", "a < b <tool", "", []),
        ("mistral", f"[TOOL_CALLS][{LIGHT}, {LIGHT}]", "", "", [CALL, CALL]),
        ("mistral", '[TOOL_CALLS]turn_on[ARGS]{"name": "kitchen", "level": 7}', "", "", [CALL]),
        ("mistral", "[TOOL_CALLS] [", "[TOOL_CALLS] [", "", []),
        ("llama", f"\n{LLAMA}; {LLAMA}", "", "", [CALL, CALL]),
        ("llama", f"<|python_tag|>{LLAMA}", "", "", [CALL]),
        ("llama", '{"name": "x"', '{"name": "x"', "", []),
        ("llama", "No { call }", "No { call }", "", []),
        (None, "<tool_call>\n", "<tool_call>\n", "", []),
    ],
)  # fmt: skip
@given(data=st.data())
def test_parts_are_found_however_the_text_is_split(
    form: ToolForm | None, written: str, text: str, reasoning: str, calls: list[object], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6)))
    piece = read([written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)], form)
    assert (piece.text, piece.reasoning) == (text, reasoning)
    assert [(call.name, json.loads(call.arguments)) for call in piece.tool_calls] == calls
    assert len({call.id for call in piece.tool_calls}) == len(calls)


@given(st.lists(st.sampled_from(PARTS)), st.sampled_from(["hermes", "mistral", "llama"]))
def test_nothing_raises_and_all_splits_agree(parts: list[str], form: ToolForm) -> None:
    assert read(parts, form) == read(["".join(parts)], form) == read(iter("".join(parts)), form)


def test_prompt_may_end_inside_the_reasoning_and_calls_need_tools() -> None:
    assert read(["Hm.</think>Yes"], "hermes", inside=True) == Piece("Yes", "Hm.")
    written = f"<tool_call>{LIGHT}</tool_call>"
    assert read([written], "hermes", has_tools=False).text == written


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}{{ '</think>' }}", AnswerForm("hermes", True)), ("[TOOL_CALLS]", AnswerForm("mistral")),
        ("<|start_header_id|>ipython", AnswerForm("llama")), ("{{ messages }}", AnswerForm()), (None, AnswerForm()),
    ],
)  # fmt: skip
def test_form_follows_the_template(template: str | None, form: AnswerForm) -> None:
    assert answer_form(template) == form
