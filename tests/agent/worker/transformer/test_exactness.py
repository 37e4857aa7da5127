"""The distributed result equals `transformers` on one device, for every strategy and any split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import mostly_slow
from support.models import minilm, save_random_model, small_bert, small_distilbert
from support.plans import make_plan

from coordinator.models.checkpoint.families import read_spec
from hearth.plan.common import WireFormat
from hearth.plan.phases import Phase, Work
from hearth.plan.transformer import SEQUENCE, STRATEGIES, LayerMode

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
transformers = pytest.importorskip("transformers")

from support.engines import EngineCluster  # noqa: E402 (needs torch)
from support.reference import hidden_states  # noqa: E402

TOLERANCE = 1e-4

# Weights of one to five devices: even, uneven, and zero for heads or rows.
SPLITS = [(1,), (1, 1), (3, 1), (2, 1, 3), (1, 1, 1, 1), (5, 1, 2, 1, 1), (1, 0, 2)]


def random_sequences(lengths: list[int], vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("bert"), small_bert())


@pytest.fixture(scope="module")
def distilbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("distilbert"), small_distilbert(), seed=1)


# Pipelines are divided by layers: see test_pipeline.py.
@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "pipeline"])
@pytest.mark.parametrize(
    ("family", "split"),
    [*(("bert", split) for split in SPLITS), ("distilbert", (3, 1)), ("distilbert", (1, 0, 2))],
    ids=str,
)
def test_every_strategy_and_split_equals_transformers(
    family: str, strategy: str, split: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    if strategy == "local" and len(split) > 1:
        split = (1,)
    model_dir = request.getfixturevalue(family)
    spec = read_spec(model_dir)
    with EngineCluster(model_dir, make_plan(spec, strategy, split)) as cluster:
        for lengths in ([1], [3], [17], [spec.max_positions], [5, 1, 9]):
            sequences = random_sequences(lengths, spec.vocab_size)
            rows, _ = cluster.run(sequences)
            assert np.abs(rows - hidden_states(model_dir, sequences)).max() < TOLERANCE, lengths


@pytest.mark.parametrize("strategy", ["hmp", "sp", "megatron-tp", "pipeline"])
def test_tiles_that_arrive_twice_change_nothing(strategy: str, bert: Path) -> None:
    """After a connection broke, the newest tiles are sent again."""
    spec = read_spec(bert)
    sequences = random_sequences([21, 9], spec.vocab_size)
    with EngineCluster(bert, make_plan(spec, strategy, (1, 1) if strategy == "pipeline" else (1, 1, 1))) as cluster:
        cluster.hub.repeats = True
        for _ in range(3):
            rows, _ = cluster.run(sequences)
            assert np.abs(rows - hidden_states(bert, sequences)).max() < TOLERANCE


@pytest.mark.parametrize("strategy", ["hmp", "sp", "megatron-tp"])
def test_devices_without_rows_or_heads(strategy: str, bert: Path) -> None:
    spec = read_spec(bert)
    sequences = random_sequences([13], spec.vocab_size)
    plan = make_plan(spec, strategy, weights=(1, 0, 2), row_weights=(1, 2, 0))
    with EngineCluster(bert, plan) as cluster:
        rows, _ = cluster.run(sequences)
    assert cluster.rows_by_rank[2] == 0
    assert np.abs(rows - hidden_states(bert, sequences)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "split", "row_weights"),
    [("hmp", (2, 1, 3), None), ("hmp", (1, 0, 2), (1, 2, 0)), ("sp", (1, 0, 2), None), ("megatron-tp", (3, 1), None)],
    ids=str,
)
def test_replicated_embedding_is_exact_and_exchanges_nothing(
    strategy: str, split: tuple[int, ...], row_weights: tuple[int, ...] | None, bert: Path
) -> None:
    spec = read_spec(bert)
    plan = make_plan(spec, strategy, split, row_weights, embedding="replicated")
    sequences = random_sequences([5, 1, 9], spec.vocab_size)
    with EngineCluster(bert, plan) as cluster:
        rows, answers = cluster.run(sequences, trace=True)
        events = [event for trace in cluster.traces(answers) for event in trace.events]
        for rank, shard in enumerate(cluster.shards):
            held = spec.vocab_size if plan.body.has_rows(rank) else plan.body.vocabulary[rank]
            assert shard.embedding.word.shape[0] == held
    assert np.abs(rows - hidden_states(bert, sequences)).max() < TOLERANCE
    assert Phase.EMBED not in {event.kind for event in events}
    assert Work.EMBEDDING in {event.kind for event in events}


R, S = "replicated", "sharded"
MODES = [LayerMode(qkv=qkv, out=out, mlp=mlp) for qkv in (R, S) for out in (R, S) for mlp in (R, S)]


@pytest.mark.parametrize(
    "split",
    mostly_slow([(split,) for split in SPLITS[1:]], lambda split: split in ((3, 1), (5, 1, 2, 1, 1), (1, 0, 2))),
    ids=str,
)
# `MODES[-1]`, all sharded, is what the test of strategies has.
@pytest.mark.parametrize("mode", [*MODES[:-1], SEQUENCE, SEQUENCE.model_copy(update={"mlp": S})], ids=str)
def test_every_layer_mode_equals_transformers(mode: LayerMode, split: tuple[int, ...], bert: Path) -> None:
    spec = read_spec(bert)
    with EngineCluster(bert, make_plan(spec, "hmp", split, modes=[mode, LayerMode()])) as cluster:
        for lengths in ([3], [spec.max_positions], [5, 1, 9]):
            sequences = random_sequences(lengths, spec.vocab_size)
            rows, _ = cluster.run(sequences)
            assert np.abs(rows - hidden_states(bert, sequences)).max() < TOLERANCE, lengths


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_layer_modes_without_rows_or_heads_are_deterministic(mode: LayerMode, bert: Path) -> None:
    spec = read_spec(bert)
    sequences = random_sequences([13, 20], spec.vocab_size)
    plan = make_plan(spec, "hmp", weights=(1, 0, 2), row_weights=(1, 2, 0), modes=[LayerMode(), mode])
    with EngineCluster(bert, plan) as cluster:
        first, _ = cluster.run(sequences)
        assert np.abs(first - hidden_states(bert, sequences)).max() < TOLERANCE
        for _ in range(5):
            assert np.array_equal(cluster.run(sequences)[0], first)


def test_overlap_does_not_change_the_result(bert: Path) -> None:
    spec = read_spec(bert)
    sequences = random_sequences([31], spec.vocab_size)
    results = []
    for overlap in (True, False):
        plan = make_plan(spec, "hmp", (2, 1, 1), overlap=overlap)
        with EngineCluster(bert, plan) as cluster:
            results.append(cluster.run(sequences)[0])
    assert np.array_equal(*results)


@pytest.mark.parametrize("strategy", ["hmp", "sp", "megatron-tp"])
def test_runs_of_a_plan_are_bit_identical(strategy: str, bert: Path) -> None:
    spec = read_spec(bert)
    sequences = random_sequences([29, 4], spec.vocab_size)
    with EngineCluster(bert, make_plan(spec, strategy, (3, 2, 1))) as cluster:
        first = cluster.run(sequences)[0]
        for _ in range(10):
            assert np.array_equal(cluster.run(sequences)[0], first)


def test_mean_output_is_the_sum_of_each_sequences_rows(bert: Path) -> None:
    spec = read_spec(bert)
    sequences = random_sequences([7, 2, 12], spec.vocab_size)
    with EngineCluster(bert, make_plan(spec, "hmp", (1, 2))) as cluster:
        rows = cluster.run(sequences)[0]
        sums = cluster.run(sequences, output="mean")[0]
    expected = [part.sum(axis=0) for part in np.split(rows, np.cumsum([7, 2]))]
    assert np.allclose(sums, expected, atol=1e-4)


@pytest.mark.parametrize(("values", "tolerance"), [("fp16", 0.02), ("bf16", 0.1), ("int8", 0.3)])
def test_lossy_wire_formats_stay_close(values: Any, tolerance: float, bert: Path) -> None:
    spec = read_spec(bert)
    sequences = random_sequences([40], spec.vocab_size)
    plan = make_plan(spec, "hmp", (1, 1, 1), wire=WireFormat(values=values, lz4="on"))
    with EngineCluster(bert, plan) as cluster:
        rows, _ = cluster.run(sequences)
    difference = np.abs(rows - hidden_states(bert, sequences)).max()
    assert 0 < difference < tolerance


@pytest.mark.parametrize("strategy", ["hmp", "sp", "megatron-tp"])
def test_wire_format_may_differ_between_links(strategy: Any, bert: Path) -> None:
    """An exact tile loses precision on the first lossy link, also when a rank only forwards it."""
    spec = read_spec(bert)
    sequences = random_sequences([40], spec.vocab_size)
    everywhere = tuple((a, b) for a in range(3) for b in range(3) if a != b)

    def run(exact_links: tuple[tuple[int, int], ...], name: str) -> tuple[np.ndarray[Any, Any], list[int]]:
        plan = make_plan(spec, strategy, (1, 1, 1), wire=WireFormat(values="fp16", lz4="off"))
        body = plan.body.model_copy(update={"exact_links": exact_links})
        with EngineCluster(bert, plan.model_copy(update={"body": body})) as cluster:
            rows, answers = cluster.run(sequences, trace=True)
        sent = [sum(e.num_bytes for e in answer.trace if e.lane == "send") for answer in answers]
        return rows, sent

    with EngineCluster(bert, make_plan(spec, strategy, (1, 1, 1))) as cluster:
        exact = cluster.run(sequences)[0]
    mixed, sent = run(((0, 1), (0, 2)), "mixed")
    assert np.array_equal(run(everywhere, "all")[0], exact)
    assert 0 < np.abs(mixed - exact).max() < 0.02
    # Rank 0 sends exact tiles, except those that arrived lossy; the others send half as many bytes, also of its tiles.
    assert 1.4 < sent[0] / sent[1] < 2.1
    assert 0.9 < sent[1] / sent[2] < 1.1


@pytest.mark.parametrize("num_layers", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_bert_base_shape_with_random_weights(num_layers: int, tmp_path: Path) -> None:
    # BERT-base with a smaller vocabulary: 12 heads, hidden size 768.
    config = transformers.BertConfig(vocab_size=3000, num_hidden_layers=num_layers)
    model_dir = save_random_model(tmp_path / "model", config)
    for strategy in ("hmp", "megatron-tp"):
        check_full_shape(model_dir, strategy, (3, 2, 1), [101], tmp_path / strategy)


@pytest.mark.parametrize("num_layers", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_distilbert_shape_with_random_weights(num_layers: int, tmp_path: Path) -> None:
    config = transformers.DistilBertConfig(vocab_size=3000, n_layers=num_layers)
    model_dir = save_random_model(tmp_path / "model", config)
    check_full_shape(model_dir, "hmp", (2, 1), [64], tmp_path)


@pytest.mark.parametrize(
    ("strategy", "split"), [("hmp", (5, 4, 3)), ("hmp", (1, 1, 1, 1, 1)), ("sp", (1, 2)), ("local", (1,))]
)
def test_minilm_with_its_real_weights(strategy: str, split: tuple[int, ...], tmp_path: Path) -> None:
    check_full_shape(minilm(), strategy, split, [512, 1, 37], tmp_path)


def check_full_shape(model_dir: Path, strategy: Any, split: tuple[int, ...], lengths: list[int], folder: Path) -> None:
    spec = read_spec(model_dir)
    with EngineCluster(model_dir, make_plan(spec, strategy, split)) as cluster:
        for length in lengths:
            sequences = random_sequences([length], spec.vocab_size)
            rows, _ = cluster.run(sequences)
            assert np.abs(rows - hidden_states(model_dir, sequences)).max() < TOLERANCE
