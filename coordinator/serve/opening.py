"""Opens models, which anybody may have made: a confined process opens each first, with limits of memory and time.

It reads what the coordinator will read, with the same code, and uses the tokenizer and the chat template once. What stops that
process, or exceeds its limits, never reaches the coordinator.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import hearth
from coordinator.models import model_files
from coordinator.models.cache_files import read_cached, write_cached
from coordinator.models.graph_file import GraphFile
from coordinator.models.limits import OPEN_CPU_FACTOR, OPEN_CPU_SECONDS, OPEN_MEMORY_BYTES, OPEN_SECONDS
from coordinator.serve.goal import TransformerModel, open_model, read_model
from coordinator.serve.state import Goal, GraphGoal, goal_from_json
from coordinator.serve.text.sentences import SentenceTokenizer
from coordinator.serve.text.templates import compile_template
from hearth.errors import BadCheckpoint, BadModelFile, HearthError, error_from_wire
from hearth.platform.child import describe_exit
from hearth.platform.confine import confine_reader, limit_processor_time

_FOLDER = "opened"  # of the state directory: which files of each model have been opened without harm
_MAX_TEXT = 1000  # characters of a field of its errors: names in a file may have millions
_TOO_SLOW = "reading it takes more processor time than any known model needs"
_SAMPLE = "Hello, how are 2 of you? <b>Ünïcode</b> 你好 🙂"


def open_checked(goal: Goal, state_dir: Path | None = None) -> TransformerModel | GraphFile:
    """`open_model`, after `check_model`."""
    check_model(goal, state_dir)
    return open_model(goal)


def check_model(goal: Goal, state_dir: Path | None = None) -> None:
    """Read the model of a goal in a confined process. Raises as `read_model` does, also where that process dies.

    In `state_dir` is kept which files passed, so that a home that starts again need not wait. A graph in JSON is no danger.
    """
    if isinstance(goal, GraphGoal) and Path(goal.model_file).suffix.lower() == ".json":
        return
    if state_dir is None:
        _open_in_process(goal)
        return
    folders = [str(folder) for folder in _folders(goal)]
    identity = f"{hearth.__version__} {goal.model_dump_json()} {folders}"
    passed = state_dir / _FOLDER / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    with suppress(OSError, ValueError):
        known = json.loads(read_cached(passed))
        if known == _stamps(known):
            return
    files = _open_in_process(goal)
    with suppress(OSError):
        write_cached(passed, json.dumps(_stamps({*folders, *files, *map(os.path.dirname, files)})).encode())


def _folders(goal: Goal) -> list[Path]:
    """Those of the model and of its draft model, without links."""
    if isinstance(goal, GraphGoal):
        return [Path(os.path.realpath(Path(goal.model_file).parent))]
    return [Path(os.path.realpath(each)) for each in (goal.model_dir, goal.draft_dir) if each is not None]


def _stamps(paths: Iterable[str]) -> dict[str, list[int]]:
    """What changes with the content of each file, and with the names in each folder. Raises OSError."""
    found = {path: os.stat(path) for path in paths}
    return {path: [each.st_dev, each.st_ino, each.st_size, each.st_ctime_ns] for path, each in found.items()}


def _open_in_process(goal: Goal) -> list[str]:
    """The files that the process has opened. Raises the error with which it failed."""
    command = [sys.executable, "-m", "hearth.platform.child_main", str(os.getpid()), __name__]
    task = goal.model_dump_json().encode()
    with tempfile.TemporaryFile() as output:  # unlike a pipe, a file has a limit of size
        try:
            code = subprocess.run(command, input=task, stdout=output, stderr=output, timeout=OPEN_SECONDS).returncode
        except subprocess.TimeoutExpired:
            raise _bad(goal, f"it was not read within {OPEN_SECONDS:g} s") from None
        output.seek(0)
        *said, last = output.read().decode(errors="replace").rstrip().split("\n")
    try:
        answer = json.loads(last)
    except ValueError:
        reason = f"the process that read it {describe_exit(code)}: {' '.join([*said[-2:], last])[-_MAX_TEXT:]}"
        raise _bad(goal, _TOO_SLOW if code == -signal.SIGXCPU else reason) from None
    if "error" in answer:
        raise error_from_wire(answer["error"], answer["details"])
    return list(map(str, answer["files"]))


def _bad(goal: Goal, reason: str) -> HearthError:
    error = BadModelFile if isinstance(goal, GraphGoal) else BadCheckpoint
    return error(path=str(goal.path), reason=reason)


# ---- in the process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Open the model of the goal on stdin, and answer with the files that were opened, or with an error."""
    goal = goal_from_json(sys.stdin.read())
    used = time.process_time()
    limit_processor_time(max(OPEN_CPU_SECONDS, OPEN_CPU_FACTOR * used))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would take memory
    places = [place for folder in _folders(goal) for place in model_files.allowed_places(folder)]
    confine_reader(places, (), OPEN_MEMORY_BYTES)
    try:
        _use(read_model(goal))
        answer: dict[str, Any] = {"files": sorted(model_files.opened)}
    except BaseException as error:
        answer = _failure(goal, error)
    print(json.dumps(answer), flush=True)
    os._exit(0)  # freeing the memory takes time


def _failure(goal: Goal, error: BaseException) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        error = _bad(goal, f"reading it takes more than {OPEN_MEMORY_BYTES >> 20} MiB of memory")
    elif not isinstance(error, HearthError):
        error = _bad(goal, f"reading it fails ({type(error).__name__}: {error})")
    details = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in error.details().items()}
    return {"error": error.code, "details": details}


def _use(model: TransformerModel | GraphFile) -> None:
    """Use the tokenizer and the chat template. Raises BadCheckpoint and MemoryError.

    Both may refuse the sample: a template knows other roles, or a tokenizer other letters.
    """
    tokenizer = model.tokenizer if isinstance(model, TransformerModel) else None
    uses = list[Callable[[], object]]()
    if isinstance(tokenizer, SentenceTokenizer):
        uses.append(partial(tokenizer.encode, [_SAMPLE], sys.maxsize))
    elif tokenizer is not None:
        uses.append(lambda: tokenizer.decode(tokenizer.encode(_SAMPLE)))
        if (template := tokenizer.template) is not None:
            turns = [{"role": role, "content": _SAMPLE} for role in ("user", "assistant", "user")]
            uses.append(lambda: compile_template(template.source, datetime.now).render(messages=turns))
    for use in uses:
        try:
            use()
        except (BadCheckpoint, MemoryError):
            raise
        except Exception:
            pass


if __name__ == "__main__":
    main()
