"""Model folders of an attacker, by name. Run as a module, opens each as the coordinator does, and reports what happened.

`python -m support.hostile_models FOLDER NAME ...` writes one line of JSON for each: the error, and what the process took that
opened it. So that a hundred are tested in a minute, that process is forked here, with its libraries imported.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from onnx import NodeProto, TensorProto, helper
from support.chat_models import save_byte_level, write_config
from support.checkpoints import write_model
from support.onnx_models import graph, integers, node, saved, value, weight

CANARY = "canary-4b1f0e7a92c3d586"  # content of a file next to the model's folder, such as a key
CORPUS: dict[
    str, Callable[[Path], object]
] = {}  # each makes its folder; what it returns is a file's name, for an ONNX model
_DEEP = "[" * 1_000_000
_FOREIGN_USER = 54321


def hostile(make: Callable[[Path], object]) -> Callable[[Path], object]:
    CORPUS[make.__name__.replace("_", "-")] = make
    return make


def add(kind: str, cases: dict[str, Any], make: Callable[[Path, Any], object]) -> None:
    """One folder for each case, all made by the same function."""
    for name, case in cases.items():
        CORPUS[f"{kind}-{name}"] = lambda folder, case=case: make(folder, case)


def key_of(folder: Path) -> Path:
    """A file that only links can reach."""
    key = folder.parent / "home.key"
    key.write_text(CANARY * 100)
    return key


def sparse(path: Path, num_bytes: int, begin: bytes = b"") -> Path:
    path.write_bytes(begin)
    os.truncate(path, num_bytes)
    return path


def instead(path: Path, kind: str) -> None:
    """Replace a file of a model."""
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(key_of(path.parent))
    elif kind == "link-to-hidden":
        (path.parent / ".hidden").mkdir()
        (path.parent / ".hidden" / "key").write_text(CANARY * 100)
        path.symlink_to(Path(".hidden") / "key")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            folder = os.open(path.parent, os.O_RDONLY)  # names of sockets are short
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
            os.close(folder)
    elif kind == "folder":
        path.mkdir()
    elif kind == "foreign-owner":
        path.write_text(CANARY)
        os.chown(path, _FOREIGN_USER, -1)
    elif kind == "deep":
        path.write_text(_DEEP)
    elif kind == "endless":
        sparse(path, 200 << 20, b'{"a": "')


KINDS = ["link", "link-to-hidden", "device", "fifo", "socket", "folder"] + ["foreign-owner"] * (os.getuid() == 0)


# ---- ONNX -----------------------------------------------------------------------------------------------------------


def save_one_weight(folder: Path, location: str, file: str | None = "w.bin", **more: str) -> str:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8, 8], data_location=TensorProto.EXTERNAL)
    for key, text in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=text)
    if file is not None:
        (folder / file).write_bytes(bytes(256))
    product = graph([node("MatMul", "x w", "y")], [value("x", [1, 8])], [value("y", [1, 8])])
    product.initializer.append(tensor)
    return saved(folder / "model.onnx", product).name


def save_nodes(folder: Path, *nodes: NodeProto, shape: list[int] | None = None, weights: Any = (), **more: Any) -> str:
    output = next(iter(nodes[-1].output))
    of = graph(nodes, [value("x", [4] if shape is None else shape)], [value(output, None)], weights)
    return saved(folder / "model.onnx", of, **more).name


def external(folder: Path, kind: str) -> str:
    name = save_one_weight(folder, "w.bin")
    instead(folder / "w.bin", kind)
    return name


def onnx_file(folder: Path, kind: str) -> str:
    instead(folder / "model.onnx", kind)
    return "model.onnx"


def locations(folder: Path, location: str) -> str:
    key_of(folder)
    (folder / "data").symlink_to(folder.parent)
    (folder / ".key").write_text(CANARY * 100)
    return save_one_weight(folder, location.replace("{}", str(folder.parent)))


def functions(folder: Path, levels: int, width: int, last: str = "Relu") -> str:
    made = []
    for level in range(levels):
        kind, domain = (last, "d" if last.startswith("f") else "") if level == 0 else (f"f{level - 1}", "d")
        calls = [helper.make_node(kind, [f"t{i}"], [f"t{i + 1}"], domain=domain) for i in range(width)]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
        made.append(helper.make_function("d", f"f{level}", ["t0"], [f"t{width}"], calls, opsets))
    call = helper.make_node(f"f{levels - 1}", ["x"], ["y"], domain="d")
    return save_nodes(folder, call, functions=made, opsets=[helper.make_opsetid("d", 1)])


def nested_if(folder: Path, depth: int) -> str:
    """In protobuf's bytes: the library makes no messages that are nested this deeply."""

    def field(number: int, content: bytes) -> bytes:
        return _varint(number << 3 | 2) + _varint(len(content)) + content

    leaf = body = (
        field(1, node("Relu", "x", "y").SerializeToString())
        + field(2, b"g")
        + field(12, value("y", [4]).SerializeToString())
    )
    for _ in range(depth):
        branches = [(b"then_branch", body), (b"else_branch", leaf)]
        attributes = (field(5, field(1, name) + field(6, each) + _varint(20 << 3) + b"\x05") for name, each in branches)
        body = field(1, field(1, b"c") + field(2, b"y") + field(4, b"If") + b"".join(attributes))
        body += field(2, b"g") + field(12, value("y", [4]).SerializeToString())
    inputs = [value("x", [4]), value("c", [], TensorProto.BOOL)]
    body += b"".join(field(11, each.SerializeToString()) for each in inputs)
    opset = helper.make_opsetid("", 17).SerializeToString()
    (folder / "model.onnx").write_bytes(b"\x08\x08" + field(7, body) + field(8, opset))
    return "model.onnx"


