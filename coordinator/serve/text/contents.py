"""Keeps the contents of a chat text: a special token that is written in one takes no part in the form of the prompt.

While the template is rendered, a placeholder stands for each such text. Afterwards, what lies between the template's own
special tokens and holds a placeholder is tokenised without special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A placeholder is this private character of Unicode, and one that stands for the hidden text. In contents it is hidden, too.
_HIDDEN = "\ue000"
_FIRST = ord(_HIDDEN) + 1
_PLACEHOLDER = re.compile(f"{_HIDDEN}(.)", re.DOTALL)


class ContentTokens:
    """Tokenises rendered chats. `control`: texts of tokens that only the template may write."""

    def __init__(self, tokenizer: Tokenizer, control: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = [_HIDDEN, *sorted(control, key=len, reverse=True)]  # longer ones first, as a tokenizer finds them
        self._first = {text[0] for text in self._texts}
        self._ids = {tokenizer.token_to_id(text) for text in self._texts[1:]}

    def hide(self, value: Any) -> Any:
        """A JSON value with placeholders in its texts, keys included."""
        if isinstance(value, str):
            for number, text in enumerate(() if self._first.isdisjoint(value) else self._texts):
                value = value.replace(text, _HIDDEN + chr(_FIRST + number))
            return value
        if isinstance(value, dict):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list) else value

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a template's output."""
        found = self._tokenizer.encode(rendered, add_special_tokens=False)
        if _HIDDEN not in rendered:
            return list(found.ids)
        ids: list[int] = []
        between: list[int] = []  # special tokens of the template
        start = 0
        for token_id, (begin, end) in zip(found.ids, found.offsets, strict=True):
            if token_id in self._ids:
                ids += [*self._as_text(rendered[start:begin], between), token_id]
                between, start = [], end
            else:
                between.append(token_id)
        return ids + self._as_text(rendered[start:], between)

    def _as_text(self, text: str, ids: list[int]) -> list[int]:
        """The tokens of a text without special tokens; `ids` are those with its placeholders."""
        if _HIDDEN not in text:
            return ids
        shown = _PLACEHOLDER.sub(lambda found: self._texts[ord(found[1]) - _FIRST], text)
        return list(self._literal.encode(shown, add_special_tokens=False).ids)

    @cached_property
    def _literal(self) -> Tokenizer:
        """The tokenizer without special tokens. It is made for the first chat that needs it."""
        from tokenizers import Tokenizer

        settings = json.loads(self._tokenizer.to_str())
        for token in settings["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._texts
        tokenizer = Tokenizer.from_str(json.dumps(settings))
        tokenizer.encode_special_tokens = True
        return tokenizer
