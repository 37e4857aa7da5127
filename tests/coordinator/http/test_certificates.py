"""Self-made certificates, as OpenSSL sees them in the handshake of a client that trusts the authority."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import stat
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from support.waiting import until

pytest.importorskip("cryptography")

from coordinator.http import certificates
from coordinator.http.certificates import certified_names, own_certificate
from hearth.errors import BadSetting
from hearth.platform.asyncio_tools import cancel_all

NOW = datetime.now(timezone.utc)
NAMES = ("kitchen", "kitchen.local", "localhost", "192.168.7.9", "fd00::7")


def server(chain: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return context


def client(authority: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default since Python 3.13
    return context


def handshake(name: str, of_client: ssl.SSLContext, of_server: ssl.SSLContext) -> None:
    """Raises ssl.SSLCertVerificationError if the client does not accept the certificate for this name."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (of_client.wrap_bio(back, there, server_hostname=name), of_server.wrap_bio(there, back, server_side=True))
    done = [False, False]
    while not all(done):
        for index, end in enumerate(ends):
            try:
                end.do_handshake()
                done[index] = True
            except ssl.SSLWantReadError:
                pass


@pytest.mark.parametrize("name", NAMES)
def test_client_that_trusts_the_authority_accepts_every_name(name: str, tmp_path: Path) -> None:
    made = own_certificate(tmp_path, NAMES, NOW)
    handshake(name, client(made.authority), server(made.chain))


def test_client_refuses_another_name_and_a_gateway_of_another_authority(tmp_path: Path) -> None:
    made, other = (own_certificate(tmp_path / name, NAMES, NOW) for name in "ab")
    for name, authority in (("192.168.7.10", made), ("garage.local", made), ("kitchen.local", other)):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(name, client(authority.authority), server(made.chain))
    with pytest.raises(ssl.SSLCertVerificationError):  # the authorities of the operating system do not know it
        handshake("kitchen.local", ssl.create_default_context(), server(made.chain))


def test_authority_cannot_vouch_for_a_site_of_the_internet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with its key: clients check what its certificate permits."""
    authority = own_certificate(tmp_path, NAMES, NOW)
    monkeypatch.setattr("coordinator.http.certificates._may_vouch", lambda *_: True)
    forged = own_certificate(tmp_path, ("bank.example.org",), NOW)
    assert forged.fingerprint == authority.fingerprint
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree"):
        handshake("bank.example.org", client(authority.authority), server(forged.chain))


def test_name_outside_the_home_that_the_user_allows_makes_an_authority_for_it(tmp_path: Path) -> None:
    before = own_certificate(tmp_path, NAMES, NOW)
    made = own_certificate(tmp_path, (*NAMES, "hearth.example.org"), NOW)
    assert made.fingerprint != before.fingerprint
    handshake("hearth.example.org", client(made.authority), server(made.chain))
    handshake("kitchen.local", client(made.authority), server(made.chain))


def test_only_the_owner_can_read_the_keys(tmp_path: Path) -> None:
    made = own_certificate(tmp_path / "tls", NAMES, NOW)
    with_keys = [path for path in (tmp_path / "tls").iterdir() if b"PRIVATE KEY" in path.read_bytes()]
    assert made.chain in with_keys
    assert made.authority not in with_keys
    assert {stat.S_IMODE(path.stat().st_mode) for path in with_keys} == {0o600}


def test_certificate_is_kept_until_it_ends_soon_or_lacks_an_address(tmp_path: Path) -> None:
    made = own_certificate(tmp_path, NAMES, NOW)
    assert made.is_new
    kept = own_certificate(tmp_path, NAMES[:3], NOW + timedelta(days=59))  # an address that is gone changes nothing
    assert not kept.is_new
    with_address = own_certificate(tmp_path, (*NAMES, "10.1.2.3"), NOW)
    late = own_certificate(tmp_path, NAMES, NOW + timedelta(days=61))
    early = own_certificate(tmp_path, NAMES, NOW - timedelta(days=400))  # the clock was ahead, and was set back
    assert [each.is_new for each in (with_address, late, early)] == [True, True, True]
    assert {each.fingerprint for each in (kept, with_address, late, early)} == {made.fingerprint}


def test_lost_or_damaged_files(tmp_path: Path) -> None:
    made = own_certificate(tmp_path, NAMES, NOW)
    made.authority.unlink()  # it can be had from the other file
    assert own_certificate(tmp_path, NAMES, NOW).authority.exists()
    made.chain.write_text("no certificate")
    with pytest.raises(BadSetting, match="without its files, new ones are made"):
        own_certificate(tmp_path, NAMES, NOW)
    shutil.rmtree(tmp_path)
    assert own_certificate(tmp_path, NAMES, NOW).fingerprint != made.fingerprint


def test_folder_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadSetting, match="Not a directory"):
        own_certificate(tmp_path / "file", NAMES, NOW)


def test_names_are_those_under_which_this_computer_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Kitchen.example.org")
    monkeypatch.setattr("coordinator.http.certificates.all_addresses", lambda: ["192.168.7.9"])
    own = ("kitchen.example.org", "kitchen.local", "localhost")
    assert certified_names("10.0.0.5") == (*own, "10.0.0.5")
    assert certified_names("fe80::1%eth0", ["nas"]) == (*own, "nas", "fe80::1")
    assert certified_names("0.0.0.0") == (*own, "127.0.0.1", "::1", "192.168.7.9")


async def test_running_gateway_renews_its_certificate(tmp_path: Path) -> None:
    """Connections that begin later get the new one, without a restart."""
    clock = [NOW - timedelta(days=100)]
    keeper = certificates.OwnTls(tmp_path, "127.0.0.1", (), lambda: clock[0])
    context, of_client = server(keeper.chain), client(keeper.authority)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake("127.0.0.1", of_client, context)
    keeping = asyncio.create_task(keeper.keep(context, 0.001))
    clock[0] = NOW

    def is_accepted() -> bool:
        with suppress(ssl.SSLCertVerificationError):
            handshake("127.0.0.1", of_client, context)
            return True
        return False

    await until("the renewal", is_accepted)
    await cancel_all([keeping])
