"""Request loop of a benchmark's child process: JSON requests over a socket, one at a time."""

from __future__ import annotations

import json
from typing import Any

import zmq

from hearth.errors import HearthError


def serve(address: str, target: object) -> None:
    """Answer requests `{"do": METHOD, ...}` by calling methods of `target`, until the parent ends this process."""
    socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(address)
    while True:
        request = json.loads(socket.recv())
        try:
            answer = getattr(target, request.pop("do"))(**request)
        except Exception as error:
            what = str(error) if isinstance(error, HearthError) else f"{type(error).__name__}: {error}"
            answer = {"error": what}
        socket.send(json.dumps(answer).encode())
