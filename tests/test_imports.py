"""Who may import what, read from the source; and what gets loaded, seen in a fresh interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("hearth", "agent", "coordinator")
ML_LIBRARIES = {"torch", "onnxruntime", "transformers"}

# Decide in pure functions, act at the edge: these modules get time, randomness and environment as arguments.
PURE = (
    "hearth.wire.codec",
    "hearth.errors",
    "hearth.wire.framing",
    "hearth.plan.geometry",
    "coordinator.models.onnx.contrib",
    "coordinator.models.onnx.cutting",
    "coordinator.models.onnx.flops",
    "hearth.plan.graph",
    "hearth.plan.graph_spec",
    "hearth.wire.messages",
    "hearth.plan.rotary",
    "hearth.plan.model_spec",
    "hearth.plan.transformer",
    "hearth.plan.profile",
    "hearth.plan.rings",
    "hearth.trace",
    "hearth.platform.units",
    "agent.daemon.lease",
    "agent.worker.graph.kernels",
    "agent.worker.graph.schedule",
    "agent.worker.transformer.generation.sampling",
    "agent.worker.transformer.generation.scheduler",
    "coordinator.plan.transformer.cost.predict",
    "coordinator.plan.transformer.cost.decode",
    "coordinator.plan.transformer.cost.step_graph",
    "coordinator.plan.graph.rebalance",
    "coordinator.cli.picture_layout",
    "coordinator.plan.graph.memory",
    "coordinator.plan.graph.price",
    "coordinator.plan.graph.request",
    "coordinator.plan.graph.wire",
    "coordinator.plan.transformer.cost.memory",
    "coordinator.plan.transformer.cost.pipeline_graph",
    "coordinator.plan.graph.throughput.k_path",
    "coordinator.plan.graph.throughput.links",
    "coordinator.plan.graph.throughput.partitions",
    "coordinator.plan.graph.throughput.baselines",
    "coordinator.plan.graph.throughput.exact",
    "coordinator.plan.graph.throughput.problem",
    "coordinator.plan.graph.throughput.published",
    "coordinator.plan.graph.throughput.search",
    "coordinator.plan.graph.throughput.points",
    "coordinator.plan.transformer.make",
    "coordinator.devices.pooling",
    "coordinator.devices.registry",
    "coordinator.plan.simulator",
    "coordinator.deploy.spread",
)
IMPURE_LIBRARIES = {
    "asyncio", "datetime", "os", "psutil", "random", "secrets", "select", "socket", "subprocess", "threading",
    "time", "zeroconf", "zmq",
}  # fmt: skip


class Import(NamedTuple):
    """One import statement's target. `runtime` is False for what only a type checker reads."""

    target: str
    line: int
    runtime: bool


class Source(NamedTuple):
    name: str
    path: Path
    imports: tuple[Import, ...]

    def where(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def read(path: Path, root: Path = ROOT) -> Source:
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    package = name if is_package else name.rpartition(".")[0]
    return Source(name, path, tuple(imports_of(ast.parse(path.read_text()), package)))


def imports_of(node: ast.AST, package: str, runtime: bool = True) -> Iterator[Import]:
    """Every import below a node, also inside functions, and `import_module("...")` with a literal name."""
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, runtime) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *filter(None, [node.module])])
        # `from package import module` imports the module as well; that a name is none does no harm here.
        yield from (Import(f"{base}.{alias.name}", node.lineno, runtime) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        yield from (Import(ast.literal_eval(a), node.lineno, runtime) for a in node.args[:1] if is_text(a))
    if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
        for statement in node.body:
            yield from imports_of(statement, package, runtime=False)
        for statement in node.orelse:
            yield from imports_of(statement, package, runtime)
        return
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child, package, runtime)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


SOURCES = {
    source.name: source
    for package in PACKAGES
    for source in map(read, sorted((ROOT / package).rglob("*.py")))
}  # fmt: skip


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def library(target: str) -> str:
    return target.partition(".")[0]


