"""Tokenizers, chat templates, incremental decoding, stop texts, and generation_config.json."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_models import SPECIAL, TEMPLATE, TOOL_TEMPLATE, save_byte_level, write_config

from coordinator.serve.text.prompts import (
    GenerationDefaults,
    StopTextFilter,
    TextStream,
    TextTokenizer,
    read_generation_defaults,
)
from hearth.client.answers import chat_message
from hearth.errors import BadCheckpoint, BadRequest
from hearth.wire.messages import ChatMessage, Sampling, SamplingChoice


def save_metaspace(directory: Path) -> Path:
    """A Llama-like tokenizer: words start with a marker, bytes for unknown characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    words = ["▁", "▁the", "▁light", "▁is", "▁on", "s", "t", "a", "é", "."]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {text: index for index, text in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte level": TextTokenizer(save_byte_level(folder / "bytes")),
        "metaspace": TextTokenizer(save_metaspace(folder / "words")),
    }


def token_ids_of(directory: Path, *texts: str) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [tokenizer.token_to_id(text) for text in texts]


# ---- tokens to text -------------------------------------------------------------------------------------------------


def pushed(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_incremental_decoding_equals_decoding_at_once(kind: str, tokenizers: dict[str, TextTokenizer]) -> None:
    tokenizer = tokenizers[kind]

    @given(st.text(max_size=40))
    def texts(text: str) -> None:
        ids = tokenizer.encode(text)
        pieces = pushed(tokenizer.stream(), ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces[:-1]) or "\ufffd" in text

    texts()


@given(ids=st.lists(st.integers(0, 264), max_size=60))
def test_invalid_utf8_is_decoded_with_replacements(ids: list[int], tokenizers: dict[str, TextTokenizer]) -> None:
    tokenizer = tokenizers["byte level"]
    assert "".join(pushed(tokenizer.stream(), ids)) == tokenizer.decode(ids)


def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizers: dict[str, TextTokenizer]) -> None:
    encoding = threading.Thread(target=tokenizers["byte level"].encode, args=("hello world " * 50_000,))
    encoding.start()
    num_pauses = 0
    while encoding.is_alive():
        time.sleep(0.001)
        num_pauses += 1
    assert num_pauses > 10  # one or two, if the library holds the interpreter's lock


def test_character_is_sent_with_its_last_byte(tokenizers: dict[str, TextTokenizer]) -> None:
    tokenizer = tokenizers["byte level"]
    ids = tokenizer.encode("a€🙂")[1:]
    assert len(ids) == 8
    assert pushed(tokenizer.stream(), ids) == ["a", "", "", "€", "", "", "", "🙂", ""]
    assert pushed(tokenizer.stream(), ids[:-1])[-1] == "\ufffd"
    assert pushed(tokenizer.stream(ids[:2]), ids[2:4]) == ["", "€", ""]  # started by the prompt


