"""Answers taken apart by a model's `response_template`, compared with `transformers`' own reader."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_models import TEMPLATE, save_byte_level, write_config

from coordinator.serve.text.answer_reader import Piece, joined
from coordinator.serve.text.prompts import TextTokenizer
from coordinator.serve.text.response_template import read_response_template
from coordinator.serve.text.template_reader import TemplateReader

# The first three are those that transformers uses for models without one: JSON, tags, and JSON with other signs.
QWEN3: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}  # fmt: skip
QWEN35 = {
    **QWEN3,
    "fields": {
        **QWEN3["fields"],
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>", "repeats": True,
            "close_pattern": r"</function>\s*</tool_call>", "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True, "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
    },
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "start_anchor": "[/INST]",
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]", "content": "json", "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}  # fmt: skip
LINES: dict[str, Any] = {
    "start_anchor_pattern": r"<\|a\|>\s*",
    "fields": {
        "thinking": {"open": ["(", "(("], "close": ")", "repeats": True, "join": "; "},
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+):", "close_pattern": r"END\b", "content": "kv-lines", "repeats": True,
            "content_args": {"kv_sep": "=", "value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "turn_on",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string"}, "level": {"type": "integer"}, "warm": {"type": "boolean", "nullable": True},
                "share": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "rooms": {"type": "array"},
            },
        },
    },
}  # fmt: skip
TOOLS = [json.dumps(TOOL)]
ARGUMENTS = {"name": "kitchen", "level": 7}
JSON_CALL = json.dumps({"name": "turn_on", "arguments": ARGUMENTS})
TAGS = (
    "<tool_call>\n<function=turn_on>\n<parameter=name>\n7\n</parameter>\n<parameter=level>\n7.0\n</parameter>\n"
    "<parameter=share>0.5</parameter>\n<parameter=warm>False</parameter>\n<parameter=rooms>[1, 2]</parameter>\n"
    "</function>\n</tool_call>"
)
GEMMA_CALL = '<|tool_call>call:turn_on{name:<|"|>a: "b", {c:<|"|>,level:7}<tool_call|>'


def read(parts: list[str], template: Any, prompt: str = "", tools: list[str] = TOOLS, is_cut: bool = False) -> Piece:
    reader = TemplateReader(read_response_template(template), prompt, tools, "request")
    return joined([*(reader.push(part) for part in parts), reader.flush(is_cut)])


def split(written: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    return [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]


def calls_of(piece: Piece) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in piece.tool_calls]


@pytest.mark.parametrize(
    ("template", "prompt", "written"),
    [
        (QWEN3, "<|im_start|>assistant\n", "Hello. "),
        (QWEN3, "<|im_start|>assistant\n", f"<think>\nWhich?\n</think>\n\nThe light.\n<tool_call>\n{JSON_CALL}\n</tool_call>"),
        (QWEN3, "<|im_start|>assistant\n", f"<tool_call>{JSON_CALL}</tool_call>\n<tool_call>\n{JSON_CALL}\n</tool_call>\n"),
        (QWEN3, "<|im_start|>assistant\n<think>\n", f"Which? </thin </think>\n\n<tool_call>{JSON_CALL}</tool_call>"),
        (QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "a <tool_cal < b"),
        (QWEN35, "<|im_start|>assistant\n<think>\n", f"Which?\n</think>\n\nThe light.\n\n{TAGS}\n{TAGS}"),
        (QWEN35, "<|im_start|>assistant\n", "A \n <tool_call> \n<func"),
        (GEMMA4, "<|turn>model\n", f"<|channel>thought\nWhich?<channel|>{GEMMA_CALL}"),
        (GEMMA4, "x<|turn>model\n", "Done.<turn|>"),
        (MISTRAL, "[INST]x[/INST]", f"[TOOL_CALLS][{JSON_CALL}, {JSON_CALL}]"),
        (MISTRAL, "[INST]x[/INST]", "It is [TOOL_CALL] not."),
        (LINES, "<|a|>  ", "(one)((two) Yes CALL turn_on:\nname=kitchen\nlevel = 7\nrooms=[1]\nno pair\nEND"),
        (LINES, "<|a|>", "CALL turn_on:END"),
    ],
)  # fmt: skip
@given(data=st.data())
def test_answer_is_read_as_by_transformers_however_it_is_split(
    template: dict[str, Any], prompt: str, written: str, data: st.DataObject
) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    expected = parsing.parse_response(written, template, prefix=prompt, tools=[TOOL])
    piece = read(split(written, data), template, prompt)
    reasoning = next((expected[name] for name in ("reasoning_content", "thinking") if name in expected), "")
    assert (piece.text, piece.reasoning) == (expected.get("content", ""), reasoning)
    functions = [call["function"] for call in expected.get("tool_calls", [])]
    assert calls_of(piece) == [(each["name"], each["arguments"]) for each in functions]


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (QWEN3, ["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", " ", "\n", "a", JSON_CALL, "<|im_end|>"]),
        (QWEN35, ["<tool_call>", "<function=turn_on>", "<parameter=level>", "7", "</parameter>", "</function>", "\n", TAGS]),
        (GEMMA4, ["<|tool_call>call:turn_on", "{level:7}", "<tool_call|>", '<|"|>', "<|channel>thought\n", "<channel|>", "a"]),
        (MISTRAL, ["[TOOL_CALLS]", f"[{JSON_CALL}]", "[", "a", " "]),
        (LINES, ["(", "((", ")", "CALL turn_on:", "level=1", "\n", "END", "a"]),
    ],
)  # fmt: skip
@given(data=st.data(), is_cut=st.booleans())
def test_nothing_raises_and_all_splits_agree(
    template: dict[str, Any], parts: list[str], data: st.DataObject, is_cut: bool
) -> None:
    written = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    assert read(split(written, data), template, is_cut=is_cut) == read([written], template, is_cut=is_cut)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (QWEN3, '<tool_call>{"name": "turn_on", "argum</tool_call>'),
        (QWEN3, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        (QWEN3, '<tool_call>"turn_on"</tool_call>'),
        (QWEN3, f"<tool_call>{JSON_CALL}"),  # its end may have been cut
        (QWEN35, TAGS[:-60].rstrip()),  # an argument is missing
        (GEMMA4, "<|tool_call>call:turn_on{level:<tool_call|>"),
        (MISTRAL, f"[TOOL_CALLS]{JSON_CALL}"),
    ],
)
@given(data=st.data())
def test_broken_or_cut_call_comes_back_as_text(template: dict[str, Any], written: str, data: st.DataObject) -> None:
    piece = read(split(written, data), template, is_cut=True)
    assert (piece.text, piece.tool_calls) == (written, ())


def test_call_whose_end_is_the_end_of_the_answer_is_read() -> None:
    """The end mark may be an end-of-text token, which is no part of the text."""
    assert calls_of(read([f"<tool_call>{JSON_CALL}"], QWEN3)) == [("turn_on", ARGUMENTS)]


def test_text_between_and_after_calls_is_kept() -> None:
    """transformers keeps the last text only."""
    call = f"<tool_call>{JSON_CALL}</tool_call>"
    piece = read([f"First. {call} Then. {call}\nDone."], QWEN3)
    assert (piece.text, len(piece.tool_calls)) == ("First.\nThen.\nDone.", 2)


def test_text_is_shown_as_soon_as_it_can_be_no_mark() -> None:
    reader = TemplateReader(read_response_template(QWEN35), "", TOOLS, "request")
    shown = [reader.push(part).text for part in ("Hel", "lo ", "<", "b", " <tool_call>\n<fun", "ny>")]
    assert shown == ["Hel", "lo", "", " <b", "", " <tool_call>\n<funny>"]


def test_without_tools_calls_are_text() -> None:
    written = f"<tool_call>{JSON_CALL}</tool_call>"
    assert read([written], QWEN3, tools=[]) == Piece(text=written)


def test_pattern_that_takes_too_long_makes_the_answer_text() -> None:
    slow = {
        "start_anchor": "x",
        "fields": {"tool_calls": {"open_pattern": r"(a|aa)+$b", "content": "json"}, "content": {}},
    }
    began = time.monotonic()
    piece = read(["a" * 60, "b" * 3, "c"], slow)
    assert piece.text == "a" * 60 + "bbbc"
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "version"),
        ({"other": 1}, "other"),
        ({"fields": {}}, "fields"),
        ({"start_anchor": None}, "no beginning"),
        ({"start_anchor": ""}, "empty mark"),
        ({"fields": {"a": {}, "b": {}}}, "at most one field"),
        ({"fields": {"a": {"open": "x", "open_pattern": "y"}}}, "a text and a pattern"),
        ({"fields": {"a": {"open_pattern": "("}}}, "no regular expression"),
        ({"fields": {"a": {"open_pattern": "x*"}}}, "begins with nothing"),
        ({"fields": {"a": {"content": "pickle"}}}, "content"),
    ],
)
def test_template_that_cannot_be_used_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_response_template({**QWEN3, **change})


def test_tokenizer_reads_it_from_the_configuration_and_shows_the_marks(tmp_path: Path) -> None:
    """Special tokens that are marks reach the reader, others do not."""
    template = {
        "start_anchor": "<|assistant|>",
        "fields": {"reasoning_content": {"open_pattern": r"<\|user\|>", "close": "</s>"}, "content": {}},
    }
    save_byte_level(tmp_path)
    tokenizer = TextTokenizer(write_config(tmp_path, chat_template=TEMPLATE, response_template=template))
    ids = tokenizer.encode("<|user|>hello</s>w<|assistant|>")[1:]
    reader = tokenizer.reader(tokenizer.encode("<|assistant|>"), (), "request")
    piece = joined([reader.push(tokenizer.decode_with_marks(ids)), reader.flush(is_cut=False)])
    assert piece == Piece(text="w", reasoning="hello")
    assert not tokenizer.takes_tools


def test_template_that_cannot_be_used_leaves_the_forms_of_chat_templates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_byte_level(tmp_path)
    chat = f"{TEMPLATE}{{# <tool_call> #}}"
    tokenizer = TextTokenizer(write_config(tmp_path, chat_template=chat, response_template={"fields": []}))
    assert "response_template is not used" in caplog.text
    reader = tokenizer.reader([], TOOLS, "request")
    assert calls_of(reader.push(f"<tool_call>{JSON_CALL}</tool_call>")) == [("turn_on", ARGUMENTS)]
