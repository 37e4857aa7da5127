"""Documents against the code that they describe, and their links against existing files."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from agent.daemon.config import PREFIX as AGENT_PREFIX
from agent.daemon.config import AgentSettings
from coordinator.serve.config import ENVIRONMENT_PREFIX as COORDINATOR_PREFIX
from coordinator.serve.config import CoordinatorSettings
from hearth.client.answers import AsyncGeneration, Generation, Token, Usage
from hearth.client.home import AsyncHome, Result, connect_async
from hearth.client.sync import Home, connect
from hearth.errors import ERROR_TYPES, HearthError
from hearth.plan.phases import Phase
from hearth.wire.messages import MESSAGE_TYPES, SamplingChoice

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
CLIENT, OPERATIONS, PROTOCOL = (ROOT / "docs" / f"{name}.md" for name in ("client", "operations", "protocol"))

# Other tests define their own errors and messages: only those of the package are documented.
ERRORS = {code: error for code, error in ERROR_TYPES.items() if error.__module__ == HearthError.__module__}
MESSAGES = [each for each in MESSAGE_TYPES.values() if each.__module__.startswith("hearth.wire.messages")]


# ---- links ----------------------------------------------------------------------------------------------------------


def prose(path: Path) -> str:
    """The text of a document without its fenced code blocks."""
    kept, fence = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        mark = re.match(r" {0,3}(```+|~~~+)", line)
        if mark is not None and not fence:
            fence = mark[1]
        elif mark is not None and line.strip().startswith(fence):
            fence = ""
        elif not fence:
            kept.append(line)
    return "\n".join(kept)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub generates for a document's headings."""
    seen: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", prose(path), re.MULTILINE):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def links(path: Path) -> Iterator[str]:
    """The targets of links and pictures that are relative to the document."""
    for target in re.findall(r"\]\(\s*<?([^)>\s]+)>?[^)]*\)", re.sub(r"`[^`\n]*`", "", prose(path))):
        if not re.match(r"[a-z][a-z0-9+.-]*:", target, re.IGNORECASE):
            yield target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_are_valid(document: Path) -> None:
    broken = []
    for target in links(document):
        name, _, heading = target.partition("#")
        file = document.parent / unquote(name) if name else document
        exists = file.resolve().is_relative_to(ROOT) and file.exists()
        if not exists or (heading and file.suffix == ".md" and unquote(heading) not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_anchors_follow_github_rules(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("# A `b_c`, d's\n\n## Twice\n## Twice\n```sh\n# no heading\n[no](link)\n```\n[one](x.md#y)\n")
    assert anchors(document) == {"a-b_c-ds", "twice", "twice-1"}
    assert list(links(document)) == ["x.md#y"]


# ---- docs/client.md -------------------------------------------------------------------------------------------------


def calls() -> dict[str, Callable[..., Any]]:
    """The public functions of the client library and the public methods of both clients, by name."""
    found: dict[str, Callable[..., Any]] = {"connect": connect, "connect_async": connect_async}
    for client in (AsyncHome, Home):
        found.update({name: call for name, call in vars(client).items() if callable(call) and name[0] != "_"})
    return found


def signature(call: Callable[..., Any]) -> str:
    """Parameters and defaults, without `self` and types."""
    parameters = [each for name, each in inspect.signature(call).parameters.items() if name != "self"]
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(plain))


@pytest.mark.parametrize("name", calls())
def test_client_reference_has_a_section_for_each_call(name: str) -> None:
    headings = re.findall(r"^### (.+)$", prose(CLIENT), re.MULTILINE)
    assert f"`{name}{signature(calls()[name])}`" in headings


@pytest.mark.parametrize(
    "names",
    [
        SamplingChoice.model_fields,
        Token._fields,
        Result._fields,
        [*Usage._fields, "tokens_per_second"],
        *([name for name in vars(kind) if name[0] != "_"] for kind in (Generation, AsyncGeneration)),
    ],
)
def test_client_reference_names_settings_and_results(names: list[str]) -> None:
    text = prose(CLIENT)
    assert [name for name in names if not re.search(rf"`{name}(\(\))?`", text)] == []


def test_client_reference_lists_every_error_with_fields_and_scope() -> None:
    rows = re.findall(r"^\| `(\w+)` \((.+?)\) \| (\w+) \|", prose(CLIENT), re.MULTILINE)
    listed = {code: (re.findall(r"`(\w+)`", names), scope) for code, names, scope in rows}
    assert listed == {code: ([field.name for field in fields(error)], error.scope) for code, error in ERRORS.items()}
    assert len(rows) == len(listed)


def test_client_reference_examples_compile() -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", CLIENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        compile(example, CLIENT.name, "exec")


# ---- docs/protocol.md -----------------------------------------------------------------------------------------------


def test_protocol_document_names_every_message() -> None:
    text = prose(PROTOCOL)
    assert [each.__name__ for each in MESSAGES if f"`{each.__name__}`" not in text] == []


def test_protocol_document_names_every_phase_with_its_number() -> None:
    text = " ".join(prose(PROTOCOL).split())
    assert [phase.name for phase in Phase if f"`{phase.name}` {phase.value}" not in text] == []


# ---- docs/operations.md ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "settings"),
    [(AGENT_PREFIX, AgentSettings), (COORDINATOR_PREFIX, CoordinatorSettings)],
    ids=["agent", "coordinator"],
)
def test_operations_document_names_exactly_the_settings(
    prefix: str, settings: type[AgentSettings | CoordinatorSettings]
) -> None:
    named = set(re.findall(rf"{prefix}[A-Z_]*[A-Z]", prose(OPERATIONS)))
    assert named == {prefix + name.upper() for name in settings.model_fields}
    rows = re.findall(rf"^\| `({prefix}[A-Z_]+)` \|", prose(OPERATIONS), re.MULTILINE)
    assert sorted(rows) == sorted(named), "each has one row in the tables of settings"
