"""Encoding of messages: golden bytes, protocol versions, and rejection of malformed messages."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgpack
import pytest
from annotated_types import MaxLen
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from support.messages import EXAMPLES, as_version_1, named_examples

from hearth import errors
from hearth.plan.transformer import SHARDED, LayerMode, TensorParallel
from hearth.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from hearth.wire import messages as wire

# Written by `python -m golden.record`. A change here changes the protocol version, unless it only adds fields with defaults,
# which the other end ignores.
GOLDEN = Path(__file__).parent / "golden_messages.json"
TYPED = (errors.BadMessage, errors.FrameTooLarge, errors.ProtocolMismatch, errors.UnknownMessage)


def test_every_message_type_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(wire.MESSAGE_TYPES.values())


@pytest.mark.parametrize("name", named_examples())
def test_messages_match_golden_bytes(name: str) -> None:
    message, golden = named_examples()[name], bytes.fromhex(json.loads(GOLDEN.read_text())[name])
    assert wire.encode(message) == golden
    assert wire.decode(golden) == message


def test_golden_bytes_have_the_current_protocol_version() -> None:
    assert json.loads(GOLDEN.read_text()).keys() == named_examples().keys()


def test_v1_messages_raise_protocol_mismatch() -> None:
    for message in EXAMPLES:
        data = as_version_1(message)
        if message.any_version:
            assert getattr(wire.decode(data), "protocol", 1) == 1
        else:
            with pytest.raises(errors.ProtocolMismatch) as mismatch:
                wire.decode(data)
            assert (mismatch.value.ours, mismatch.value.theirs) == (PROTOCOL_VERSION, 1)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, -1, 2**64 - 1, "2", None, []])
def test_protocol_version_is_checked_before_other_fields(version: object) -> None:
    for fields in ({"t": "done"}, {"t": "sing"}, {"t": "find_missing", "hashes": 3}):
        with pytest.raises((errors.ProtocolMismatch, errors.BadMessage)) as error:
            wire.decode(msgpack.packb({**fields, "v": version}))
        assert isinstance(error.value, errors.ProtocolMismatch) == isinstance(version, int)


@given(st.sampled_from(EXAMPLES), st.data())
def test_truncated_messages_raise_typed_errors(message: wire.Message, data: st.DataObject) -> None:
    encoded = wire.encode(message)
    with pytest.raises(TYPED):
        wire.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@given(st.sampled_from(EXAMPLES), st.data())
def test_flipped_bits_decode_or_raise_typed_errors(message: wire.Message, data: st.DataObject) -> None:
    damaged = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, len(damaged) * 8 - 1))
        damaged[bit // 8] ^= 1 << bit % 8
    try:
        wire.decode(bytes(damaged))
    except TYPED:
        pass


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_typed_errors(data: bytes) -> None:
    try:
        wire.decode(data)
    except TYPED:
        pass


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(EXAMPLES), st.data())
def test_arbitrary_field_values_raise_only_typed_errors(message: wire.Message, data: st.DataObject) -> None:
    fields = message.model_dump()
    name = data.draw(st.sampled_from(sorted({"t", "v", *fields})))
    fields[name] = data.draw(json_like)
    try:
        wire.decode(msgpack.packb({"v": PROTOCOL_VERSION, "t": message.tag, **fields}))
    except TYPED:
        pass


def test_unknown_fields_are_ignored_and_unknown_tags_named() -> None:
    assert wire.decode(msgpack.packb({"v": PROTOCOL_VERSION, "t": "done", "new": 1})) == wire.Done()
    with pytest.raises(errors.UnknownMessage, match="'sing'"):
        wire.decode(msgpack.packb({"v": PROTOCOL_VERSION, "t": "sing"}))


def test_oversized_messages_are_rejected_before_decoding() -> None:
    with pytest.raises(errors.FrameTooLarge):
        wire.decode(b"\x00" * (MAX_MESSAGE_BYTES + 1))
    huge = wire.Embed(texts=("v" * 65_536,) * 65)
    with pytest.raises(errors.FrameTooLarge):
        wire.encode(huge)


@pytest.mark.parametrize(
    "order", [("v", "t", "code", "details"), ("details", "t", "code", "v"), ("code", "details", "t")]
)
def test_type_is_read_without_the_other_fields(order: tuple[str, ...]) -> None:
    fields = {"v": PROTOCOL_VERSION, "t": "failed", "code": [[{}]] * 1000, "details": {"x" * 100_000: b"y" * 100_000}}
    assert wire.message_type(msgpack.packb({name: fields[name] for name in order})) is wire.Failed


def test_type_that_a_receiver_does_not_accept_is_unknown_to_it() -> None:
    with pytest.raises(errors.UnknownMessage, match="'embed'"):
        wire.message_type(wire.encode(wire.Embed(texts=("a",))), {"hello": wire.Hello})


def test_second_tag_in_a_message_does_not_change_its_type() -> None:
    twice = b"\x83" + b"".join(map(msgpack.packb, ["v", PROTOCOL_VERSION, "t", "done", "t", "failed"]))
    assert wire.decode(twice, wire.message_type(twice)) == wire.Done()


@pytest.mark.parametrize("bomb", [[None] * 4097, {str(i): None for i in range(65)}, "x" * 300_000, b"x" * 300_000])
def test_parts_of_a_message_have_a_limited_size(bomb: Any) -> None:
    data = msgpack.packb({"v": PROTOCOL_VERSION, "t": "done", "unknown": [bomb]})
    assert wire.decode(data) == wire.Done()
    with pytest.raises(errors.BadMessage, match="too large a part"):
        wire.decode(data, wire.Done, wire.CLIENT_SIZES)


def test_list_of_wrong_items_is_refused_at_once() -> None:
    data = msgpack.packb({"v": PROTOCOL_VERSION, "t": "text_generated", "token_ids": [None] * 1_000_000, "text": ""})
    began = time.process_time()
    with pytest.raises(errors.BadMessage):
        wire.decode(data)
    assert time.process_time() - began < 1.0  # an error object for each item would take half a minute


def test_large_plan_of_many_layers_is_checked_in_bounded_time() -> None:
    body = TensorParallel(
        seq_len=512, strategy="hmp", modes=(SHARDED, LayerMode(qkv="replicated")) * 512, generation=None,
        heads=(1,) * 256, columns=(16,) * 256, vocabulary=(64,) * 256, row_weights=(1.0,) * 256,
    )  # fmt: skip
    began = time.process_time()
    body._check_decoding()
    assert time.process_time() - began < 0.5


def test_every_list_of_a_message_has_a_limited_length() -> None:
    seen, unlimited = set[Any](), list[str]()

    def visit(kind: Any, where: str, limits: Sequence[Any] = ()) -> None:
        origin, parts = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return visit(
                parts[0], where, [*limits, *(m for part in parts[1:] for m in getattr(part, "metadata", [part]))]
            )
        if isinstance(kind, TypeVar):
            return visit(kind.__default__, where, limits)  # type: ignore[attr-defined]
        if origin is None and isinstance(kind, type) and issubclass(kind, BaseModel):
            if kind not in seen:
                seen.add(kind)
                for name, field in kind.model_fields.items():
                    visit(field.annotation, f"{kind.__name__}.{name}", field.metadata)
            return None
        if origin in (list, dict) or (origin is tuple and ... in parts):
            unlimited.extend([] if any(isinstance(each, MaxLen) for each in limits) else [where])
        for part in parts:
            visit(part, where)

    for message in wire.MESSAGE_TYPES.values():
        visit(message, message.__name__)
    assert TensorParallel in seen
    assert unlimited == []


def test_false_length_allocates_no_memory() -> None:
    damaged = b"\x81\xa1t\xdb\xff\xff\xff\xff" + b"x" * 10  # declares a string of 4 GiB
    tracemalloc.start()
    try:
        with pytest.raises(errors.BadMessage):
            wire.decode(damaged)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_chunk_name_must_be_a_hash() -> None:
    with pytest.raises(errors.BadMessage, match="hash"):
        wire.decode(msgpack.packb({"v": PROTOCOL_VERSION, "t": "put_chunk", "holder": "c", "hash": "../../etc/passwd"}))
    assert wire.PutChunk(holder="c", hash="0" * 64).hash == "0" * 64


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 2**70, "\udc80", "x" * 10_000_000, Path("/x"), None])
def test_every_error_can_be_sent_whatever_its_fields_hold(value: Any) -> None:
    received = wire.decode(wire.encode(wire.Failed.of(errors.DeadlineExceeded(action=value, seconds=value))))
    assert isinstance(received, wire.Failed)
    assert len(str(received.error())) < 10_000


@pytest.mark.parametrize("error_type", errors.ERROR_TYPES.values(), ids=lambda e: e.__name__)
def test_errors_round_trip_with_their_hints(error_type: type[errors.HearthError]) -> None:
    samples = {"int": 3, "float": 1.5, "str": "x"}
    error = error_type(**{field.name: samples[str(field.type)] for field in dataclasses.fields(error_type)})
    received = wire.decode(wire.encode(wire.Failed.of(error)))
    assert isinstance(received, wire.Failed)
    again = received.error()
    assert type(again) is error_type
    assert again.details() == error.details()
    assert str(again) == str(error)
    assert error.next_step() != errors.HearthError.advice
    assert errors.__dict__[error_type.__name__] is error_type


@pytest.mark.parametrize(
    ("code", "details"),
    [("NoSuchError", {}), ("TextTooLong", {}), ("HearthError", {}), ("BadMessage", {"reason": None})],
)
def test_unknown_error_code_becomes_a_generic_error(code: str, details: dict[str, None]) -> None:
    assert isinstance(errors.error_from_wire(code, details), errors.HearthError)


def test_hello_carries_the_protocol_version() -> None:
    assert msgpack.unpackb(wire.encode(wire.Hello(name="x")))["protocol"] == 4
