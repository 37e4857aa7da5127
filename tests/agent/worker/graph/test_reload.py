"""The worker of a graph goes on in other plans, with the sessions of the segments that do not change."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from support.graph_engines import plan_of, put_into, random_array, random_cut, random_model, reference, segment_files
from support.runtimes import RuntimeHome

from agent.daemon.store import ShardStore
from agent.worker.graph.schedule import routes_for
from agent.worker.runtime import LoadGivenUp
from hearth.plan.plan import GraphPlan
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import Message, Run, RunDone, SegmentParts

NAMES = ("kitchen", "attic", "cellar")


def infer(home: RuntimeHome, plan: GraphPlan, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    requests: list[tuple[Message, list[bytes]]] = []
    for rank in range(plan.num_ranks):
        names = tuple(sorted(routes_for(plan, rank).graph_inputs))
        request = Run(holder="test", epoch=plan.epoch, step=1, timeout_seconds=30.0, names=names)
        requests.append((request, [bytes(frame) for name in names for frame in pack_array(feeds[name])]))
    outputs = {}
    for message, frames in home.ask(requests):
        assert isinstance(message, RunDone)
        outputs |= {name: unpack_array(frames[2 * i : 2 * i + 2]) for i, name in enumerate(message.names)}
    return outputs


@pytest.mark.parametrize("seed", range(3))
def test_results_after_every_change_of_plan_are_those_of_one_session(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    model = random_model(rng, 14)
    store = ShardStore(tmp_path / "store", 1 << 30, "all devices")
    feeds = {"x": random_array(1), "z": random_array(2)}
    expected = reference(model, feeds)
    with closing(RuntimeHome(store.path)) as home:
        for epoch, names in enumerate([NAMES, NAMES[1:], NAMES[::-1], NAMES[:1]], start=1):
            plan = random_cut(model, rng, 5, len(names)).with_epoch(epoch)
            parts = [
                SegmentParts(files=segment_files(model, plan, rank, put_into(store))) for rank in range(plan.num_ranks)
            ]
            ports = {name: process.bound.port for name, process in home.processes.items() if process.bound is not None}
            home.deploy(plan, names, parts)
            kept = [(process, ports[name]) for name, process in home.processes.items() if name in ports]
            assert all(process.bound is not None and process.bound.port == port for process, port in kept)
            outputs = infer(home, plan, feeds)
            assert outputs.keys() == expected.keys()
            for name, array in outputs.items():
                np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5)


def test_segments_that_both_plans_have_are_not_read_again(tmp_path: Path) -> None:
    model = random_model(random.Random(5), 12)
    store = ShardStore(tmp_path / "store", 1 << 30, "all devices")
    feeds = {"x": random_array(1), "z": random_array(2)}
    count = len(model.graph.node)
    cuts = [range(count // 2), range(count // 2, count)]

    def deploy(ranks: tuple[int, int], epoch: int, names: tuple[str, ...]) -> GraphPlan:
        plan = plan_of(model, list(zip(ranks, cuts, strict=True))).with_epoch(epoch)
        files = [segment_files(model, plan, rank, put) for rank in range(plan.num_ranks)]
        home.deploy(plan, names, [SegmentParts(files=each) for each in files])
        return plan

    put = put_into(store)
    with closing(RuntimeHome(store.path)) as home:
        before = infer(home, deploy((0, 1), 1, NAMES[:2]), feeds)
        put = put_into(ShardStore(tmp_path / "elsewhere", 1 << 30, "another device"))
        for chunk in store.path.glob("??/*"):
            chunk.unlink()
        whole = plan_of(model, [(0, cut) for cut in cuts]).with_epoch(2)
        files = segment_files(model, whole, 0, put)
        for name in NAMES[:2]:  # the load of another plan is given up: the segments that the process has stay
            with pytest.raises(LoadGivenUp):
                home.processes[name].load(whole, 0, SegmentParts(files=files), bytes(16), lambda: True)
        after = infer(home, deploy((1, 0), 3, (NAMES[1], NAMES[0])), feeds)  # the ranks change, the segments stay
        assert after.keys() == before.keys() != set()
        for name, array in after.items():
            np.testing.assert_array_equal(array, before[name])
