"""What pip would install: the distribution's name, the versions on each kind of processor, and files with known hashes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from tools.testbed.scenario import tomllib

ROOT = Path(__file__).parents[1]
# Requirements that torch's wheels for ARM declare beyond those of every version, as their metadata has them. 2.13.0: one of 19.
TORCH = ["filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5"]
TORCH_ON_ARM = {
    "2.10.0": [*TORCH, 'nvidia-cudnn-cu12==9.10.2.21; platform_system == "Linux" and platform_machine == "x86_64"'],
    "2.13.0": [*TORCH, 'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"'],
}
EVERYWHERE = (
    "arrays",
    "agent",
    "gpu",
    "worker",
    "coordinator",
    "gateway",
    "demo",
)  # extras that a home's devices install
RASPBERRY_PI = {"platform_machine": "aarch64", "platform_system": "Linux", "sys_platform": "linux"}
PC = {**RASPBERRY_PI, "platform_machine": "x86_64"}
LOWEST = {**PC, "python_version": "3.10", "python_full_version": "3.10.13"}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def holds(requirement: Requirement, machine: dict[str, str], extras: set[str]) -> bool:
    environment = {**default_environment(), **machine}
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras or {""})


def pins(machine: dict[str, str], name: str = "constraints.txt") -> dict[str, str]:
    """Exact version of each package on a kind of machine, with this Python."""
    lines = re.sub(r"#.*", "", (ROOT / name).read_text()).splitlines()
    found = [Requirement(line) for line in lines if line.strip()]
    exact = [each for each in found if holds(each, machine, set())]
    assert len({canonicalize_name(each.name) for each in exact}) == len(exact), "a package is pinned twice"
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in exact}


def declared(name: str, version: str | None, machine: dict[str, str], extras: set[str]) -> list[Requirement]:
    """Requirements of a package: our own from pyproject.toml, torch's from its wheel for ARM, others as installed here."""
    if name == "hearth-home":
        texts = [
            *project()["dependencies"],
            *(each for extra in extras for each in project()["optional-dependencies"][extra]),
        ]
        return [each for each in map(Requirement, texts) if holds(each, machine, set())]
    texts = TORCH_ON_ARM[version or ""] if name == "torch" and machine == RASPBERRY_PI else requires(name) or []
    return [each for each in map(Requirement, texts) if holds(each, machine, extras)]


def resolved(extra: str, machine: dict[str, str], exact: dict[str, str]) -> dict[str, str]:
    """Every package that pip would install for an extra, with its pinned version."""
    found: dict[str, str] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(f"hearth-home[{extra}]")]
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), requirement.extras
        version = exact.get(name)
        if version is not None:
            assert requirement.specifier.contains(version), f"{requirement} against {version} in constraints.txt"
            found[name] = version
        elif name != "hearth-home":
            found[name] = "any"
        if (name, frozenset(extras)) not in done:
            done.add((name, frozenset(extras)))
            waiting += declared(name, version, machine, set(extras))
    return found


def cuda_packages(found: dict[str, str]) -> list[str]:
    return sorted(name for name in found if re.match(r"nvidia-|cuda-|triton$", name))


def test_raspberry_pi_gets_no_cuda_packages() -> None:
    """They are gigabytes, and nothing on such a device can use them."""
    pytest.importorskip("torch")
    found = resolved("demo", RASPBERRY_PI, pins(RASPBERRY_PI))
    assert found["torch"] == "2.10.0"
    assert {"onnxruntime", "numpy", "pyzmq", "highspy", "transformers", "sympy"} <= set(found)
    assert cuda_packages(found) == []


def test_newer_torch_would_bring_cuda_packages_to_a_raspberry_pi() -> None:
    """So the list above is looked at for the right names; and pip does not take this version by the range alone."""
    pytest.importorskip("torch")
    newer = {**pins(RASPBERRY_PI), "torch": "2.13.0"}
    with pytest.raises(AssertionError, match=r"torch<2\.11.* against 2\.13\.0"):
        resolved("worker", RASPBERRY_PI, newer)
    assert [each.name for each in declared("torch", "2.13.0", RASPBERRY_PI, set()) if cuda_packages({each.name: ""})]


def test_pc_keeps_the_newest_torch_that_was_tested() -> None:
    pytest.importorskip("torch")
    assert pins(PC)["torch"] == "2.13.0"
    assert resolved("worker", PC, pins(PC))["torch"] == "2.13.0"


@pytest.mark.parametrize("machine", [PC, RASPBERRY_PI], ids=["x86_64", "aarch64"])
def test_jetson_keeps_the_torch_and_onnxruntime_that_nvidia_built(machine: dict[str, str]) -> None:
    pytest.importorskip("torch")
    found = resolved("gpu", machine, pins(machine))
    assert not {"torch", "onnxruntime"} & set(found)
    assert {*found, "torch", "onnxruntime"} <= set(resolved("worker", machine, pins(machine)))


def test_distribution_is_not_the_one_called_hearth_on_the_index() -> None:
    assert project()["name"] == "hearth-home"
    own = [each for texts in project()["optional-dependencies"].values() for each in map(Requirement, texts)]
    assert "hearth" not in {each.name for each in own}
    advice = [
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        *(p for d in ("agent", "coordinator", "hearth") for p in (ROOT / d).rglob("*.py")),
    ]
    for path in advice:
        assert not re.search(r"pip install .?hearth\b(?!-home)", path.read_text()), path


