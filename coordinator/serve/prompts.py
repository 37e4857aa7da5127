"""Prompts and chats to token ids, tokens back to text as they come, and what a model's files say of generating."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.models.checkpoint.families import read_json
from coordinator.serve.sentences import open_tokenizer
from hearth.errors import BadCheckpoint, BadRequest
from hearth.validation import first_error
from hearth.wire.messages import ChatMessage, Sampling, SamplingChoice

if TYPE_CHECKING:
    import jinja2

_NO_CHARACTER = "\ufffd"  # what decoders write for bytes that are no character, or not yet
_DEFAULT_MAX_TOKENS = 512


class TextTokenizer:
    """The model's own tokenizer.json and chat template. Raises BadCheckpoint where they cannot be read."""

    def __init__(self, directory: Path, now: Callable[[], datetime] = datetime.now) -> None:
        self._tokenizer = open_tokenizer(directory)
        self._now = now
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        self._special = {name: text for name, value in config.items() if (text := _special_token(name, value))}
        self._template = _chat_template(directory, config)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the model wants before it (a token that begins texts, mostly)."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a chat that the model is to answer. Raises BadRequest: no template, or one that refuses.

        As in `transformers`, special tokens are those that the template writes and no others.
        """
        if self._template is None:
            raise BadRequest(
                reason="the model has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); send a prompt instead of messages"
            )
        try:
            text = self._compiled.render(
                messages=[message.model_dump() for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special,
            )
        except Exception as error:  # a template is a program of somebody else: it may fail in any way
            raise BadRequest(reason=f"the model's chat template does not take these messages ({error})") from None
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self, prompt_ids: Sequence[int] = ()) -> TextStream:
        """Text as tokens come. After a prompt, it is what they add to its text: the space between words, for instance."""
        return TextStream(self.decode, prompt_ids)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        assert self._template is not None
        return _compile(self._template, self._now)


class TextStream:
    """Incremental decoding. Only the newest tokens are decoded again; what came before them gives the context.

    `tokenizers` has a DecodeStream, which raises where a decoder rewrites what it wrote, and cannot be asked for the rest.
    """

    _CONTEXT = 8  # tokens of the prompt: more than any decoder looks back

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._num_given = len(self._ids)  # tokens whose text was given out
        # A character that the prompt leaves incomplete is given out with its last byte.
        self._given = decode(self._ids).rstrip(_NO_CHARACTER) if self._ids else ""

    def push(self, token_id: int) -> str:
        """The text that is certain now; empty while a character is not complete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_NO_CHARACTER):
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What was held back: bytes that became no character."""
        return self._give(self._decode(self._ids))

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        if new:  # what was new is the context of what comes
            self._ids = self._ids[self._num_given :]
            self._given = self._decode(self._ids)
        self._num_given = len(self._ids)
        return new


class StopTexts:
    """Ends a text at the first of some texts, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain now. After a stop text was found there is no more of it."""
        if self.found:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.found = True
            _, end = min(found)  # the one that was complete first, however the text was cut
            return text[:end]
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return "" if self.found else held

    def _num_held(self, text: str) -> int:
        """Characters at the end of a text with which a stop text may begin."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


# ---- generation_config.json ---------------------------------------------------------------------------------------


class GenerationDefaults(BaseModel):
    """What the model's files say of generating, where a request says nothing."""

    model_config = ConfigDict(frozen=True)

    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = Field(default=(), max_length=256)
    max_tokens: int = Field(default=_DEFAULT_MAX_TOKENS, ge=1)

    def merged(self, choice: SamplingChoice, seed: int) -> Sampling:
        """A request's sampling; `seed` where it names none."""
        return self.sampling.model_copy(update={"seed": seed, **choice.model_dump(exclude_none=True)})


class _GenerationConfig(SamplingChoice):
    """The part of generation_config.json that is used here. Without `do_sample` the likeliest token is taken."""

    do_sample: bool | None = None
    eos_token_id: int | list[int] | None = None
    max_new_tokens: int | None = None


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """From generation_config.json; the tokens that end a text from config.json where it names none.

    Raises BadCheckpoint.
    """
    path = directory / "generation_config.json"
    try:
        config = _GenerationConfig.model_validate(read_json(path) if path.exists() else {})
        stop_ids = config.eos_token_id
        if stop_ids is None:
            stop_ids = _GenerationConfig.model_validate(read_json(directory / "config.json")).eos_token_id
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


# ---- chat templates -----------------------------------------------------------------------------------------------


def _special_token(name: str, value: object) -> str | None:
    """`bos_token` and its like: a text, or an object with the text inside."""
    if not name.endswith("_token"):
        return None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """The template's own file first, then the configuration: one template, or several by name."""
    path = directory / "chat_template.jinja"
    try:
        if path.exists():
            return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(path=str(path), reason=f"the chat template cannot be read ({error})") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in template if isinstance(each, dict) and len(each) == 2}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _compile(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    """In a sandbox: a template comes with the weights, from whoever made them. Names are those that templates rely on."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant says, for training: here it is passed through."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own would escape for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment.from_string(source)