def test_space_between_prompt_and_answer_is_kept(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(save_metaspace(tmp_path))
    ids = token_ids_of(tmp_path, "▁the", "▁light", "▁is", "</s>")
    assert pushed(tokenizer.stream(), ids) == ["the", " light", " is", "", ""]
    assert pushed(tokenizer.stream(ids[:1]), ids[1:]) == [" light", " is", "", ""]
    assert pushed(tokenizer.stream(ids * 20), ids) == [" the", " light", " is", "", ""]


# ---- stop texts -----------------------------------------------------------------------------------------------------


def cut_at_first(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """By definition: characters are added one by one until the text ends with a stop text."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


_LETTERS = st.text("ab", max_size=30)


@given(_LETTERS, st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(st.integers(0, 6), max_size=30))
def test_stop_text_is_found_however_the_text_is_divided(text: str, stops: list[str], cuts: list[int]) -> None:
    expected, is_found = cut_at_first(text, stops)
    filter_, out, rest = StopTextFilter(stops), "", text
    for cut in [*cuts, len(text)]:
        out += filter_.push(rest[:cut])
        rest = rest[cut:]
        assert expected.startswith(out)  # text that was sent is never withdrawn
    out += filter_.flush()
    assert (out, filter_.found) == (expected, is_found)


def test_only_possible_starts_of_a_stop_text_are_withheld() -> None:
    stops = StopTextFilter(["\nUser:", "END"])
    assert [stops.push(text) for text in ("Hi", "\n", "Us", "a", "EN")] == ["Hi", "", "", "\nUsa", ""]
    assert (stops.flush(), stops.found) == ("EN", False)
    stops = StopTextFilter(["\nUser:"])
    assert [stops.push(text) for text in ("Hi\nUse", "r: what", "more")] == ["Hi", "", ""]
    assert (stops.flush(), stops.found) == ("", True)


# ---- chats ----------------------------------------------------------------------------------------------------------

CHAT = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=" hello <&>\n")]


def rendered(directory: Path, template: Any = TEMPLATE, messages: Sequence[ChatMessage] = CHAT) -> str:
    from tokenizers import Tokenizer

    write_config(save_byte_level(directory), chat_template=template, bos_token="<s>", eos_token={"content": "</s>"})
    ids = TextTokenizer(directory, now=lambda: datetime(2024, 5, 25)).encode_chat(messages)
    text: str = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    return text


def test_chat_template_is_rendered_without_extra_tokens(tmp_path: Path) -> None:
    assert rendered(tmp_path) == "<s><|user|>hello <&></s><|assistant|>"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    assert rendered(tmp_path, named) == "<s><|user|>hello <&></s><|assistant|>"
    assert rendered(tmp_path, "{{ messages[1] | tojson }}") == '{"role": "user", "content": " hello <&>\\n"}'
    assert rendered(tmp_path, "{{ strftime_now('%d %b %Y') }}") == "25 May 2024"
    assert rendered(tmp_path, "{% generation %}x{{ bos_token }}{% endgeneration %}") == "x<s>"
    (tmp_path / "chat_template.jinja").write_text("{# its own file comes first #}y")
    assert rendered(tmp_path) == "y"


def test_rendered_chats_equal_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_config(
        save_byte_level(tmp_path), chat_template=TEMPLATE, bos_token="<s>", eos_token="</s>",
        tokenizer_class="PreTrainedTokenizerFast",
    )  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [message.model_dump() for message in CHAT]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.encode_chat(CHAT) == expected
    assert tokenizer.encode("hello world, not cut") == theirs("hello world, not cut")["input_ids"]


def test_special_tokens_are_left_out_by_their_ids(tmp_path: Path) -> None:
    """The same text, written in ordinary tokens, is part of the answer."""
    from tokenizers import Tokenizer

    write_config(save_byte_level(tmp_path), chat_template=TOOL_TEMPLATE)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    spelled = [token_id for letter in "<s>" for token_id in ids.encode(letter, add_special_tokens=False).ids]
    assert tokenizer.decode_with_marks([ids.token_to_id("<s>"), *spelled, ids.token_to_id("</s>")]) == "<s>"


def test_bad_arguments_of_a_call_are_named(tmp_path: Path) -> None:
    write_config(save_byte_level(tmp_path), chat_template=TOOL_TEMPLATE)
    call = {"id": "c7", "function": {"name": "f", "arguments": "[1]"}}
    with pytest.raises(BadRequest, match="the arguments of the call c7 must be a JSON object"):
        TextTokenizer(tmp_path).encode_chat([chat_message({"role": "assistant", "content": "", "tool_calls": [call]})])


def test_chats_with_tools_equal_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_config(
        save_byte_level(tmp_path), chat_template=TOOL_TEMPLATE, bos_token="<s>", eos_token="</s>",
        tokenizer_class="PreTrainedTokenizerFast",
    )  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"on": True}}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    expected = theirs.apply_chat_template(messages, tools=[tool], add_generation_prompt=True, return_dict=False)
    written = {**call, "function": {"name": "f", "arguments": '{"on": true}'}}
    ours = [chat_message({**each, **({"tool_calls": [written]} if "tool_calls" in each else {})}) for each in messages]
    assert TextTokenizer(tmp_path).encode_chat(ours, [json.dumps(tool)]) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ([{"name": "tool_use", "template": "no"}], "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "chat template does not accept"),
        ("{{ messages[7].content + 1 }}", "chat template does not accept"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "too big"),
    ],
)
def test_missing_failing_or_escaping_template_is_a_bad_request(template: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="template") as error:
        rendered(tmp_path, template)
    assert message in str(error.value)


def test_padding_and_truncation_are_off_and_damaged_files_named(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(save_byte_level(tmp_path))
    assert len(tokenizer.encode("x" * 100)) == 101
    assert tokenizer.encode("") == token_ids_of(tmp_path, "<s>")
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(BadCheckpoint, match="tokenizer_config"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)


# ---- generation_config.json -----------------------------------------------------------------------------------------


def defaults(directory: Path, config: dict[str, Any] | None = None, **generation: Any) -> GenerationDefaults:
    (directory / "config.json").write_text(json.dumps(config or {}))
    if generation:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_generation_defaults(directory)


def test_decoding_is_greedy_without_do_sample(tmp_path: Path) -> None:
    assert defaults(tmp_path) == GenerationDefaults()
    assert defaults(tmp_path, temperature=0.6).sampling.temperature == 0.0
    assert defaults(tmp_path, do_sample=True).sampling.temperature == 1.0
    found = defaults(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=None, repetition_penalty=1.1)
    assert found.sampling == Sampling(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)


def test_request_overrides_the_defaults_it_sets(tmp_path: Path) -> None:
    found = defaults(tmp_path, do_sample=True, temperature=0.6, top_k=20)
    assert found.merged(SamplingChoice(), 7) == Sampling(temperature=0.6, top_k=20, seed=7)
    chosen = SamplingChoice(temperature=0.0, top_p=0.5, seed=3)
    assert found.merged(chosen, 7) == Sampling(temperature=0.0, top_k=20, top_p=0.5, seed=3)


def test_eos_token_may_be_one_id_or_several(tmp_path: Path) -> None:
    assert defaults(tmp_path, {"eos_token_id": 2}).stop_ids == (2,)
    assert defaults(tmp_path, {"eos_token_id": 2}, eos_token_id=[5, 6]).stop_ids == (5, 6)
    assert defaults(tmp_path, {"eos_token_id": None}, eos_token_id=None).stop_ids == ()
    assert defaults(tmp_path, max_new_tokens=99).max_tokens == 99


@pytest.mark.parametrize(("name", "value"), [("top_p", 2.0), ("eos_token_id", "x"), ("max_new_tokens", -1)])
def test_value_out_of_range_names_the_file_and_the_field(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"generation_config\.json") as error:
        defaults(tmp_path, **{name: value})
    assert ("max_tokens" if name == "max_new_tokens" else name) in str(error.value)
