"""Settings for all tests."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from support import file_calls

if TYPE_CHECKING:
    from support.profiles import MeasuredProfiles

# numpy's threads start with each process that imports it, and wait busily for work that never comes: 0.1 s of processor time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# No deadline: test machines are shared, and benchmarks check speed. `--hypothesis-profile` names another size.
settings.register_profile("quick", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("quick"), max_examples=10)  # for a second Python version
settings.register_profile("ci", settings.get_profile("quick"), max_examples=60)
settings.register_profile("nightly", settings.get_profile("quick"), max_examples=200)
settings.load_profile("ci" if "CI" in os.environ else "quick")


# Clients keep the last endpoint of each home that they find.
os.environ["CACHE_DIRECTORY"] = tempfile.mkdtemp(prefix="hearth-tests-")
atexit.register(shutil.rmtree, os.environ["CACHE_DIRECTORY"], ignore_errors=True)

_file_calls: list[str] = []  # of coroutines, since the last test
file_calls.watch(_file_calls.append)

COROUTINE_LIMIT_SECONDS = 120.0  # reached only by tests that hang, also on a busy machine


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> MeasuredProfiles:
    """Profiles of this machine, shared by the homes of all tests, also of those in other processes of pytest-xdist."""
    from support.profiles import MeasuredProfiles  # few tests need what it imports

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "profiles"
    folder.mkdir(exist_ok=True)
    return MeasuredProfiles(folder)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadscope`, tests of homes in one file run in one process, since they share a home; others are spread.

    Groups of `--dist loadgroup` would say the same, but pytest-xdist 3.8 cannot set them with pytest 9.
    """
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def has_homes(file: str) -> bool:
        return re.search(r"mark\.(processes|namespaces)", (config.rootpath / file).read_text()) is not None

    class HomesStayTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return file if has_homes(file) else nodeid

    return HomesStayTogether(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests of homes first. Skip slow and thorough tests, and say how to run them, unless `-m` decides about them."""
    items.sort(key=lambda item: not _starts_processes(item))
    skips = {"slow": "slow: run `make test-slow`, or pytest with `-m slow`"}
    if "CI" not in os.environ:
        skips["thorough"] = "thorough: run `CI=1 make test`, or pytest with `-m thorough`"
    for name, reason in skips.items():
        for item in items:
            marks = [mark for mark in ("slow", "thorough") if item.get_closest_marker(mark) is not None]
            if marks[:1] == [name] and name not in config.getoption("markexpr"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _starts_processes(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("processes", "namespaces"))


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function in an event loop of its own, in which the context managers among its fixtures are entered."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        task = asyncio.current_task()
        asyncio.get_running_loop().call_later(COROUTINE_LIMIT_SECONDS, task.cancel)
        async with AsyncExitStack() as stack:
            arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test in which an event loop accesses files."""
    yield
    found, _file_calls[:] = "\n".join(dict.fromkeys(_file_calls)), []
    assert not found, f"{file_calls.MARK}\n{found}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt all that is imported by now from garbage collection: each full collection would take 0.3 s for it."""
    gc.collect()
    gc.freeze()