def _varint(number: int) -> bytes:
    return number.to_bytes(1, "little") if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


def content(folder: Path, data: bytes) -> str:
    (folder / "model.onnx").write_bytes(data)
    return "model.onnx"


def many_nodes(folder: Path, count: int) -> str:
    return save_nodes(folder, *(node("Relu", f"t{i}" if i else "x", f"t{i + 1}") for i in range(count)))


def regex_on_constant(folder: Path, _: None) -> str:
    """The pattern takes 2^60 steps; values that follow from constants are computed when a model is read."""
    text = helper.make_tensor("t", TensorProto.STRING, [1], [b"a" * 60 + b"!"])
    match = helper.make_node("RegexFullMatch", ["t"], ["m"], pattern="(a|a)*b")
    return save_nodes(folder, match, node("Cast", "m", "f", to=1), node("Add", "x f", "y"), weights=[text], opset=20)


add("external", {each: each for each in KINDS}, external)
add(
    "external-at",
    {
        "absolute": "{}/home.key", "above": "../home.key", "through-a-folder": "data/home.key", "hidden": ".key",
        "nowhere": "missing.bin", "proc": "/proc/self/environ",
    },
    locations,
)  # fmt: skip
add("external-range", {"behind": {"offset": "200"}, "negative": {"offset": "-8"}, "words": {"length": "all"}},
    lambda folder, more: save_one_weight(folder, "w.bin", **more))  # fmt: skip
add("onnx-file", {each: each for each in [*KINDS, "endless"]}, onnx_file)
add(
    "functions",
    {"7-by-10": (7, 10), "100-deep": (100, 1), "endless": (1, 2, "f0")},
    lambda folder, shape: functions(folder, *shape),
)
add("nested-if", {"20": 20, "45": 45, "400": 400}, nested_if)
add("nodes", {"99999": 99_999}, many_nodes)
add("bytes", {"none": b"", "text": b"hello", "noise": bytes(range(256)) * 999, "cut": b"\x3a\xff\xff\x7f"}, content)
add("regex", {"2-to-the-60": None}, regex_on_constant)
add(
    "nodes",
    {
        "einsum-5000": node("Einsum", "x", "y", equation="a" * 5000 + "->a"),
        "cycle": node("Add", "x y", "y"),
        "unknown": node("Nonsense", "x", "y"),
        "5000-axes": node("Unsqueeze", "x axes", "y"),
        "petabytes": node("Expand", "x sizes", "y"),
        "name": NodeProto(op_type="Relu", input=["x"], output=["y"], domain="a.b"),
    },
    lambda folder, each: save_nodes(
        folder, each, weights=[integers("axes", *range(1, 5001)), integers("sizes", *[1 << 40] * 3, 4)]
    ),
)


