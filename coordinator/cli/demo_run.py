"""The demo: agents, a coordinator and a model on one machine, compared with `transformers`.

It starts the same programs as a real home, with a temporary key, on the loopback interface.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hearth.client.sync import Home, connect
from hearth.errors import DeadlineExceeded, HearthError, InternalError
from hearth.plan.plan import TransformerPlan, is_transformer_plan
from hearth.platform.security import new_home_key, save_credential
from hearth.wire.messages import DeviceList

COMMANDS = (
    "Turn on the kitchen light.",
    "Turn off all the lights.",
    "Set the heating to 21 degrees.",
    "Open the garage door.",
    "Lock the front door.",
    "Start the dishwasher.",
    "Play some music in the living room.",
    "Show me the camera at the gate.",
)
SENTENCES = (
    "It is too dark to cook in here.",
    "We are all going to bed now.",
    "I am freezing, can you make it warmer?",
    "I want to drive the car out.",
    "Did anyone secure the entrance?",
    "The plates are dirty.",
    "I feel like listening to jazz on the sofa.",
    "Who is ringing at the gate?",
)
_PROGRAMS = Path(sys.executable).parent  # of the scripts installed with this Python
_LOOPBACK = "127.0.0.1"
# Until the coordinator serves, and in addition for each device, since devices are profiled one after the other. With three
# devices on a busy two-core PC, it took 37 s, of which 7 s for each profile; a Raspberry Pi takes five times as long.
_START_TIMEOUT_SECONDS = 60.0
_DEVICE_TIMEOUT_SECONDS = 40.0
_CONNECT_TIMEOUT_SECONDS = 2.0  # of one try to reach the coordinator, which may not listen yet
_REQUEST_TIMEOUT_SECONDS = 60.0
_REFERENCE_TIMEOUT_SECONDS = 120.0  # for another Python to import transformers, load the model and compute
_LATENCY_RUNS = 7  # timed requests: odd, so that the median is one of them; few, since the demo should end soon
_STOP_TIMEOUT_SECONDS = 10.0  # for a program to end after SIGTERM, before it is killed

Report = Callable[[str], None]


@dataclass(frozen=True)
class DemoResult:
    """Results of the demo. `answers` pairs each sentence with its nearest command; `num_texts` were embedded together."""

    num_texts: int
    devices: DeviceList
    plan: TransformerPlan
    answers: list[dict[str, Any]]
    max_abs_difference: float
    latency_seconds: float
    single_device_latency_seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            **self.devices.model_dump(mode="json", include={"devices", "links"}),
            "plan": self.plan.model_dump(mode="json"),
            "answers": self.answers,
            "max_abs_difference": self.max_abs_difference,
            "latency_seconds": self.latency_seconds,
            "single_device_latency_seconds": self.single_device_latency_seconds,
        }


def run_demo(model_dir: Path, num_devices: int, report: Report, patience: float = 1.0) -> DemoResult:
    """Start all processes, measure, and stop them. Raises HearthError if one does not become ready in time.

    `patience` is the factor of all deadlines.
    """
    texts = [*COMMANDS, *SENTENCES]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-demo-")))
        key = folder / "key"
        save_credential(key, new_home_key())
        for index in range(num_devices):
            stack.enter_context(_agent(f"device-{index + 1}", folder, key))
        report(f"started {num_devices} agents with a temporary key; they advertise themselves over mDNS")
        with _coordinator(folder, key, model_dir, "hmp", num_devices, report, patience) as home:
            report("the home is ready; requesting sentence embeddings")
            vectors, latency = _measure(home, texts, patience)
            devices, plan = home.devices(), home.status().plan
        report("running the same on one device, for comparison")
        with _coordinator(folder, key, model_dir, "local", num_devices, report, patience) as home:
            _, single_device_latency = _measure(home, texts, patience)
    report("running the same with transformers in this Python, for comparison")
    reference = _reference_embeddings(model_dir, texts, patience)
    if not is_transformer_plan(plan):
        raise InternalError(where="the demo", reason="the coordinator served without a plan")
    return DemoResult(
        num_texts=len(texts),
        devices=devices,
        plan=plan,
        answers=_nearest_commands(vectors),
        max_abs_difference=float(np.abs(vectors - reference).max()),
        latency_seconds=latency,
        single_device_latency_seconds=single_device_latency,
    )


def _measure(home: Home, texts: Sequence[str], patience: float) -> tuple[np.ndarray[Any, Any], float]:
    """The embeddings, and the median latency of several requests after a first one."""
    seconds = patience * _REQUEST_TIMEOUT_SECONDS
    vectors = home.embed(texts, timeout_seconds=seconds)
    latencies = [home.request_embeddings(texts, timeout_seconds=seconds).latency_seconds for _ in range(_LATENCY_RUNS)]
    return vectors, statistics.median(latencies)


def _nearest_commands(vectors: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    similarities = vectors[len(COMMANDS) :] @ vectors[: len(COMMANDS)].T
    return [
        {"text": text, "command": COMMANDS[int(row.argmax())], "similarity": float(row.max())}
        for text, row in zip(SENTENCES, similarities, strict=True)
    ]


def _reference_embeddings(model_dir: Path, texts: Sequence[str], patience: float) -> np.ndarray[Any, Any]:
    """Embeddings by `transformers`, in a child process: this one does not import torch."""
    done = subprocess.run(
        [sys.executable, "-m", "agent.worker.transformer.reference", str(model_dir)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=patience * _REFERENCE_TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise InternalError(where="the reference (transformers)", reason=last[0])
    return np.asarray(json.loads(done.stdout)["embeddings"], dtype=np.float32)


# ---- the processes --------------------------------------------------------------------------------------------------


def _agent(name: str, folder: Path, key: Path) -> AbstractContextManager[object]:
    """A `hearth-agent` process with its own directories and ports, and one compute thread."""
    command = [
        str(_PROGRAMS / "hearth-agent"), "--name", name, "--key-path", str(key),
        "--state-dir", str(folder / name / "state"), "--store-dir", str(folder / name / "store"),
        "--interface", _LOOPBACK, "--bind-host", _LOOPBACK,
        "--control-port", "0", "--link-port", "0", "--data-ports", "0-0", "--threads", "1", "--log-level", "warning",
    ]  # fmt: skip
    return _process(command, folder / f"{name}.log")


@contextmanager
def _coordinator(
    folder: Path, key: Path, model_dir: Path, strategy: str, num_devices: int, report: Report, patience: float
) -> Iterator[Home]:
    """A `hearth serve` process; yields a client when it is ready. Keeps its state, with the profiles, for the next run."""
    command = [
        str(_PROGRAMS / "hearth"), "serve", str(model_dir), "--strategy", strategy, "--key", str(key),
        "--min-devices", str(num_devices), "--port", "0", "--state-dir", str(folder / "coordinator"),
        "--mdns-interfaces", _LOOPBACK, "--name", "demo",
    ]  # fmt: skip
    log = folder / f"coordinator-{strategy}.log"
    with _process(command, log) as process:
        seconds = patience * (_START_TIMEOUT_SECONDS + num_devices * _DEVICE_TIMEOUT_SECONDS)
        deadline, num_shown = time.monotonic() + seconds, 0
        with _connect_to(process, key, log, deadline, patience) as home:
            while not home.ready():
                num_shown = _report_new_lines(log, num_shown, report)
                if process.poll() is not None or time.monotonic() > deadline:
                    raise DeadlineExceeded(action=f"getting ready ({home.readiness().state})", seconds=seconds)
                time.sleep(0.1)
            _report_new_lines(log, num_shown, report)
            yield home


def _connect_to(process: subprocess.Popen[bytes], key: Path, log: Path, deadline: float, patience: float) -> Home:
    while True:
        try:
            return connect(key=key, timeout_seconds=patience * _CONNECT_TIMEOUT_SECONDS, interfaces=[_LOOPBACK])
        except HearthError:
            if process.poll() is not None:
                last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
                raise InternalError(where="hearth serve", reason=last[0]) from None
            if time.monotonic() > deadline:
                raise


def _report_new_lines(log: Path, num_shown: int, report: Report) -> int:
    lines = log.read_text(errors="replace").splitlines()
    for line in lines[num_shown:]:
        report(f"  coordinator: {line}")
    return len(lines)


@contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with its output in a file; terminates it when the context ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
