"""Tokenises prompts and chats, decodes tokens incrementally, and reads a model's generation defaults."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.models.checkpoint.families import read_json_object
from coordinator.models.model_files import read_model_file
from coordinator.serve.text.answer_reader import REASONING, AnswerReader, answer_form, num_uncertain
from coordinator.serve.text.response_template import ResponseTemplate, read_response_template
from coordinator.serve.text.sentences import encoded, no_panic, open_tokenizer
from coordinator.serve.text.template_reader import TemplateReader
from coordinator.serve.text.templates import ChatTemplate, TemplateFailed
from hearth.errors import BadCheckpoint, BadRequest
from hearth.grammars import Vocabulary
from hearth.validation import first_error
from hearth.wire.messages import ChatMessage, Sampling, SamplingChoice, ToolCall

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

# A placeholder is this private character of Unicode, and one that stands for the hidden text. In contents it is hidden, too.
_HIDDEN = "\ue000"
_FIRST = ord(_HIDDEN) + 1
_PLACEHOLDER = re.compile(f"{_HIDDEN}(.)", re.DOTALL)
_NO_CHARACTER = "\ufffd"  # decoders write it for invalid or incomplete UTF-8
_TAIL_TOKENS = 8  # of a prompt, in which it may begin the reasoning
_ANCHOR_TOKENS = 256  # of a prompt, in which a response template looks for the beginning of the answer
_DEFAULT_MAX_TOKENS = 512  # of an answer without any other limit: enough for a chat, and ends a model that never stops


class TextTokenizer:
    """The model's tokenizer.json and chat template. Raises BadCheckpoint if they cannot be read.

    `special_contents`: special tokens in the contents of chats are special tokens of the prompt.
    """

    def __init__(
        self, directory: Path, now: Callable[[], datetime] = datetime.now, special_contents: bool = False
    ) -> None:
        self._tokenizer = open_tokenizer(directory)
        self._directory, self._special_contents = directory, special_contents
        config_path = directory / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.exists() else {}
        self._special = {name: text for name, value in config.items() if (text := _special_token(name, value))}
        source = _chat_template(directory, config)
        self.template = ChatTemplate(source, now) if source is not None else None
        self.form = answer_form(source)
        self._response = _response_template(config_path, config.get("response_template"))
        self._dropped = {
            token_id
            for token_id, added in self._tokenizer.get_added_tokens_decoder().items()
            if added.special
            and added.content not in self.form.marks
            and not (self._response is not None and self._response.has_mark(added.content))
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds (usually a beginning-of-text token)."""
        with no_panic(self._directory):
            return list(encoded(self._tokenizer, text).ids)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[str] = (),
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> list[int]:
        """Token ids of a chat for the model to answer. Raises BadRequest if there is no template or it fails.

        `tools` are JSON objects, `options` further variables of the template. The only special tokens are those that the
        template writes; in a content, a tool or an option they are text, other than in `transformers`.
        """
        if self.template is None:
            raise BadRequest(
                reason="the model has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); send a prompt instead of messages"
            )
        given = {
            **options,
            "messages": [_template_message(message) for message in messages],
            "tools": [_json_object(tool, "each tool") for tool in tools] or None,
        }
        try:
            text = self._rendered(self._contents.hide(given))
        except (TemplateFailed, RecursionError) as error:
            raise BadRequest(reason=f"the model's chat template does not accept these messages ({error})") from None
        with no_panic(self._directory):
            return self._contents.encode(text)

    def _rendered(self, variables: Mapping[str, object]) -> str:
        fixed = {"add_generation_prompt": True, "documents": None}
        assert self.template is not None
        return self.template.render({**variables, **self._special, **fixed})

    @cached_property
    def _contents(self) -> ContentTokens:
        """What contents may not write: special tokens, and others with which the template begins or ends a turn."""
        turns = [{"role": role, "content": "-"} for role in ("user", "assistant", "user")]
        written = ""
        with suppress(TemplateFailed):  # a template that fails here says so when it is used
            written = self._rendered({"messages": turns, "tools": None})
        added = self._tokenizer.get_added_tokens_decoder().values()
        control = {token.content for token in added if token.special or token.content in written} - {*REASONING, ""}
        return ContentTokens(self._tokenizer, () if self._special_contents else control)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""
        with no_panic(self._directory):
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_with_marks(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, without special tokens other than those that mark parts of an answer."""
        shown = [token_id for token_id in token_ids if token_id not in self._dropped]
        with no_panic(self._directory):
            return str(self._tokenizer.decode(shown, skip_special_tokens=False))

    def stream(self, prompt_ids: Sequence[int] = (), marks: bool = False) -> TextStream:
        """An incremental decoder. The prompt gives it context, for instance to decide on a space between two words."""
        return TextStream(self.decode_with_marks if marks else self.decode, prompt_ids)

    @property
    def takes_tools(self) -> bool:
        """Whether calls of tools can be read in an answer that is free."""
        return self.form.tools is not None or (self._response is not None and self._response.has_calls)

    def reader(
        self, prompt_ids: Sequence[int], tools: Sequence[str], name: str, follows_grammar: bool = False
    ) -> AnswerReader | TemplateReader:
        """A reader of the answer to this prompt. `name` makes the ids of its calls.

        `follows_grammar`: the calls have the form that `constraints` gives them.
        """
        if self._response is not None and not follows_grammar:
            tail = str(self._tokenizer.decode(list(prompt_ids[-_ANCHOR_TOKENS:]), skip_special_tokens=False))
            return TemplateReader(self._response, tail, tools, name)
        return AnswerReader(self.form, bool(tools), self.begins_with_reasoning(prompt_ids), name)

    def begins_with_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether this prompt ends inside of the reasoning."""
        tail = str(self._tokenizer.decode(list(prompt_ids[-_TAIL_TOKENS:]), skip_special_tokens=False)).rstrip()
        return self.form.reasons and tail.endswith("<think>")

    def vocabulary(self, num_tokens: int, stop_ids: Sequence[int]) -> Vocabulary | None:
        """The bytes of all tokens of a model with so many; None if this tokenizer does not tell them."""
        from llguidance import LLTokenizer

        try:
            with no_panic(self._directory):
                read = LLTokenizer(self._tokenizer.to_str(), n_vocab=max(num_tokens, self._tokenizer.get_vocab_size()))
        except ValueError as error:
            log.warning("answers cannot be constrained: llguidance does not read the tokenizer (%s)", error)
            return None
        added = self._tokenizer.get_added_tokens_decoder().keys()  # llguidance takes the byte 0xff for special, too
        special = [token_id for token_id in sorted(added) if token_id < num_tokens and read.is_special_token(token_id)]
        known = (self._tokenizer.id_to_token(token_id) is not None for token_id in range(num_tokens))
        tokens = [read.decode_bytes([token_id]) if is_known else b"" for token_id, is_known in enumerate(known)]
        return Vocabulary(tokens, special, tuple(stop_ids))


class ContentTokens:
    """Keeps contents of chats text: a special token that is written in one takes no part in the form of the prompt.

    While the template is rendered, a placeholder stands for each such text. Afterwards, what lies between the template's own
    special tokens and holds a placeholder is tokenised without special tokens. `control`: texts of tokens that only the
    template may write.
    """

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
        found = encoded(self._tokenizer, rendered, add_special_tokens=False)
        if _HIDDEN not in rendered:
            return list(found.ids)
        ids: list[int] = []
        between: list[int] = []  # tokens since the last special one of the template
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
        return list(encoded(self._literal, shown, add_special_tokens=False).ids)

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


class TextStream:
    """Incremental decoding: decodes the newest tokens again at every step, with the preceding ones as context.

    Used instead of the DecodeStream of `tokenizers`, which raises when a decoder changes earlier output and cannot return
    the text that it still holds back.
    """

    _CONTEXT = 8  # prompt tokens kept as context: more than any tokenizer's decoder looks back

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._num_released = len(self._ids)  # tokens whose text was returned
        # A character that the prompt leaves incomplete is returned with its last byte.
        self._released_text = decode(self._ids).rstrip(_NO_CHARACTER) if self._ids else ""

    def push(self, token_id: int) -> str:
        """The new text that cannot change any more; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_NO_CHARACTER):
            return ""
        return self._release(text)

    def flush(self) -> str:
        """The text held back: bytes that did not become a character."""
        return self._release(self._decode(self._ids))

    def _release(self, text: str) -> str:
        new = text[len(self._released_text) :]
        if new:  # the new tokens become the context of the next ones
            self._ids = self._ids[self._num_released :]
            self._released_text = self._decode(self._ids)
        self._num_released = len(self._ids)
        return new


class StopTextFilter:
    """Cuts a streamed text at the first stop text, and holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be released now; always empty after a stop text was found."""
        if self.found:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.found = True
            _, end = min(matches)  # the stop text completed first, however the stream was split
            return text[:end]
        cut = len(text) - num_uncertain(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text held back; call at the end of the stream."""
        held, self._held = self._held, ""
        return "" if self.found else held


# ---- generation_config.json ---------------------------------------------------------------------------------------


class GenerationDefaults(BaseModel):
    """Generation settings from the model's files, used where a request sets none."""

    model_config = ConfigDict(frozen=True)

    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = Field(default=(), max_length=256)
    max_tokens: int = Field(default=_DEFAULT_MAX_TOKENS, ge=1)

    def merged(self, choice: SamplingChoice, seed: int) -> Sampling:
        """The request's sampling over these defaults. `seed` is used if the request names none."""
        return self.sampling.model_copy(update={"seed": seed, **choice.model_dump(exclude_none=True)})


class _GenerationConfig(SamplingChoice):
    """The fields of generation_config.json that are used. Without `do_sample`, decoding is greedy."""

    do_sample: bool | None = None
    eos_token_id: int | list[int] | None = None
    max_new_tokens: int | None = None


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read generation_config.json; end-of-text tokens fall back to those in config.json. Raises BadCheckpoint."""
    path = directory / "generation_config.json"
    try:
        config = _GenerationConfig.model_validate(read_json_object(path) if path.exists() else {})
        stop_ids = config.eos_token_id
        if stop_ids is None:
            stop_ids = _GenerationConfig.model_validate(read_json_object(directory / "config.json")).eos_token_id
        sampling = {"temperature": 1.0, **config.model_dump(include=set(Sampling.model_fields), exclude_none=True)}
        if not config.do_sample:
            sampling["temperature"] = 0.0
        return GenerationDefaults(
            sampling=Sampling(**sampling),
            stop_ids=() if stop_ids is None else tuple(stop_ids) if isinstance(stop_ids, list) else (stop_ids,),
            max_tokens=config.max_new_tokens or _DEFAULT_MAX_TOKENS,
        )
    except ValidationError as error:
        raise BadCheckpoint(path=str(path), reason=first_error(error)) from None


def _response_template(path: Path, value: object) -> ResponseTemplate | None:
    """How the model's answers are written, if its files say so in a form that can be read."""
    if value is None:
        return None
    try:
        return read_response_template(value)
    except ValueError as error:
        log.warning("%s: response_template is not used, since %s", path, error)
        return None


# ---- chat templates -----------------------------------------------------------------------------------------------


def _special_token(name: str, value: object) -> str | None:
    """The text of an entry such as `bos_token`, which is a string or an object with the field `content`."""
    if not name.endswith("_token"):
        return None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """From chat_template.jinja, else from tokenizer_config.json: one template, or a list of which `default` is used."""
    path = directory / "chat_template.jinja"
    try:
        if path.exists():
            return read_model_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadCheckpoint(path=str(path), reason=f"the chat template cannot be read ({reason})") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in template if isinstance(each, dict) and len(each) == 2}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _json_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object of a text, as the template gets it. Raises BadRequest that says `what` it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadRequest(reason=f"{what} must be a JSON object")
    return value


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as the template gets it: only the fields that it has. Raises BadRequest."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.name:
        shown["name"] = message.name
    return shown


def _template_call(call: ToolCall) -> dict[str, Any]:
    arguments = _json_object(call.arguments, f"the arguments of the call {call.id}")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
