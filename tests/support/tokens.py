"""Bearer tokens of a test's home."""

from __future__ import annotations

from support.home import TestHome

from hearth.platform.curve import new_keypair
from hearth.platform.security import AppKey, HomeKey, coordinator_access, format_token, load_credential
from hearth.wire.messages import AppRole


def new_token(home: TestHome, name: str, role: AppRole = "app") -> str:
    """Admit an app of this name; returns its token."""
    credential = load_credential(home.key)
    assert isinstance(credential, HomeKey)
    pair = new_keypair()
    with home.connect() as client:
        client.add_app(name, pair.public, role=role)
    public = coordinator_access(credential).server_public
    return format_token(AppKey(name=name, secret=pair.secret, coordinator_public=public))
