"""Keys in files, and CURVE on real sockets: access with a wrong key, no key or a revoked key."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.contexts import zmq_context
from support.servers import rpc_server
from zmq.auth.base import Authenticator

from hearth.errors import BadKey, HearthError, KeyExists, KeyExposed, KeyMissing, NotAuthorised, Unreachable, WrongKey
from hearth.platform import curve
from hearth.platform.curve import KeyPair, fingerprint, new_keypair, secure_server
from hearth.platform.security import (
    Access,
    AppKey,
    Credential,
    HomeKey,
    admin_key,
    agent_access,
    agent_trust,
    coordinator_access,
    default_key_path,
    derive_keypair,
    format_credential,
    format_token,
    load_credential,
    new_device_key,
    new_home_key,
    parse_credential,
    parse_token,
    save_credential,
)
from hearth.wire.messages import Done, GetReadiness
from hearth.wire.rpc import Caller, RpcClient

HOME = new_home_key()


def credentials() -> Iterator[Credential]:
    yield HOME
    yield admin_key(HOME)
    yield new_device_key(HOME, "kitchen")
    yield AppKey(name="lamp", secret=new_keypair().secret, coordinator_public=new_keypair().public)


@pytest.mark.parametrize("credential", list(credentials()), ids=lambda c: c.kind)
def test_credentials_round_trip_through_text_and_file(credential: Credential, tmp_path: Path) -> None:
    assert parse_credential(format_credential(credential), "test") == credential
    path = tmp_path / "deep" / "key"
    save_credential(path, credential)
    assert load_credential(path) == credential
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(KeyExists):
        save_credential(path, credential)
    save_credential(path, credential, force=True)


@pytest.mark.parametrize("credential", list(credentials()), ids=lambda c: c.kind)
def test_repr_hides_secrets(credential: Credential) -> None:
    secret = credential.key if isinstance(credential, HomeKey) else credential.secret
    assert secret not in repr(credential) + str(credential)
    pair = new_keypair()
    assert pair.secret not in repr(pair)


@given(st.data())
def test_typing_errors_are_detected(data: st.DataObject) -> None:
    text = format_credential(HOME)
    index = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c != text[index]))
    damaged = text[:index] + other + text[index + 1 :]
    try:
        assert parse_credential(damaged, "test") == HOME  # the last base64 character has unused bits
        assert index == len(text) - 2 or index == len(text) - 1
    except BadKey as error:
        assert HOME.key not in str(error)


@pytest.mark.parametrize(
    "text", ["", "hearth-home-1:", "hearth-home-2:abc", "not a key", "hearth-app-1:e30=", "hearth-home-1:\udcff"]
)
def test_malformed_text_raises_bad_key(text: str) -> None:
    with pytest.raises(BadKey):
        parse_credential(text, "test")


@pytest.mark.parametrize("secret", ["#" * 40, "," * 40, "é" * 40])
def test_key_that_is_no_z85_raises_bad_key(secret: str) -> None:
    text = format_credential(AppKey.model_construct(name="app", secret=secret, coordinator_public="0" * 40))
    with pytest.raises(BadKey, match="damaged"):
        parse_credential(text, "test")


@pytest.mark.parametrize("credential", list(credentials()), ids=lambda c: c.kind)
def test_key_file_that_was_cut_short_or_overwritten_is_named(credential: Credential, tmp_path: Path) -> None:
    path = tmp_path / "key"
    save_credential(path, credential)
    whole = path.read_bytes().rstrip()
    cut = [whole[:length] for length in range(len(whole))]
    for content in (*cut, bytes(len(whole)), whole[:-9] + bytes(9), b"\xff\xfe" + whole, whole + b"x"):
        path.write_bytes(content)
        with pytest.raises(BadKey, match=str(path)) as error:
            load_credential(path)
        assert whole[30:50].decode() not in str(error.value)
    path.unlink()
    path.mkdir()
    with pytest.raises(BadKey, match="cannot be read"):
        load_credential(path)


def test_token_stands_for_its_app_and_a_typing_error_is_noticed() -> None:
    app = next(each for each in credentials() if isinstance(each, AppKey))
    token = format_token(app)
    assert parse_token(token, app.coordinator_public).secret == app.secret
    for damaged in (token[:-1], token[:9] + ("A" if token[9] != "A" else "B") + token[10:], token[7:], "", "hearth_é"):
        with pytest.raises(BadKey) as raised:
            parse_token(damaged, app.coordinator_public)
        assert not damaged or damaged not in str(raised.value)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o640])
def test_key_that_others_can_read_or_write_is_refused_with_the_remedy(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    save_credential(path, HOME)
    path.chmod(mode)
    with pytest.raises(KeyExposed, match=f"chmod 600 {path}"):
        load_credential(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)  # as of a secret that systemd or Docker provides
    assert load_credential(path) == HOME


def test_missing_key_error_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(KeyMissing, match="hearth key new"):
        load_credential(tmp_path / "none")


def test_keys_differ_between_roles_and_homes() -> None:
    keys = {
        derive_keypair(home.key_bytes(), role).public
        for home in (HOME, new_home_key())
        for role in ("agent", "coordinator", "admin")
    }  # type: ignore[arg-type]
    assert len(keys) == 6
    assert len({fingerprint(key) for key in keys}) == 6
    assert coordinator_access(HOME) == coordinator_access(parse_credential(format_credential(HOME), "test"))


def test_app_key_cannot_access_agents() -> None:
    with pytest.raises(NotAuthorised):
        agent_access(AppKey(name="lamp", secret=new_keypair().secret, coordinator_public=new_keypair().public))


def test_device_key_serves_its_home_and_reaches_nobody() -> None:
    shared, own, other = agent_trust(HOME), *(agent_trust(new_device_key(HOME, "kitchen")) for _ in range(2))
    assert (own.coordinator_public, own.admin_public) == (shared.coordinator_public, shared.admin_public)
    assert len({shared.own, own.own, other.own}) == 3
    with pytest.raises(NotAuthorised, match="device"):
        agent_access(new_device_key(HOME, "kitchen"))


def test_default_key_path_follows_the_environment(tmp_path: Path) -> None:
    assert default_key_path({"HEARTH_KEY": "/x"}) == Path("/x")
    assert default_key_path({"HOME": "/home/u"}) == Path("/home/u/.config/hearth/key")
    (tmp_path / "home.key").touch()
    assert default_key_path({"CREDENTIALS_DIRECTORY": str(tmp_path), "HOME": "/h"}) == tmp_path / "home.key"


# ---- real sockets ---------------------------------------------------------------------------------------------------


class Guarded:
    """A server that admits the keys in `admitted` and records the messages that reach it."""

    def __init__(self) -> None:
        self.admitted: set[str] = set()
        self.received: list[Caller] = []
        self.keys = new_keypair()
        self.port = 0

    async def handle(self, caller: Caller, message: Any, payload: Any) -> Done:
        self.received.append(caller)
        return Done()


@asynccontextmanager
async def guarded() -> Any:
    """The server, and a function that makes clients; all are closed at the end."""
    guard, clients = Guarded(), list[RpcClient]()
    with zmq_context() as clients_context:

        def client(own: KeyPair, server_public: str | None = None) -> RpcClient:
            access = Access(own, server_public or guard.keys.public)
            clients.append(RpcClient(clients_context, f"tcp://127.0.0.1:{guard.port}", access, "test"))
            return clients[-1]

        async with rpc_server(guard.keys, guard.handle, admits=lambda key: key in guard.admitted) as server:
            guard.port = server.port
            try:
                yield guard, client
            finally:
                for each in clients:
                    await each.close()


async def test_admitted_key_gets_through_and_is_identified() -> None:
    async with guarded() as (guard, client):
        known_key, unknown_key = new_keypair(), new_keypair()
        guard.admitted.add(known_key.public)
        with pytest.raises(WrongKey):
            await client(unknown_key).call(GetReadiness(), timeout_seconds=30)
        with pytest.raises(HearthError) as wrong_server:  # the server does not have the expected key
            await client(known_key, new_keypair().public).call(GetReadiness(), timeout_seconds=2)
        assert isinstance(wrong_server.value, WrongKey | Unreachable)
        assert guard.received == []
        await client(known_key).call(GetReadiness(), timeout_seconds=30)
        assert [caller.public_key for caller in guard.received] == [known_key.public]


async def test_revoked_key_cannot_reconnect() -> None:
    async with guarded() as (guard, client):
        known_key = new_keypair()
        guard.admitted.add(known_key.public)
        await client(known_key).call(GetReadiness(), timeout_seconds=30)
        guard.admitted.clear()
        with pytest.raises(WrongKey):
            await client(known_key).call(GetReadiness(), timeout_seconds=30)


async def test_client_without_a_key_gets_no_answer() -> None:
    async with guarded() as (guard, _):
        with zmq_context() as context:
            plain = context.socket(zmq.DEALER)
            plain.linger = 0
            plain.connect(f"tcp://127.0.0.1:{guard.port}")
            await plain.send_multipart([bytes(8), b"hello"])
            assert not await plain.poll(500)
            assert guard.received == []


def test_server_that_does_not_answer_is_tried_again_before_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "_CONNECT_MS", 100)
    with zmq.Context() as context, socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        # The first connection fills the queue: the kernel drops the packets of further ones.
        with socket.create_connection(("127.0.0.1", port)), context.socket(zmq.DEALER) as client:
            curve.harden(client)
            with client.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED) as monitor:
                client.connect(f"tcp://127.0.0.1:{port}")
                assert monitor.poll(900)  # the kernel repeats its first packet after 1 s
                client.disable_monitor()


async def test_server_without_gatekeeper_rejects_all_keys() -> None:
    """Without a ZAP handler, ZeroMQ admits every key by default; ZAP_ENFORCE_DOMAIN changes that."""
    keys = new_keypair()
    with zmq_context() as context, zmq_context() as client_context:
        server = context.socket(zmq.ROUTER)
        secure_server(server, keys, "test")
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client = RpcClient(client_context, f"tcp://127.0.0.1:{port}", Access(new_keypair(), keys.public), "test")
        with pytest.raises((WrongKey, Unreachable)):
            await client.call(GetReadiness(), timeout_seconds=1)
        assert not await server.poll(0)
        await client.close()


async def test_rule_that_fails_refuses_one_key_and_the_next_is_decided_again() -> None:
    async with guarded() as (guard, client):
        known_key = new_keypair()
        guard.admitted = None
        with pytest.raises((WrongKey, Unreachable)):
            await client(known_key).call(GetReadiness(), timeout_seconds=1)
        guard.admitted = {known_key.public}
        await client(known_key).call(GetReadiness(), timeout_seconds=30)


async def test_handshake_that_cannot_be_answered_does_not_end_the_gatekeeper(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, failures = Authenticator.handle_zap_message, [RuntimeError("a fault")]

    async def fail_once(self: Authenticator, message: list[bytes]) -> None:
        if failures:
            raise failures.pop()
        await answer(self, message)

    monkeypatch.setattr(Authenticator, "handle_zap_message", fail_once)
    monkeypatch.setattr(curve, "_HANDSHAKE_MS", 500)  # then the client tries again

    async with guarded() as (guard, client):
        known_key = new_keypair()
        guard.admitted.add(known_key.public)
        await client(known_key).call(GetReadiness(), timeout_seconds=30)
        assert failures == []