@hostile
def input_of_5000_axes(folder: Path) -> str:
    return save_nodes(folder, node("Relu", "x", "y"), shape=[1] * 5000)


@hostile
def weight_of_another_size(folder: Path) -> str:
    of = weight("w", 4)
    of.dims[:] = [1 << 62, 1 << 62]
    return save_nodes(folder, node("Add", "x w", "y"), weights=[of])


# ---- transformers ---------------------------------------------------------------------------------------------------


def save_decoder(folder: Path, template: str = "{{ messages }}", family: str = "llama") -> None:
    write_model(folder, family)
    write_config(save_byte_level(folder), chat_template=template)


def save_header(folder: Path, header: bytes, data: bytes = b"", num_bytes: int | None = None) -> None:
    save_decoder(folder)
    length = len(header) if num_bytes is None else num_bytes
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header + data)


def save_index(folder: Path, weight_map: dict[str, str]) -> None:
    save_decoder(folder)
    (folder / "model.safetensors").rename(folder / "real.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "linked.safetensors").symlink_to(key_of(folder))


def save_tokenizer(folder: Path, changes: dict[str, Any]) -> None:
    save_decoder(folder)
    settings = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**settings, **changes}))


def other_file(folder: Path, case: tuple[str, str]) -> None:
    name, kind = case
    save_decoder(folder, family="bert" if "/" in name else "llama")
    if "/" in name:
        (folder / name).parent.symlink_to(folder.parent)
        key_of(folder).rename(folder.parent / "config.json")
    else:
        instead(folder / name, kind)


_FILES = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
]
add("file", {f"{name.partition('.')[0]}-{kind}": (name, kind) for name in _FILES for kind in [*KINDS, "deep", "endless"]
             if (name, kind) != ("chat_template.jinja", "deep")}, other_file)  # fmt: skip
add("file", {"pooling-folder-link": ("1_Pooling/config.json", "link")}, other_file)
_ENTRY, _FOUR_BYTES = (b'{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}' % each for each in ((0, 0), (1, 4)))
add(
    "header",
    {
        "of-290000-tensors": lambda: b"{" + b",".join(b'"%d":%s' % (i, _ENTRY) for i in range(290_000)) + b"}",
        "of-1500000-tensors": lambda: b"{" + b",".join(b'"%d":%s' % (i, _ENTRY) for i in range(1_500_000)) + b"}",
        "deep": lambda: b'{"a":' + _DEEP.encode(),
        "of-lists": lambda: b'{"__metadata__":[' + b"[]," * 5_000_000 + b"[]]}",
        "huge-shape": lambda: b'{"a":{"dtype":"F32","shape":[' + b"9007199254740993," * 900_000 + b'1],"data_offsets":[0,4]}}',
        "overlap": lambda: b'{"a":%s,"b":%s}' % (_FOUR_BYTES, _FOUR_BYTES),
        "number": lambda: b"7",
    },
    lambda folder, header: save_header(folder, header(), bytes(4)),
)  # fmt: skip
add(
    "header-length",
    {"huge": 1 << 63, "long": 90 << 20},
    lambda folder, length: save_header(folder, b"{}", num_bytes=length),
)
add(
    "index",
    {
        "above": {"a": "../home.key"},
        "link": {"a": "linked.safetensors"},
        "number": {"a": 7},
        "tensor": {"zz": "real.safetensors"},
    },
    save_index,
)
add(
    "config",
    {"layers": {"num_hidden_layers": 10**30}, "vocabulary": {"vocab_size": 1 << 40}, "type": {"model_type": ["x"]},
     "widths": {"hidden_size": -1}, "rope": {"rope_scaling": {"rope_type": "x" * 5_000_000}}},
    lambda folder, changes: write_model(folder, "llama", **changes),
)  # fmt: skip
_SPECIAL = {"SpecialToken": {"id": "q", "type_id": 0}}
add(
    "tokenizer",
    {
        "panics-at-encoding": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "panics-at-charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAECAwQ="}},
        "panics-at-template": {
            "post_processor": {"type": "TemplateProcessing", "single": [_SPECIAL], "pair": [], "special_tokens": {}}
        },
        "panics-at-merges": {
            "model": {
                "type": "BPE",
                "continuing_subword_prefix": "##",
                "vocab": {"a": 0, "b": 1, "ab": 2},
                "merges": ["a b"],
            }
        },
        "grows-at-one-letter": {
            "normalizer": {"type": "Replace", "pattern": {"String": "\u2740"}, "content": "x" * 1000}
        },
        "grows-by-a-table": {
            "normalizer": {
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(bytes(4) + b"x" * 999).decode(),
            }
        },
        "decoder-grows": {
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "Replace", "pattern": {"Regex": "x"}, "content": "xx"}] * 9,
            }
        },
        "grows-2-to-the-50": {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * 50,
            }
        },
        "is-of-no-type": {"model": {"type": "Pickle"}},
    },
    save_tokenizer,
)
_LOOP = "{% for i in range(99999) %}"
add(
    "template",
    {
        "4-gigabytes": "{{ 'x' * 4000000000 }}",
        "power": "{{ 9 ** (9 ** 9) }}",
        "padding": "{{ '%4000000000d' % 1 }}",
        "endless": _LOOP * 5 + "{% endfor %}" * 5,
        "doubling": "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "list": "{% for i in [0] * 4000000000 %}{% endfor %}",
    },
    save_decoder,
)


