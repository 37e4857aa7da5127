"""ZAP: which public keys pass the handshake of CURVE sockets. It imports neither asyncio nor pydantic."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.auth.base import Authenticator

from hearth.platform.curve import fingerprint
from hearth.platform.refusals import Refusals

log = logging.getLogger(__name__)

AdmitRule = Callable[[str], bool]


class _Callback:
    """A credentials provider as pyzmq expects it. A rule that fails refuses this key; the next one is decided anew."""

    def __init__(self, admit: AdmitRule, refusals: Refusals) -> None:
        self._admit = admit
        self._refusals = refusals

    def callback(self, domain: str, key: bytes) -> bool:
        public_key = key.decode()
        try:
            admitted = self._admit(public_key)
            if not admitted:
                self._refusals.note(f"the key {fingerprint(public_key)}")
            return admitted
        except Exception:
            log.exception("whether %s may connect could not be decided; it is refused", fingerprint(public_key))
            return False


class PolledAuthenticator(Authenticator):
    """pyzmq's authenticator for a program that polls its sockets itself, and calls `answer` when `zap_socket` is readable."""

    def answer(self) -> None:
        """Answer one handshake."""
        message = self.zap_socket.recv_multipart(zmq.NOBLOCK)
        with suppress(StopIteration):
            self.handle_zap_message(message).send(None)  # our rules wait for nothing


class Gatekeeper:
    """The ZAP handler of a context. Each domain has its own rule; a domain without a rule admits no key.

    `refusals` counts the keys that were not admitted.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self.refusals = Refusals("connections")
        self._authenticator = authenticator
        # Without any rule, pyzmq falls back to stored certificates; this rule for an unused domain prevents that.
        self._authenticator.configure_curve_callback("-", _Callback(lambda key: False, self.refusals))

    def admit(self, domain: str, rule: AdmitRule) -> None:
        """Set the rule of a domain. `rule(public_key)` is called at every handshake."""
        self._authenticator.configure_curve_callback(domain, _Callback(rule, self.refusals))

    def start(self) -> None:
        """Start answering handshakes. Until then, no key is admitted."""
        self._authenticator.start()

    def stop(self) -> None:
        """Stop answering handshakes."""
        self._authenticator.stop()
