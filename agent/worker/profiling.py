"""Input and output of profiler processes: a `StartProfile` on stdin, a `Profiled` or `Failed` on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hearth.errors import BadMessage, HearthError
from hearth.plan.profile import BlockProfile
from hearth.wire.messages import Failed, GraphProfile, Message, Profiled, StartProfile, decode, encode


def serve_one(measure: Callable[[StartProfile], BlockProfile | GraphProfile]) -> None:
    """Read the daemon's request and write the result of `measure`, or its HearthError."""
    answer: Message
    try:
        start = decode(sys.stdin.buffer.read())
        if not isinstance(start, StartProfile):
            raise BadMessage(reason=f"a profiler does not accept {type(start).__name__}")
        answer = Profiled(result=measure(start))
    except HearthError as error:
        answer = Failed.of(error)
    sys.stdout.buffer.write(encode(answer))
