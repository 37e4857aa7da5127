"""Damaged frames at the sockets of a home, from strangers and with keys that it admits: all programs live on and answer."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zmq
from support.home import LOOPBACK, TestHome, home_of
from support.models import save_random_model, small_bert
from support.mutations import mutated
from support.profiles import MeasuredProfiles
from support.tokens import new_token

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from hearth.platform.curve import new_keypair, secure_client
from hearth.platform.security import (
    Access,
    HomeKey,
    admin_key,
    agent_access,
    coordinator_access,
    load_credential,
    parse_token,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow]

GOLDEN = Path(__file__).parents[1] / "hearth" / "wire" / "golden_messages.json"  # one valid message of each type
FRAMES = 20_000  # of each attacker with a key
STRANGERS, KNOCKS = 200, 20  # connections without a valid key, and frames of each
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(54, b"\0")  # of ZeroMQ's protocol
SEND_SECONDS = 5.0  # after which a peer that takes no more frames gets a new connection
TOKENS = list(range(5, 45))


@pytest.fixture
def home(profiles: MeasuredProfiles, tmp_path: Path) -> Iterator[TestHome]:
    model = save_random_model(tmp_path / "model", small_bert())
    with home_of(["a", "b"], tmp_path / "home", model, profiles, "--strategy", "hmp") as home:
        home.ready().close()
        yield home


def frames(valid: list[bytes], chance: random.Random) -> list[bytes]:
    """A request with a damaged message, often with payload, sometimes with a wrong envelope."""
    payload = [chance.randbytes(chance.randrange(64)) for _ in range(chance.choice((0, 0, 1, 2, 5)))]
    envelope = chance.randbytes(8 if chance.random() < 0.95 else chance.randrange(20))
    return [envelope, mutated(valid, chance), *payload] if chance.random() < 0.98 else [envelope]


def send(access: Access | None, port: int, count: int, valid: list[bytes], chance: random.Random) -> int:
    """Send damaged requests over one connection. Returns how many it took."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.sndtimeo = 0, int(SEND_SECONDS * 1000)
        if access is not None:
            secure_client(dealer, access.own, access.server_public)
        dealer.connect(f"tcp://{LOOPBACK}:{port}")
        for sent in range(count):
            try:
                dealer.send_multipart(frames(valid, chance))
            except zmq.Again:
                return sent
            while dealer.poll(0):
                dealer.recv_multipart()
        return count


def test_home_answers_during_damaged_frames_and_no_program_ends(home: TestHome) -> None:
    key = load_credential(home.key)
    assert isinstance(key, HomeKey)
    valid = [bytes.fromhex(text) for text in json.loads(GOLDEN.read_text()).values()]
    server = coordinator_access(key).server_public
    app = coordinator_access(parse_token(new_token(home, "attacker"), server))
    before = {name: (home.pid(name), home.worker_pid(name)) for name in ("a", "b")}
    coordinator, agent = home.port("coordinator"), home.port("a")
    ended = threading.Event()

    def attack(number: int, access: Access, port: int) -> None:
        chance, left = random.Random(number), FRAMES
        while left > 0 and not ended.is_set():
            left -= max(send(access, port, min(left, 1000), valid, chance), 1)

    def knock() -> None:
        chance = random.Random(3)
        for number in range(STRANGERS):
            port = (coordinator, agent)[number % 2]
            send(Access(new_keypair(), server) if number % 4 else None, port, KNOCKS, valid, chance)
            with suppress(OSError), socket.create_connection((LOOPBACK, port), 2.0) as plain:
                plain.sendall(GREETING[: chance.randrange(len(GREETING) + 1)] + mutated(valid, chance))

    attackers = [
        threading.Thread(target=attack, args=(1, app, coordinator)),
        threading.Thread(target=attack, args=(2, agent_access(admin_key(key)), agent)),
        threading.Thread(target=knock),
    ]
    with home.connect() as client:
        expected = client.hidden_states(TOKENS)
        for attacker in attackers:
            attacker.start()
        answers, until = 0, time.monotonic() + 300.0
        while any(attacker.is_alive() for attacker in attackers) and time.monotonic() < until:
            np.testing.assert_allclose(client.hidden_states(TOKENS), expected, atol=1e-5)
            answers += 1
        ended.set()
        for attacker in attackers:
            attacker.join(60.0)
        assert answers > 10
    assert {name: (home.pid(name), home.worker_pid(name)) for name in before} == before
    assert all(map(home.runs, ("a", "b", "coordinator")))
    assert "Traceback" not in "".join(map(home.log, ("a", "b", "coordinator")))
