"""A worker process goes on in other plans: its results are those of a freshly loaded plan, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import mostly_slow
from support.models import endless_decoder, save_random_model, small_bert, small_decoder
from support.plans import make_plan

from agent.daemon.store import ShardStore
from agent.worker.runtime import LoadGivenUp
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.families import read_spec
from hearth.errors import ChunkCorrupt, StepFailed
from hearth.plan.layer import LAYER_CHUNK_KINDS
from hearth.plan.plan import TransformerPlan
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array, unpack_array

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.cuda_double import gpu  # noqa: E402 (needs torch)
from support.engines import EngineCluster, store_chunks  # noqa: E402
from support.runtimes import RuntimeHome, RuntimeProcess  # noqa: E402

from agent.worker.transformer.loading import HeldWeights, load_shard  # noqa: E402

NAMES = ("kitchen", "attic", "cellar")
PROMPT = [5, 9, 3, 40, 41, 7, 8, 2, 11]


class Deployed:
    """A model whose chunks are in a store, and processes that run plans of it."""

    def __init__(self, model_dir: Path, folder: Path, compute_device: wire.ComputeDevice = "cpu") -> None:
        self.model_dir = model_dir
        self.compute_device: wire.ComputeDevice = compute_device
        self.store = ShardStore(folder / "store", 1 << 40, "all devices")
        self.home = RuntimeHome(self.store.path, compute_device)
        self.chunks: dict[wire.ChunkRef, Path] = {}
        self.parts: list[wire.ShardParts] = []

    def deploy(self, plan: TransformerPlan, names: Sequence[str]) -> None:
        self.chunks = store_chunks(self.model_dir, plan.model, self.store)
        self.parts = self.parts_of(plan)
        self.home.deploy(plan, names, self.parts)

    def parts_of(self, plan: TransformerPlan) -> list[wire.ShardParts]:
        return [
            wire.ShardParts(chunks=chunks_for_rank(tuple(self.chunks), plan, rank)) for rank in range(plan.num_ranks)
        ]

    def step(self, ids: Sequence[int], timeout: float = 30.0) -> tuple[wire.Run, list[bytes]]:
        """The request for the hidden states of a sequence, and its payload."""
        request = wire.Run(
            holder="test", epoch=self.home.plan.epoch, step=1, timeout_seconds=timeout,
            names=("token_ids", "cumulative_lengths"),
        )  # fmt: skip
        arrays = np.asarray(ids, np.int32), np.asarray([0, len(ids)], np.int32)
        return request, [bytes(frame) for array in arrays for frame in pack_array(array)]

    def embed(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        answers = self.home.ask([self.step(ids)] * len(self.home.ranks))
        return np.concatenate([unpack_array(frames) for _, frames in answers])


@pytest.fixture
def bert(tmp_path: Path) -> Iterator[Deployed]:
    deployed = Deployed(save_random_model(tmp_path / "model", small_bert(num_hidden_layers=5)), tmp_path)
    yield deployed
    deployed.home.close()


def fresh(deployed: Deployed, plan: TransformerPlan, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    device = deployed.compute_device
    with EngineCluster(deployed.model_dir, plan, chunks=deployed.chunks, compute_device=device) as cluster:
        return cluster.run([ids])[0]


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_results_after_every_change_of_plan_are_those_of_a_fresh_load(bert: Deployed, weights: str) -> None:
    spec = read_spec(bert.model_dir).model_copy(update={"weights": weights})
    changes: list[tuple[str, tuple[float, ...], tuple[str, ...]]] = [
        ("hmp", (1, 1, 1), NAMES),
        ("hmp", (1, 1, 1), NAMES),  # this one with a replicated embedding
        ("hmp", (1, 1), NAMES[1:]),  # a device was lost, and the ranks of the others change
        ("hmp", (2, 1, 1), (*NAMES[1:], "garage")),  # one joins
        ("pipeline", (1, 1, 1), (*NAMES[1:], "garage")),
        ("sp", (1, 1), NAMES[1:]),
        ("local", (1,), NAMES[2:]),
        ("hmp", (1, 2), ("garage", "cellar")),
        ("hmp", (1, 2), ("garage", "cellar")),  # the same again
    ]
    for epoch, (strategy, split, names) in enumerate(changes, start=1):
        plan = make_plan(spec, strategy, split, epoch=epoch, embedding="replicated" if epoch == 2 else "sharded")
        before = {name: process.bound for name, process in bert.home.processes.items()}
        bert.deploy(plan, names)
        for name in names:
            bound = bert.home.processes[name].bound
            assert bound is not None
            if (old := before.get(name)) is not None:
                assert (bound.port, bound.public_key) == (old.port, old.public_key)
        np.testing.assert_array_equal(bert.embed(PROMPT), fresh(bert, plan, PROMPT))


@pytest.mark.parametrize("weights", mostly_slow(["float32", "bfloat16", "int8"], lambda weights: weights == "int8"))
@pytest.mark.thorough
def test_results_on_cuda_after_changes_of_plan_are_close_to_those_of_a_fresh_load(weights: str, tmp_path: Path) -> None:
    """Not bit for bit: kept weights may be views with other strides, for which cuBLAS may choose other kernels."""
    model_dir = save_random_model(tmp_path / "model", small_bert(num_hidden_layers=3))
    spec = read_spec(model_dir).model_copy(update={"weights": weights})
    deployed = Deployed(model_dir, tmp_path, "cuda")
    with gpu(), closing(deployed.home):
        for epoch, split in enumerate(((1, 1, 1), (1, 1), (1, 2)), start=1):
            plan = make_plan(spec, "hmp", split, epoch=epoch)
            deployed.deploy(plan, NAMES[-len(split) :])
            tolerance = 1e-5 if weights == "float32" else 5e-3
            np.testing.assert_allclose(deployed.embed(PROMPT), fresh(deployed, plan, PROMPT), atol=tolerance)


def test_kept_weights_are_not_read_again(bert: Deployed) -> None:
    spec = read_spec(bert.model_dir)
    bert.deploy(make_plan(spec, "hmp", (1, 1, 1)), NAMES)
    held = [set(each.chunks) for each in bert.parts[1:]]
    plan = make_plan(spec, "hmp", (1, 1), epoch=2)
    expected = fresh(bert, plan, PROMPT)
    parts = bert.parts_of(plan)
    lacking = {chunk for old, new in zip(held, parts, strict=True) for chunk in set(new.chunks) - old}
    for chunk, path in bert.chunks.items():
        if chunk not in lacking:
            path.unlink()
    bert.home.deploy(plan, NAMES[1:], parts)
    np.testing.assert_array_equal(bert.embed(PROMPT), expected)


def test_weights_that_are_read_again_are_hashed(bert: Deployed) -> None:
    spec = read_spec(bert.model_dir).model_copy(update={"weights": "int8"})
    bert.deploy(make_plan(spec, "hmp", (1, 1)), NAMES[:2])
    next(path for chunk, path in bert.chunks.items() if chunk.kind == "mlp").write_bytes(b"damaged")
    plan = make_plan(spec, "hmp", (1,), epoch=2)
    with pytest.raises(ChunkCorrupt):
        bert.home.deploy(plan, NAMES[:1], bert.parts_of(plan))


def after_calls(number: int) -> Callable[[], bool]:
    """A function that returns True from this call on."""
    calls = itertools.count(1)
    return lambda: next(calls) >= number


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("num_chunks", [1, 9, 25])
def test_process_goes_on_after_a_load_that_was_given_up(bert: Deployed, weights: str, num_chunks: int) -> None:
    spec = read_spec(bert.model_dir).model_copy(update={"weights": weights})
    process, other = (bert.home.processes.setdefault(name, RuntimeProcess(bert.store.path)) for name in NAMES[:2])
    bert.chunks = store_chunks(bert.model_dir, spec, bert.store)
    first = make_plan(spec, "local", (1,), epoch=1)
    with pytest.raises(LoadGivenUp):  # before it has served anything
        other.load(first, 0, bert.parts_of(first)[0], bytes(16), after_calls(num_chunks))
    bert.deploy(make_plan(spec, "hmp", (1, 1, 1), epoch=2), NAMES)
    bound = process.bound
    replaced = make_plan(spec, "pipeline", (1, 2), epoch=3)
    with pytest.raises(LoadGivenUp):
        process.load(replaced, 1, bert.parts_of(replaced)[1], bytes(16), after_calls(num_chunks))
    plan = make_plan(spec, "hmp", (2, 1), epoch=4)
    bert.deploy(plan, NAMES[:2])
    assert bound is not None
    assert (process.bound.port, process.bound.public_key) == (bound.port, bound.public_key)
    np.testing.assert_array_equal(bert.embed(PROMPT), fresh(bert, plan, PROMPT))


def test_layers_that_a_given_up_load_has_read_are_not_read_again(bert: Deployed) -> None:
    spec = read_spec(bert.model_dir)
    plan = make_plan(spec, "local", (1,))
    bert.chunks = store_chunks(bert.model_dir, spec, bert.store)
    chunks = bert.parts_of(plan)[0].chunks
    read: list[str] = []

    def path_of(chunk: str) -> Path:
        read.append(chunk)
        return bert.store.path / chunk[:2] / chunk

    held, cpu = HeldWeights(), torch.device("cpu")
    with pytest.raises(LoadGivenUp):
        load_shard(plan, 0, chunks, path_of, cpu, held, lambda: len(read) == len(chunks) - 2)
    read.clear()
    shard = load_shard(plan, 0, chunks, path_of, cpu, held)
    of_last_layer = [
        chunk for chunk in chunks if chunk.kind in LAYER_CHUNK_KINDS and chunk.layer == spec.num_layers - 1
    ]
    assert 2 < len(read) <= len(of_last_layer)
    assert shard.num_bytes() == load_shard(plan, 0, chunks, path_of, cpu).num_bytes()


def test_running_step_fails_when_the_plan_ends_and_old_tiles_do_not_disturb_the_next(bert: Deployed) -> None:
    spec = read_spec(bert.model_dir)
    bert.deploy(make_plan(spec, "hmp", (1, 1, 1)), NAMES)
    step = bert.step(PROMPT, timeout=60.0)
    waits = [process.begin(b"stuck", *step) for process in bert.home.ranks[1:]]  # rank 0 does not take part
    plan = make_plan(spec, "hmp", (2, 1), epoch=2)
    bert.deploy(plan, NAMES[1:])
    for wait in waits:
        with pytest.raises(StepFailed, match="unloaded"):
            wait()
    np.testing.assert_array_equal(bert.embed(PROMPT), fresh(bert, plan, PROMPT))


def test_decoder_continues_its_tokens_in_the_next_plan(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", endless_decoder(), generates=True)
    deployed = Deployed(model_dir, tmp_path)
    spec = read_spec(model_dir)

    def generate(prompt: Sequence[int], count: int, first_index: int) -> list[int]:
        request_id = f"{deployed.home.plan.epoch} {first_index}".encode()
        sampling = wire.Sampling(temperature=1.0, seed=7)
        return deployed.home.generate(prompt, count, request_id, first_index=first_index, sampling=sampling)[0]

    with closing(deployed.home):
        deployed.deploy(make_plan(spec, "hmp", (1, 1), epoch=1), NAMES[:2])
        whole = generate(PROMPT, 8, 0)
        first = generate(PROMPT, 3, 0)
        assert (len(whole), len(first)) == (8, 3)
        deployed.deploy(make_plan(spec, "pipeline", (1, 1), epoch=2), NAMES[1:])
        deployed.deploy(make_plan(spec, "hmp", (1, 1), epoch=3), ("cellar", "attic"))
        assert first + generate(PROMPT + first, 5, 3) == whole


def test_answers_of_a_plan_that_ends_are_failures_for_all_waiting_requests(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", small_decoder("llama"), generates=True)
    deployed = Deployed(model_dir, tmp_path)
    spec = read_spec(model_dir)
    with closing(deployed.home):
        deployed.deploy(make_plan(spec, "hmp", (1, 1)), NAMES[:2])
        answers = [deployed.home.begin(PROMPT, 200, bytes([number])) for number in range(3)]
        deployed.home.ranks[0].end()
        for next_message in answers:
            with pytest.raises(StepFailed, match="unloaded"):
                list(iter(next_message, None))  # reads to the end
