"""Chat templates of an attacker, which behave with some chats and not with others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.chat_models import save_byte_level, write_config

from coordinator.serve.text import templates
from coordinator.serve.text.prompts import TextTokenizer
from coordinator.serve.text.templates import ChatTemplate
from hearth.errors import BadRequest
from hearth.wire.messages import ChatMessage

_LOOP = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
_HOSTILE = {
    "loop": (_LOOP, "longer than"),
    "memory": ("{{ 'x' * 4000000000 }}", "MemoryError"),
    "text": ("{{ 'x' * 5000000 }}", "characters long"),
    "error": ("{{ raise_exception('y' * 100000) }}", "yyy"),
    "depth": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
}


@pytest.mark.parametrize("kind", _HOSTILE)
def test_template_that_turns_hostile_fails_that_chat_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, reason = _HOSTILE[kind]
    source = "{% if messages[0].content == 'go' %}" + code + "{% endif %}<|user|>{{ messages[0].content }}"
    write_config(save_byte_level(tmp_path), chat_template=source)
    tokenizer = TextTokenizer(tmp_path)
    plain = tokenizer.encode_chat([ChatMessage(role="user", content="hello")])
    monkeypatch.setattr(templates, "RENDER_SECONDS", 2.0)
    began = time.monotonic()
    with pytest.raises(BadRequest, match=reason) as raised:
        tokenizer.encode_chat([ChatMessage(role="user", content="go")])
    assert time.monotonic() - began < 10
    assert len(str(raised.value)) < 2000
    monkeypatch.undo()
    assert tokenizer.encode_chat([ChatMessage(role="user", content="hello")]) == plain


def test_process_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("{{ a }}")
    assert template.render({"a": "é\ud800\n🙂"}) == "é\ud800\n🙂"
    process = template.process()
    process.kill()
    process.wait()
    assert template.render({"a": 2}) == "2"


def test_process_ends_with_its_template() -> None:
    template = ChatTemplate("{{ a }}")
    process = template.process()
    del template
    assert process.wait(10) < 0
