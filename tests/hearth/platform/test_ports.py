"""Whether a port of another computer refuses connections."""

from __future__ import annotations

import asyncio
import socket

from hearth.platform.ports import refuses_connections


def test_only_a_port_where_nothing_listens_refuses_connections() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            assert not await refuses_connections("127.0.0.1", port, 5.0)
        assert await refuses_connections("127.0.0.1", port, 5.0)
        assert not await refuses_connections("no such computer", port, 5.0)

    asyncio.run(main())