def test_lowest_pins_are_the_lower_bounds_of_every_range() -> None:
    """`make test-lowest` installs constraints-lowest.txt, so the ranges state what was tested."""
    lowest = pins({}, "constraints-lowest.txt")
    extras = project()["optional-dependencies"]
    texts = [*project()["dependencies"], *(each for extra in EVERYWHERE for each in extras[extra])]
    for requirement in map(Requirement, texts):
        if requirement.name != "hearth-home" and holds(requirement, LOWEST, set()):
            (bound,) = [Version(each.version).release for each in requirement.specifier if each.operator == ">="]
            pinned = Version(lowest[canonicalize_name(requirement.name)])
            assert pinned in requirement.specifier
            assert pinned.release[: len(bound)] == bound, requirement  # the lowest there is: 9.10.4067 for 9.10


# ---- files and their hashes ------------------------------------------------------------------------------------------

LINK = re.compile(
    r'<a href="https://files\.pythonhosted\.org/packages/\S+/([^/]+\.whl)#sha256=[0-9a-f]{64}">\1</a><br>'
)


def listed(python: str, processor: str) -> set[tuple[str, str]]:
    """Names and versions of which constraints.html has a file for a Python and a processor."""
    links = [LINK.fullmatch(line) for line in (ROOT / "constraints.html").read_text().splitlines()]
    found = set()
    for name, version, _, tags in (parse_wheel_filename(link[1]) for link in links if link):
        for tag in tags:
            runs = tag.interpreter in ("py3", f"cp{python.replace('.', '')}") or tag.abi == "abi3"
            if runs and (tag.platform == "any" or tag.platform.endswith(processor)):
                found.add((canonicalize_name(name), str(version)))
    assert all(links)
    return found


@pytest.mark.parametrize("machine", [PC, RASPBERRY_PI], ids=["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_each_pinned_version_has_a_file_with_its_hash(machine: dict[str, str], python: str) -> None:
    environment = {**machine, "python_version": python, "python_full_version": f"{python}.1"}
    assert set(pins(environment).items()) - listed(python, machine["platform_machine"]) == set()


@pytest.mark.parametrize("name", ["constraints-lowest.txt", "constraints-numpy1.txt"])
def test_each_other_pinned_version_has_a_file_with_its_hash(name: str) -> None:
    python = "3.10" if name == "constraints-lowest.txt" else "3.11"
    assert set(pins({}, name).items()) - listed(python, "x86_64") == set()


def test_each_environment_of_make_takes_listed_files_only() -> None:
    names = ("", "-3.12", "-lowest", "-numpy1", "-tools")
    targets = [f".venv{name}/installed" for name in names]
    command = ["make", "--dry-run", "--always-make", "OTHER_PYTHON=python3", "PYTHON310=python3", *targets]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    installs = [line for line in text.replace("\\\n", "").splitlines() if " -m pip " in line and " install " in line]
    assert len(installs) == len(names) + 1  # the lowest versions first, then what needs them
    assert [line for line in installs if " --no-index --find-links constraints.html " not in line] == []


# ---- Debian's package ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (shutil.which("gpg") and shutil.which("dpkg-deb")), reason="needs gpg and dpkg-deb (Debian)")
def test_signature_of_the_debian_package_is_valid_until_it_is_changed(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as keys:  # a short path: gpg's agent has a socket there
        environment = {**os.environ, "GNUPGHOME": keys, "DEB_KEY": "release@hearth.invalid", "PYTHON": "true"}

        def run(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=tmp_path
            )

        made = run("gpg", "--batch", "--passphrase", "", "--quick-generate-key", environment["DEB_KEY"], "ed25519")
        assert made.returncode == 0, made.stderr
        built = run(str(ROOT / "systemd/deb.sh"), str(tmp_path))
        package = Path(built.stdout.strip())
        assert package.exists(), built.stderr
        assert run("gpg", "--verify", f"{package}.asc", str(package)).returncode == 0
        contents = run("dpkg-deb", "--contents", str(package)).stdout
        assert "/usr/share/hearth-home/constraints.html" in contents
        package.write_bytes(package.read_bytes() + b"x")
        assert run("gpg", "--verify", f"{package}.asc", str(package)).returncode == 1
        environment["DEB_KEY"] = ""
        assert "not signed" in run(str(ROOT / "systemd/deb.sh"), str(tmp_path)).stderr
        assert not Path(f"{package}.asc").exists()
        run("gpgconf", "--kill", "gpg-agent")


# ---- known vulnerabilities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "status"),
    [("", 3), ('{"vulns": []}', 3), ('{"vulns": [{"id": "PYSEC-1"}]}', 1)],
    ids=["no answer", "no data", "data"],
)
def test_audit_without_data_is_not_taken_for_a_good_one(tmp_path: Path, answer: str, status: int) -> None:
    (tmp_path / "pip-audit").write_text(f"#!/bin/sh\necho '{answer}'\ncase \"$*\" in *json*) ;; *) exit 1 ;; esac\n")
    (tmp_path / "pip-audit").chmod(0o755)
    command = [str(ROOT / "tools/audit.sh"), str(tmp_path / "pip-audit"), "constraints.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert ("not audited" in done.stderr) == (status == 3)