def breaches(of: Callable[[str], bool], forbidden: Callable[[Import], bool]) -> list[str]:
    """Imports that a rule forbids, as `file:line imports target`."""
    return [
        f"{source.where(found.line)} imports {found.target}"
        for source in SOURCES.values()
        if of(source.name)
        for found in source.imports
        if forbidden(found)
    ]


def own_module(target: str) -> str | None:
    """The module of ours that an import of `target` loads, or None for a library."""
    while target:
        if target in SOURCES:
            return target
        target = target.rpartition(".")[0]
    return None


@pytest.mark.parametrize(
    ("package", "others"),
    [("hearth", ("agent", "coordinator")), ("agent", ("coordinator",)), ("coordinator", ("agent",))],
)
def test_agent_and_coordinator_share_only_hearth(package: str, others: tuple[str, ...]) -> None:
    assert not breaches(lambda name: is_under(name, package), lambda found: library(found.target) in others)


def test_only_the_worker_imports_the_machine_learning_libraries() -> None:
    assert not breaches(
        lambda name: not is_under(name, "agent.worker"), lambda found: library(found.target) in ML_LIBRARIES
    )


def test_the_daemon_imports_neither_numpy_nor_the_worker() -> None:
    assert not breaches(
        lambda name: is_under(name, "agent") and not is_under(name, "agent.worker"),
        lambda found: found.runtime and (library(found.target) == "numpy" or is_under(found.target, "agent.worker")),
    )


def test_nobody_unpickles() -> None:
    """No bytes from a peer or a file may become code."""
    libraries = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    assert not breaches(lambda name: True, lambda found: library(found.target) in libraries)


def test_the_list_of_pure_modules_is_up_to_date() -> None:
    assert [name for name in PURE if name not in SOURCES] == []


@pytest.mark.parametrize("module", PURE)
def test_pure_parts_reach_no_socket_no_clock_and_no_environment(module: str) -> None:
    """Followed through our own modules: a pure part may not get at them by way of another either."""
    came_from: dict[str, str] = {name: "" for name in SOURCES if is_under(name, module)}
    todo = list(came_from)
    while todo:
        source = SOURCES[todo.pop()]
        for found in source.imports:
            if not found.runtime:
                continue
            assert library(found.target) not in IMPURE_LIBRARIES, (
                f"{source.where(found.line)} imports {found.target}; {module} reaches it"
            )
            ours = own_module(found.target)
            # `hearth` itself loads its client only when asked for it, see below.
            if ours is not None and ours not in came_from and ours != "hearth":
                came_from[ours] = source.name
                todo.append(ours)


def test_the_reader_sees_every_form_of_import(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    path = tmp_path / "agent" / "daemon.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    import numpy\n"
        "else:\n"
        "    import torch\n"
        "def late():\n"
        "    from coordinator import service as s\n"
        "    from .worker import engine\n"
        "    importlib.import_module('onnxruntime')\n"
    )
    found = {(each.target, each.runtime) for each in read(path, tmp_path).imports}
    assert found == {
        ("typing.TYPE_CHECKING", True),
        ("numpy", False),
        ("torch", True),
        ("coordinator.service", True),
        ("agent.worker.engine", True),
        ("onnxruntime", True),
    }


def loaded_by(statement: str) -> set[str]:
    """The modules that a statement leaves loaded in a fresh interpreter."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import hearth", {*ML_LIBRARIES, "numpy", "zeroconf", "zmq", "psutil", "agent", "coordinator"}),
        (
            "import hearth; hearth.connect",
            {*ML_LIBRARIES, "numpy", "zeroconf", "psutil", "agent", "coordinator"},
        ),
        ("import agent.daemon.main", {*ML_LIBRARIES, "numpy", "lz4", "coordinator", "agent.worker"}),
        ("import coordinator.cli.app", {*ML_LIBRARIES, "agent"}),
    ],
)
def test_loading_a_part_leaves_out_what_it_does_not_need(statement: str, absent: set[str]) -> None:
    assert loaded_by(statement) & absent == set()
