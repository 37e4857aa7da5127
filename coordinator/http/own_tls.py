"""Keeps the certificate of a running gateway valid: renews it before it ends, and when the addresses change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from coordinator.http.certificates import OwnCertificate, certified_names, own_certificate
from hearth.errors import BadSetting

log = logging.getLogger(__name__)

_LOOK_SECONDS = 60.0  # an address that a router has changed is certified after this


class OwnTls:
    """The certificate of a gateway that listens on the address `listen`, and is asked under the names `more`, too."""

    def __init__(
        self,
        folder: Path,
        listen: str,
        more: Sequence[str],
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        """Make the certificate, or take that of earlier runs. Raises BadSetting."""
        self._now = now
        self._folder = folder
        self._listen = listen
        self._more = more
        made = self._current()
        self.chain, self.authority, self.fingerprint = made.chain, made.authority, made.fingerprint

    async def keep(self, context: ssl.SSLContext, interval_seconds: float = _LOOK_SECONDS) -> None:
        """Renew the certificate in time, for connections that begin from then on, until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                made = self._current()
            except BadSetting as error:
                log.warning("%s", error)
                continue
            if made.is_new:
                context.load_cert_chain(made.chain)
            if made.fingerprint != self.fingerprint:
                self.fingerprint = made.fingerprint
                log.warning(
                    "clients have to trust another authority now: %s, SHA-256 %s", made.authority, made.fingerprint
                )

    def _current(self) -> OwnCertificate:
        names = certified_names(self._listen, self._more)
        return own_certificate(self._folder, names, self._now())
