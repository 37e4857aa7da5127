"""The trace that refused connections and messages leave in the log."""

from __future__ import annotations

import logging

import pytest

from hearth.platform.curve import fingerprint, new_keypair
from hearth.platform.gatekeeper import _Callback
from hearth.platform.refusals import Refusals


def test_refusals_are_logged_at_once_and_then_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    refusals = Refusals("messages", lambda: now)
    with caplog.at_level(logging.WARNING):
        refusals.note("the first")
        for _ in range(5000):
            refusals.note("a flood")
        now += 10.0
        refusals.note("the last")
    assert caplog.messages == [
        "messages refused: 1 more; the last: the first",
        "messages refused: 5001 more; the last: the last",
    ]
    assert refusals.count == 5002


def test_key_that_is_not_admitted_is_logged_with_its_fingerprint(caplog: pytest.LogCaptureFixture) -> None:
    stranger = new_keypair().public
    refusals = Refusals("connections")
    with caplog.at_level(logging.WARNING):
        assert not _Callback(lambda key: False, refusals).callback("a domain", stranger.encode())
    assert refusals.count == 1
    assert fingerprint(stranger) in caplog.text
    assert stranger not in caplog.text
