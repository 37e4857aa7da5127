"""Chat templates, which are third-party code: each is rendered in a confined process of its own, which can be killed.

That process (`main`) reads lines of JSON: the template, then the variables of each chat. It answers each chat with one line. It
imports what a template needs and nothing else, since the first chat may wait for it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from coordinator.models.limits import RENDER_MEMORY_BYTES, RENDER_SECONDS, RENDERED_CHARACTERS, RENDERED_FACTOR
from hearth.platform.confine import confine_reader

if TYPE_CHECKING:
    import jinja2

_MODULE = "coordinator.serve.text.templates"
_MAX_ERROR_CHARACTERS = 1000
_ESCAPED_BYTES = 12  # of JSON, at most, for one character


class TemplateFailed(Exception):
    """The template does not render these variables. The text says why."""


class ChatTemplate:
    """A template and its process, which ends with this object. Thread-safe."""

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        self.source = source
        self._now = now
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = b""  # what that process gets before the first chat

    def render(self, variables: Mapping[str, object]) -> str:
        """The text of a chat. Raises TemplateFailed, at the latest after `RENDER_SECONDS`."""
        chat = json.dumps({"now": self._now().isoformat(), "variables": variables}).encode()
        with self._lock:
            process = self.process()
            assert process.stdin is not None
            assert process.stdout is not None
            answered = select.poll()
            answered.register(process.stdout, select.POLLIN)
            try:
                process.stdin.write(self._unsent + chat + b"\n")
                process.stdin.flush()
                self._unsent = b""
                if not answered.poll(RENDER_SECONDS * 1000):
                    process.kill()
                answer = json.loads(process.stdout.readline(_ESCAPED_BYTES * _max_characters(chat)))
            except (OSError, ValueError):
                _end(process)
                raise TemplateFailed(f"it takes longer than {RENDER_SECONDS:g} s, or crashes") from None
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        return str(answer["text"])

    def process(self) -> subprocess.Popen[bytes]:
        """The process. It starts if it does not run, without being ready yet, and ends with the thread that starts it."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "hearth.platform.child_main", str(os.getpid()), _MODULE]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            weakref.finalize(self, _end, self._process)
            self._unsent = json.dumps(self.source).encode() + b"\n"
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _max_characters(chat: bytes) -> int:
    return RENDERED_FACTOR * len(chat) + RENDERED_CHARACTERS


# ---- in the process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Render the chats on stdin until it ends."""
    import jinja2.sandbox  # noqa: F401 (before memory is limited)

    lines = iter(sys.stdin.buffer)
    source, chat = json.loads(next(lines, b'""')), dict[str, Any]()
    confine_reader((), (), RENDER_MEMORY_BYTES)
    template = cache(lambda: compile_template(source, lambda: datetime.fromisoformat(chat["now"])))
    for line in lines:
        try:
            chat.update(json.loads(line))
            text = template().render(chat["variables"])
            if len(text) > _max_characters(line):
                raise ValueError(f"it makes a chat of {len(line)} bytes {len(text)} characters long")
            answer = {"text": text}
        except Exception as error:  # a template may raise anything
            answer = {"error": (str(error) or type(error).__name__)[:_MAX_ERROR_CHARACTERS]}
        print(json.dumps(answer), flush=True)


def compile_template(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    """Compile in a sandbox, since templates are untrusted, with the functions and filters that published ones use."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Accepts `{% generation %}`, which marks assistant text for training, and renders its content unchanged."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own filter escapes for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment.from_string(source)


if __name__ == "__main__":
    main()
