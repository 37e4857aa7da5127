"""Generated cluster files, graphs for them, and `hearth plan` with every strategy. Everything follows from seeds.

Graphs are in JSON (chains with skips, branches, random layers), a few in ONNX. Some are placement problems with their
own devices. They are small, so that searches end long before the time limit, except for the clusters in `HARD` with
objective latency, whose limit is too short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from corpus.cases import Case, Writer, rounded

KIB, MIB = 1 << 10, 1 << 20
NUM_CLUSTERS = 48
LATENCY = ("auto", "moirai", "heft", "critical-path", "local")
THROUGHPUT = ("auto", "pipeline-exact", "pipeline", "local")
NUM_INSTANCES = 4
TIME_LIMIT = 60.0
HARD = (44, 45, 46, 47)  # numbers of clusters of six devices that can hold a larger graph only together
_SHORT_LIMIT = 4.0
_NAMES = ("kitchen", "hall", "attic", "study", "cellar", "garage")

Graph = dict[str, Any]


# ---- graphs -----------------------------------------------------------------------------------------------------------


class _Drawing:
    """A graph under construction: each node reads earlier nodes."""

    def __init__(self, rng: Random, name: str) -> None:
        self.rng = rng
        self.graph: Graph = {"name": name, "nodes": [], "edges": []}

    def add(self, op: str, sources: Sequence[int], flops: float, out_bytes: int, param_bytes: int = 0) -> int:
        number = len(self.graph["nodes"])
        node = {
            "id": number, "op": op, "name": f"{op.lower()}{number}", "out_shape": [1, max(out_bytes // 4, 1)],
            "out_bytes": out_bytes, "param_bytes": param_bytes, "flops": rounded(flops),
        }  # fmt: skip
        self.graph["nodes"].append(node)
        self.graph["edges"] += [[source, number] for source in sorted(set(sources))]
        return number

    def heavy(self, sources: Sequence[int], op: str = "Conv") -> int:
        size = self.rng.randrange(8, 200) * KIB
        weights = self.rng.randrange(64, 2048) * KIB
        return self.add(op, sources, self.rng.uniform(1e6, 4e7), size, weights)

    def light(self, op: str, sources: Sequence[int]) -> int:
        return self.add(op, sources, self.rng.uniform(1e4, 4e5), self.rng.randrange(8, 200) * KIB)


def _residual(rng: Random, size: int) -> Graph:
    """Blocks of two layers with a skip connection."""
    drawing = _Drawing(rng, "residual")
    last = drawing.add("InputLayer", [], 0.0, 64 * KIB)
    while len(drawing.graph["nodes"]) < size:
        first = drawing.light("Relu", [drawing.heavy([last])])
        last = drawing.light("Add", [last, drawing.heavy([first])])
    drawing.heavy([last], "Dense")
    return drawing.graph


def _branches(rng: Random, size: int) -> Graph:
    """Blocks of two or three branches that are joined."""
    drawing = _Drawing(rng, "branches")
    last = drawing.heavy([drawing.add("InputLayer", [], 0.0, 64 * KIB)])
    while len(drawing.graph["nodes"]) < size:
        ends = []
        for _ in range(rng.randrange(2, 4)):
            end = last
            for _ in range(rng.randrange(1, 3)):
                end = drawing.heavy([end])
            ends.append(end)
        last = drawing.light("Concat", ends)
    drawing.heavy([last], "Dense")
    return drawing.graph


def _at_random(rng: Random, size: int) -> Graph:
    """Each node reads one to three of the preceding nodes; several inputs and outputs."""
    drawing = _Drawing(rng, "at-random")
    for _ in range(2):
        drawing.add("InputLayer", [], 0.0, rng.randrange(4, 64) * KIB)
    while (count := len(drawing.graph["nodes"])) < size:
        sources = [rng.randrange(max(0, count - 6), count) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.6:
            drawing.heavy(sources, rng.choice(("Conv", "MatMul", "Gemm")))
        else:
            drawing.light(rng.choice(("Relu", "Add", "Softmax", "Mul")), sources)
    return drawing.graph


_DRAWN: tuple[Callable[[Random, int], Graph], ...] = (_residual, _branches, _at_random)


# ---- clusters ---------------------------------------------------------------------------------------------------------


def _matrix(rng: Random, count: int, low: float, high: float) -> list[list[float]]:
    return [[0.0 if a == b else rounded(rng.uniform(low, high)) for b in range(count)] for a in range(count)]


_MEMORY = ("roomy", "tight", "roomy", "together", "none", "tight", "roomy")


def _cluster(rng: Random, number: int, weight_bytes: int, operators: Sequence[str]) -> dict[str, Any]:
    count = 6 if number in HARD else (1, 2, 3, 4, 2, 3, 5, 2, 4, 3, 6)[number % 11]
    memory = "together" if number in HARD else _MEMORY[number % len(_MEMORY)]
    share = {"roomy": 2.0, "tight": 0.75, "together": 2.2 / count, "none": 0.6 / count}[memory]
    base = rng.uniform(1e9, 1e10)
    devices = []
    for index in range(count):
        budget = int(weight_bytes * share * (1 if memory == "none" else rng.uniform(0.9, 1.3))) + 4 * KIB
        device: dict[str, Any] = {
            "name": _NAMES[index],
            "memory": f"{budget / MIB:.1f}MiB" if number % 3 == 0 else budget,
            "flops_per_second": rounded(base * (1 if number % 4 == 0 else rng.uniform(0.3, 2.0))),
        }
        if number % 5 == 2:
            device["seconds_per_operator"] = rounded(rng.uniform(1e-5, 2e-4))
        if operators and number % 6 == 1:
            device["operator_seconds"] = {
                name: rounded(rng.uniform(1e-4, 1e-2)) for name in rng.sample(operators, len(operators) // 3)
            }
        devices.append(device)
    cluster: dict[str, Any] = {"devices": devices}
    low, high = ((50, 500), (5, 20), (500, 1000), (10, 900))[number % 4]
    cluster["mbit_per_second"] = _matrix(rng, count, low, high) if number % 3 == 2 else float(high)
    if number % 4 in (1, 3):
        cluster["latency_seconds"] = (
            _matrix(rng, count, 1e-4, 2e-3) if number % 4 == 3 else rounded(rng.uniform(1e-4, 4e-3))
        )
    return cluster


def _drawn_case(rng: Random, number: int) -> tuple[str, Graph, dict[str, Any]]:
    size = 60 if number in HARD else rng.randrange(8, 26)
    graph = _DRAWN[number % 3](rng, size)
    weights = sum(node["param_bytes"] for node in graph["nodes"])
    return "graph.json", graph, _cluster(rng, number, weights, [node["name"] for node in graph["nodes"]])


def _options(number: int) -> tuple[str, ...]:
    options: list[str] = []
    if number % 5 == 3:
        options.append("--no-congestion")
    if wire := ("", "", "", "fp16", "", "int8", "")[number % 7]:
        options += ["--wire", wire]
    return tuple(options)


# ---- placement problems -----------------------------------------------------------------------------------------------


def _instance(rng: Random, number: int) -> dict[str, Any]:
    """In the format of Moirai's published instances; times have no unit."""
    count, size = 2 + number % 2, rng.randrange(6, 14)
    nodes: list[dict[str, Any]] = [
        {
            "id": index, "name": f"task{index}", "task": index, "memory": rng.randrange(5, 15),
            "time": [rng.randrange(1, 9) for _ in range(count)],
        }
        for index in range(size)
    ]  # fmt: skip
    pairs = [(source, index) for index in range(1, size) for source in {rng.randrange(index), rng.randrange(index)}]
    costs = [[0 if a == b else rng.randrange(1, 6) for a in range(count) for b in range(count)] for _ in pairs]
    whole = sum(node["memory"] for node in nodes)
    devices = [
        {"id": k, "name": _NAMES[k], "mem": whole if number % 2 else whole * 3 // (2 * count)} for k in range(count)
    ]
    edges = [[a, b, index, cost, None] for index, ((a, b), cost) in enumerate(zip(sorted(pairs), costs, strict=True))]
    return {"name": f"instance{number}", "K": count, "devices": devices, "nodes": nodes, "edges": edges}


# ---- cases ------------------------------------------------------------------------------------------------------------


def graph_cases(onnx_models: Sequence[tuple[str, Writer, int]]) -> Iterator[Case]:
    """Every cluster with each strategy of its objective. `onnx_models` are names with the bytes of their weights."""
    for number in range(NUM_CLUSTERS):
        rng = Random(7000 + number)
        content: Graph | Writer
        if number % 8 == 4 and number not in HARD:
            file, content, weights = onnx_models[number // 8 % len(onnx_models)]
            cluster = _cluster(rng, number, weights, ())
        else:
            file, content, cluster = _drawn_case(rng, number)
        objective = "throughput" if number % 2 else "latency"
        limit = _SHORT_LIMIT if number in HARD and objective == "latency" else TIME_LIMIT
        files = {file: content, "cluster.json": cluster}
        for strategy in THROUGHPUT if number % 2 else LATENCY:
            arguments = (
                f"@{file}", "--cluster", "@cluster.json", "--objective", objective, "--strategy", strategy,
                "--time-limit", str(limit), *_options(number), "--json",
            )  # fmt: skip
            clocked = limit == _SHORT_LIMIT and strategy in ("auto", "moirai")
            name = f"{number:02}-{file.partition('.')[0]}-{objective}-{strategy}"
            yield Case(name, "graph", arguments, files, limit, clocked)
    for number in range(NUM_INSTANCES):
        instance = _instance(Random(5000 + number), number)
        options = ("--time-limit", str(TIME_LIMIT), *(("--no-congestion",) if number == 2 else ()), "--json")
        for strategy in (each for each in LATENCY if each != "local"):
            arguments = ("@instance.json", "--strategy", strategy, *options)
            files = {"instance.json": instance}
            yield Case(f"instance{number}-{strategy}", "instance", arguments, files, TIME_LIMIT)
