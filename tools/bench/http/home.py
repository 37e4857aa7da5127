"""A home and its HTTP gateway: agents on emulated devices, coordinator and gateway on a hub, clients on the hub's loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from coordinator.http.certificates import AUTHORITY_FILE
from hearth.errors import InternalError
from tools.bench.experiment import Context
from tools.bench.homes import shared_home, stop_coordinator, with_argument
from tools.bench.processes import ClientProcess
from tools.bench.results import REPOSITORY
from tools.bench.shapes import llama, save_random_model
from tools.testbed import Testbed

HOST, PORT = "127.0.0.1", 47880  # of the gateway, on the hub
_GATEWAY = "coordinator.http"  # module of its process
_READY_SECONDS = 600.0  # for the coordinator to profile, plan, push and load on a busy machine
# A Llama whose steps take a millisecond, so that what the gateway adds is seen.
TINY = llama(hidden=64, ffn=128, heads=2, kv_heads=2, layers=2, vocabulary=1024, positions=1024)
_SPECIAL = ("<|begin|>", "<|start|>", "<|end|>")
_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|start|>tools\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|end|>\n"
    "{% endif %}{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|end|>\n"
    "{% endfor %}<|start|>assistant\n"
)


class HttpHome:
    """A served home, its gateway, and a process with client apps (`tools.bench.http.clients`)."""

    def __init__(self, testbed: Testbed, clients: ClientProcess, coordinator: int) -> None:
        self.testbed, self.clients = testbed, clients
        self._coordinator = coordinator

    def new_app(self, name: str) -> str:
        """Admit an app; returns its bearer token."""
        hub = self.testbed.address(self.testbed.scenario.coordinator_device)
        answer = self.testbed.hearth("key", "add-app", name, "--token", "--json", "--address", hub)
        return str(json.loads(answer)["token"])

    def authority(self) -> str:
        """The file with the certificate of the gateway's authority, if it speaks TLS."""
        return str(self.testbed.folder / "coordinator" / "tls" / AUTHORITY_FILE)

    def gateway_seconds(self) -> float:
        """Processor time of the gateway's process."""
        return float(sum(self._gateway().cpu_times()[:2]))

    def gateway_peak_bytes(self) -> int:
        """The largest resident memory that the gateway's process has had."""
        status = Path(f"/proc/{self._gateway().pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))

    def _gateway(self) -> psutil.Process:
        """The gateway's process. Raises InternalError if there is none."""
        children = psutil.Process(self._coordinator).children(recursive=True)
        process = with_argument((child.pid for child in children), _GATEWAY)
        if process is None:
            raise InternalError(where="the gateway", reason="its process has ended; see coordinator.log")
        return process


@contextmanager
def http_home(context: Context, model: Path, num_devices: int, *options: str) -> Iterator[HttpHome]:
    """Serve a model on devices that share all cores. `options`: of `hearth serve`.

    Raises BadSetting (the testbed), InternalError, DeadlineExceeded.
    """
    with shared_home(context.folder, num_devices) as testbed, ClientProcess(testbed, "http.clients") as clients:
        context.report("planning, pushing and loading")
        coordinator = testbed.start_coordinator(
            str(model), "--http", f"{HOST}:{PORT}", "--min-devices", str(num_devices), *options
        )
        clients.ready_status(_READY_SECONDS)
        yield HttpHome(testbed, clients, coordinator.pid)
        stop_coordinator(coordinator)


def chat_directory(config: Mapping[str, Any], directory: Path) -> Path:
    """A model of this shape without an end token: its answers are as long as they may be."""
    shape = {**config, "bos_token_id": None, "eos_token_id": None}
    save_random_model(directory, shape)
    save_tokenizer(directory, int(config["vocab_size"]))
    return directory


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Byte-level BPE that was trained on this project's documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    texts = sorted(
        path for folder in (REPOSITORY / "docs", REPOSITORY / "hearth") for path in folder.rglob("*.[mp][dy]")
    )
    tokenizer.train([str(path) for path in texts], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": _TEMPLATE, "bos_token": _SPECIAL[0], "eos_token": _SPECIAL[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
