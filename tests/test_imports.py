"""Import rules: layers of packages, purity by folder, and what a fresh interpreter loads."""

from __future__ import annotations

import ast
import json
import logging.config
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
ML_LIBRARIES = {"torch", "onnxruntime", "transformers"}

# Pure code decides, and the edge acts: pure code gets time, randomness and environment as arguments.
PURE_FOLDERS = ("coordinator.plan", "hearth.plan")
PURE_MODULES = (
    "agent.daemon.lease",
    "agent.daemon.liveness",
    "agent.worker.graph.kernels",
    "agent.worker.graph.schedule",
    "agent.worker.transformer.generation.block_pool",
    "agent.worker.transformer.generation.drafting",
    "agent.worker.transformer.generation.sampling",
    "agent.worker.transformer.generation.scheduler",
    "agent.worker.transformer.generation.sequence",
    "agent.worker.transformer.generation.speculation",
    "coordinator.deploy.chunk_scheduler",
    "coordinator.deploy.kept_caches",
    "coordinator.devices.leases",
    "coordinator.devices.quorum",
    "coordinator.devices.quarantine",
    "coordinator.devices.registry",
    "coordinator.devices.other_models",
    "coordinator.port.access",
    "coordinator.port.protocol",
    "coordinator.port.outbox",
    "coordinator.port.requests",
    "coordinator.models.checkpoint.chunk_layout",
    "coordinator.models.onnx.contrib",
    "coordinator.models.onnx.cutting",
    "coordinator.models.onnx.flops",
    "coordinator.models.onnx.tiling.space",
    "coordinator.models.ordering",
    "coordinator.serve.text.answer_reader",
    "coordinator.serve.text.closed_schemas",
    "coordinator.serve.replan.drift",
    "coordinator.serve.recovery.preparation",
    "coordinator.serve.requests.retry",
    "hearth.errors",
    "hearth.platform.units",
    "hearth.protocol",
    "hearth.trace",
    "hearth.transport.resend",
    "hearth.wire.codec",
    "hearth.wire.envelope",
    "hearth.wire.framing",
    "hearth.wire.messages",
    "hearth.wire.intake",
)
IMPURE_LIBRARIES = {
    "asyncio", "concurrent", "ctypes", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "psutil", "secrets",
    "select", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid", "zeroconf", "zmq",
}  # fmt: skip
IMPURE_BUILTINS = {"breakpoint", "input", "open", "print"}


def test_import_contracts_hold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The contracts of `[tool.importlinter]` in pyproject.toml."""
    # it would disable the loggers of other tests
    monkeypatch.setattr(logging.config, "dictConfig", lambda config: None)
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Imports between the project's modules and to libraries, without imports for type checking."""
    found = grimp.build_graph(
        "hearth",
        "agent",
        "coordinator",
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    for lazy in found.find_modules_directly_imported_by("hearth"):  # imported when the name is first used
        found.remove_import(importer="hearth", imported=lazy)
    return found


@pytest.mark.parametrize("pure", [*PURE_FOLDERS, *PURE_MODULES])
def test_pure_code_imports_no_sockets_clock_or_environment(pure: str, graph: grimp.ImportGraph) -> None:
    """Directly or through other modules."""
    for library in sorted(IMPURE_LIBRARIES & graph.modules):
        chains = graph.find_shortest_chains(pure, library, as_packages=True)
        assert not chains, f"{pure} reaches {library}: {' -> '.join(min(chains))}"


@pytest.mark.parametrize("pure", [*PURE_FOLDERS, *PURE_MODULES])
def test_pure_code_opens_no_files_and_uses_seeded_generators_only(pure: str, graph: grimp.ImportGraph) -> None:
    ours = {pure, *graph.find_descendants(pure), *graph.find_upstream_modules(pure, as_package=True)}
    for module in sorted(each for each in ours if each.partition(".")[0] in ("hearth", "agent", "coordinator")):
        assert list(impure_lines(ast.parse(path_of(module).read_text()))) == [], module


def impure_lines(tree: ast.AST) -> Iterator[str]:
    """Statements that read a file, write to the terminal, or draw from an unseeded generator."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            unseeded = node.func.id in ("Random", "default_rng") and not node.args
            if unseeded or node.func.id in IMPURE_BUILTINS:
                yield ast.unparse(node)
        elif (
            (isinstance(node, ast.Import) and any(alias.name == "random" for alias in node.names))
            or (
                isinstance(node, ast.ImportFrom)
                and node.module == "random"
                and {alias.name for alias in node.names} != {"Random"}
            )
            or (isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random"))
        ):
            yield ast.unparse(node)


def path_of(module: str) -> Path:
    """The source of a module, without importing its parents, since Python 3.10 has no torch here."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize(
    ("line", "impure"),
    [
        ("open('file')", True),
        ("import random", True),
        ("from random import choice", True),
        ("from random import Random", False),
        ("Random()", True),
        ("Random(seed)", False),
        ("np.random.rand()", True),
        ("self.open(3)", False),
    ],
)
def test_impure_lines_are_recognised(line: str, impure: bool) -> None:
    assert bool(list(impure_lines(ast.parse(line)))) == impure


def test_modules_described_as_pure_are_checked(graph: grimp.ImportGraph) -> None:
    missing = []
    for module in sorted(each for each in graph.modules if not graph.is_module_squashed(each)):
        docstring = ast.get_docstring(ast.parse(path_of(module).read_text())) or ""
        covered = module in PURE_MODULES or module.startswith(
            tuple(f"{each}." for each in (*PURE_FOLDERS, *PURE_MODULES))
        )
        if re.search(r"\bPure\b", docstring) and not covered and module not in PURE_FOLDERS:
            missing.append(module)
    assert missing == []


def test_modules_that_code_names_as_text_exist() -> None:
    """Those that run in processes of their own: neither imports nor types show that one was renamed."""
    for path in (
        each for package in ("hearth", "agent", "coordinator") for each in ROOT.joinpath(package).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and re.fullmatch(
                r"(hearth|agent|coordinator)(\.\w+){2,}", str(node.value)
            ):
                assert path_of(str(node.value)).exists(), f"{path.relative_to(ROOT)}, line {node.lineno}: {node.value}"


def loaded_by(statement: str) -> set[str]:
    """The modules that are loaded after a statement in a fresh interpreter."""
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
        ("import hearth; hearth.connect", {*ML_LIBRARIES, "numpy", "zeroconf", "psutil", "agent", "coordinator"}),
        ("import agent.daemon.main", {*ML_LIBRARIES, "numpy", "lz4", "coordinator", "agent.worker"}),
        ("import coordinator.cli.app", {*ML_LIBRARIES, "agent"}),
        (
            "import coordinator.port.process",  # a process of its own, which must stay small
            {*ML_LIBRARIES, "numpy", "pydantic", "asyncio", "ssl", "agent", "coordinator.serve"},
        ),
    ],
)
def test_imports_load_no_unneeded_packages(statement: str, absent: set[str]) -> None:
    assert loaded_by(statement) & absent == set()