# ---- the run --------------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """What became of a folder."""

    error: str  # its code; empty: it was opened
    text: str
    seconds: float  # by the clock
    processor_seconds: float
    peak_bytes: int  # resident; of these `bare_bytes` are the libraries'
    bare_bytes: int


def open_all(folder: Path, names: list[str]) -> dict[str, Opened]:
    """Make and open these folders, in a process that holds nothing else."""
    command = [sys.executable, "-m", "support.hostile_models", str(folder), *names]
    tests = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tests}:{tests.parent}",
        "RUST_BACKTRACE": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: Opened(**each) for name, each in map(json.loads, done.stdout.splitlines())}


def main(folder: Path, names: list[str]) -> None:
    from coordinator.serve import opening
    from coordinator.serve.state import GraphGoal, TransformerGoal
    from hearth.errors import HearthError

    import coordinator.models.onnx.reader  # isort: skip  # noqa: F401
    import jinja2.sandbox  # noqa: F401
    import tokenizers  # noqa: F401

    usage: list[Any] = []

    def forked(command: list[str], input: bytes, stdout: Any, stderr: Any, timeout: float) -> Any:
        reading, writing = os.pipe()
        os.write(writing, input)
        os.close(writing)
        if (pid := os.fork()) == 0:
            os.dup2(reading, 0)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
            try:
                opening.main()
            finally:
                os._exit(1)
        os.close(reading)
        _, status, used = os.wait4(pid, 0)
        usage[:] = [used]
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status))

    opening.subprocess.run = forked
    opening.OPEN_CPU_SECONDS = 3.0  # of 8, for the sake of the test's time
    for name in names:
        model = folder / name / "model"
        model.mkdir(parents=True)
        file = CORPUS[name](model)
        goal = (
            GraphGoal(model_file=str(model / file)) if isinstance(file, str) else TransformerGoal(model_dir=str(model))
        )
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        bare = int(fields["VmRSS"].split()[0]) * 1024  # which the process that is forked has from the start
        began, error, usage[:] = time.monotonic(), None, []
        try:
            opening.check_model(goal)
        except HearthError as raised:
            error = raised
        (used,) = usage
        print(json.dumps([name, {
            "error": error.code if error is not None else "", "text": str(error), "seconds": time.monotonic() - began,
            "processor_seconds": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024, "bare_bytes": bare,
        }]), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
