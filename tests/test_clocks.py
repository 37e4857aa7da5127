"""Which code reads which clock. Nothing depends on the wall clock, which may jump by years on a board without a battery."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What reads the wall clock. Each has a test in which it jumps by a year, or only shows the time to people.
WALL_CLOCK = {
    "agent/daemon/daemon.py",  # telemetry: `hearth doctor` compares the devices' clocks
    "agent/daemon/store.py",  # use of chunks: tests/agent/daemon/test_store.py
    "coordinator/cli/doctor_checks.py",
    "coordinator/cli/render/events.py",  # shows when an event happened
    "coordinator/cli/commands/status.py",  # shows the time of day
    "coordinator/http/certificates.py",  # when a certificate ends
    "coordinator/devices/profile_cache.py",  # age of measured links: tests/coordinator/devices/test_profiling.py
    "coordinator/http/ollama/common.py",  # when an answer was made, as Ollama's API shows it
    "coordinator/http/openai/common.py",  # the same in OpenAI's
    "coordinator/serve/events/stream.py",  # when an event happened, for people: events are ordered by their numbers
    "coordinator/serve/opening.py",  # the same when its template is tried
    "coordinator/serve/text/prompts.py",  # today's date in a chat template
    "coordinator/serve/text/templates.py",  # which it renders
    "hearth/platform/socket_folder.py",  # age of a folder whose lock is free: the lock decides, a wrong clock only delays
}
_WALL_CLOCK_CALLS = {
    "time.time", "time.time_ns", "time.gmtime", "time.localtime", "time.strftime", "time.ctime", "datetime.now",
    "datetime.today", "datetime.utcnow", "date.today",
}  # fmt: skip
# Code in an event loop takes the time from it, so that the simulation can run it on a virtual clock.
_LOOP_FOLDERS = ("agent/daemon", "coordinator/deploy", "coordinator/devices", "coordinator/serve", "hearth/client",
                 "hearth/platform", "hearth/wire")  # fmt: skip
_MONOTONIC_CALLS = {"time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns", "time.sleep"}
PLANNER = "coordinator/serve/planners/child.py"  # measures its search in a process of its own


def modules(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def reads(tree: ast.AST, clocks: set[str]) -> bool:
    """Whether the code names one of these functions, also by an import of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in clocks:
            return True
        if isinstance(node, ast.ImportFrom) and any(f"{node.module}.{each.name}" in clocks for each in node.names):
            return True
    return False


def imports_asyncio(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Import) and any(each.name == "asyncio" for each in node.names)
               for node in ast.walk(tree))  # fmt: skip


def test_only_these_modules_read_the_wall_clock() -> None:
    found = {path for path, tree in modules("agent", "coordinator", "hearth") if reads(tree, _WALL_CLOCK_CALLS)}
    assert found == WALL_CLOCK


def test_code_of_the_event_loop_takes_the_time_from_the_loop() -> None:
    found = {
        path
        for path, tree in modules(*_LOOP_FOLDERS)
        if imports_asyncio(tree) and reads(tree, _MONOTONIC_CALLS) and path != PLANNER
    }
    assert found == set()


def test_clocks_are_recognised() -> None:
    for line in ("time.time()", "clock = time.time", "from time import time", "datetime.now().isoformat()"):
        assert reads(ast.parse(line), _WALL_CLOCK_CALLS), line
    for line in ("time.monotonic()", "loop.time()", "self.time.time_of_day()"):
        assert not reads(ast.parse(line), _WALL_CLOCK_CALLS), line
