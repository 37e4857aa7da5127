"""The events of a response's stream, and the response that they add up to."""

from __future__ import annotations

from typing import Any, Literal

from coordinator.http.failures import Failure
from coordinator.http.log_probs import entries, of_token
from coordinator.http.openai.sampling import event, new_id
from hearth.client.answers import Token, Usage
from hearth.wire.messages import ToolCall

_Kind = Literal["message", "reasoning"]
_Event = dict[str, Any]


class ResponseEvents:
    """`begin`, `add` for each token, `end`; each returns the next events. `response` is the whole, once it has ended."""

    def __init__(self, head: dict[str, Any]) -> None:
        """`head`: the fields of the response that do not depend on the answer."""
        self._items: list[dict[str, Any]] = []
        self._open: _Kind | None = None  # the newest item, while it grows
        self._number = 0
        self.response: dict[str, Any] = {
            **head, "status": "in_progress", "output": self._items, "usage": None, "error": None, "incomplete_details": None,
        }  # fmt: skip

    def begin(self) -> list[_Event]:
        """The events before the first token."""
        return [self._event(f"response.{kind}", response={**self.response}) for kind in ("created", "in_progress")]

    def add(self, token: Token) -> list[_Event]:
        """The events of a token."""
        events: list[_Event] = []
        if token.reasoning:
            events += self._grow("reasoning", token.reasoning, [])
        if token.text or (token.log_probs is not None and not token.reasoning):
            events += self._grow("message", token.text, entries(of_token(token)))
        for call in token.tool_calls:
            events += [*self._close(), *self._call(call)]
        return events

    def end(self, usage: Usage) -> list[_Event]:
        """The last events."""
        events = self._close()
        if not self._items:
            events += [*self._grow("message", "", []), *self._close()]
        cut = usage.finish_reason == "length"
        if cut:
            self._items[-1]["status"] = "incomplete"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["status"] = "incomplete" if cut else "completed"
        self.response["usage"] = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_tokens,
        }
        return [*events, self._event(f"response.{self.response['status']}", response=self.response)]

    def failed(self, failure: Failure) -> bytes:
        """The last event of a stream that broke off. Clients raise what `error` holds."""
        error = failure.openai()["error"]
        return event(self._event("error", code=failure.code, message=failure.message, param=failure.param, error=error))

    # ---- items ----------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _grow(self, kind: _Kind, text: str, log_probs: list[dict[str, Any]]) -> list[_Event]:
        """Append a text to the newest item, or to a new one if that is of another kind."""
        events: list[_Event] = []
        if self._open != kind:
            events += self._close()
            self._open = kind
            head = (
                {"type": "message", "role": "assistant"} if kind == "message" else {"type": "reasoning", "summary": []}
            )
            item: dict[str, Any] = {
                "id": new_id("msg" if kind == "message" else "rs"),
                **head,
                "status": "in_progress",
                "content": [],
            }
            self._items.append(item)
            events.append(
                self._event("response.output_item.added", output_index=len(self._items) - 1, item=_copy(item))
            )
            part = _part(kind)
            item["content"].append(part)
            events.append(self._event("response.content_part.added", **self._place, content_index=0, part={**part}))
        part = self._items[-1]["content"][0]
        part["text"] += text
        name = "output_text" if kind == "message" else "reasoning_text"
        extra = {}
        if kind == "message":
            part["logprobs"] += log_probs
            extra = {"logprobs": log_probs}
        delta = self._event(f"response.{name}.delta", **self._place, content_index=0, delta=text, **extra)
        return [*events, delta]

    def _close(self) -> list[_Event]:
        """End the newest item, if it grows."""
        if self._open is None:
            return []
        kind, item, place = self._open, self._items[-1], {**self._place, "content_index": 0}
        self._open, item["status"] = None, "completed"
        part = item["content"][0]
        name = "output_text" if kind == "message" else "reasoning_text"
        extra = {"logprobs": part["logprobs"]} if kind == "message" else {}
        return [
            self._event(f"response.{name}.done", **place, text=part["text"], **extra),
            self._event("response.content_part.done", **place, part={**part}),
            self._event("response.output_item.done", output_index=place["output_index"], item=_copy(item)),
        ]

    def _call(self, call: ToolCall) -> list[_Event]:
        item = {
            "id": new_id("fc"), "type": "function_call", "status": "completed", "call_id": call.id, "name": call.name,
            "arguments": call.arguments,
        }  # fmt: skip
        self._items.append(item)
        place, index = self._place, len(self._items) - 1
        begun = {**item, "status": "in_progress", "arguments": ""}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item={**item}),
        ]

    def _event(self, kind: str, **fields: Any) -> _Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _part(kind: _Kind) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now."""
    return {**item, "content": [{**part} for part in item["content"]]}
