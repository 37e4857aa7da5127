"""The address of the HTTP gateway that the coordinator starts."""

from __future__ import annotations

import pytest

from coordinator.http.settings import HTTP_PORT
from coordinator.serve.clients.http_gateway import http_address
from hearth.errors import BadSetting


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1", ("127.0.0.1", HTTP_PORT)), ("kitchen.local:80", ("kitchen.local", 80)), ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:8080", ("::1", 8080)),
    ],
)  # fmt: skip
def test_address_with_and_without_a_port(text: str, address: tuple[str, int]) -> None:
    assert http_address(text) == address


@pytest.mark.parametrize("text", ["", ":80", "a:b", "a:70000", "a/b", "user@a", "a b"])
def test_bad_address_names_the_option(text: str) -> None:
    with pytest.raises(BadSetting, match="--http"):
        http_address(text)
