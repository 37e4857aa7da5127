"""A stream that goes on in another plan takes its KV cache along: equal tokens, and few rows are computed again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.cases import mostly_slow
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_generation

from agent.daemon.store import ShardStore
from coordinator.models.checkpoint.chunk_layout import chunks_for_rank
from coordinator.models.checkpoint.families import read_spec
from hearth.plan.model_spec import KvFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits, Strategy
from hearth.wire import messages as wire

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.cuda_double import gpu  # noqa: E402 (needs torch)
from support.engines import store_chunks  # noqa: E402
from support.runtimes import RuntimeHome  # noqa: E402

NAMES = ("kitchen", "attic", "cellar", "garage")
PROMPT = np.random.default_rng(3).integers(3, 2000, 150).tolist()
COUNT = 42  # tokens of the answer
BREAK = 32  # of these, the number that have arrived when the plan ends
GREEDY = wire.Sampling()
SAMPLED = wire.Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=11)


class Stored:
    """A decoder whose chunks are in a store."""

    def __init__(self, folder: Path) -> None:
        model_dir = save_random_model(folder / "model", small_decoder("llama"), generates=True)
        self.spec = read_spec(model_dir)
        store = ShardStore(folder / "store", 1 << 40, "all devices")
        self.path = store.path
        self.chunks = tuple(store_chunks(model_dir, self.spec, store))


class Home:
    """Worker runtimes that deploy plan after plan of one decoder and generate on them."""

    def __init__(self, model: Stored, compute_device: wire.ComputeDevice = "cpu") -> None:
        self.spec = model.spec
        self._chunks = model.chunks
        self.home = RuntimeHome(model.path, compute_device)
        self.epoch = 0

    def plan(self, strategy: Strategy, split: Sequence[float], **limits: object) -> TransformerPlan:
        self.epoch += 1
        fields = {"kv_tokens": 2048, "max_sequences": 8, "prefill_rows": 64, "kv_copies": True, **limits}
        plan = make_plan(self.spec, strategy, split, epoch=self.epoch)
        return with_generation(plan, GenerationLimits.model_validate(fields))

    def deploy(self, names: Sequence[str], plan: TransformerPlan) -> None:
        parts = [wire.ShardParts(chunks=chunks_for_rank(self._chunks, plan, rank)) for rank in range(plan.num_ranks)]
        self.home.deploy(plan, names, parts)

    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: wire.Sampling,
        first_index: int = 0,
        stop_after: int | None = None,
        stream: str = "story",
        scope: str = "",
    ) -> tuple[list[int], wire.GenerationEnded | None]:
        """The tokens, and how the answer ended. `stop_after` so many tokens, the answer is left alone."""
        return self.home.generate(
            prompt, count, self._request_id(stream, first_index), stop_after,
            first_index=first_index, sampling=sampling, stream=stream, prefix_scope=scope,
        )  # fmt: skip

    def cancel(self, stream: str = "story") -> None:
        """Cancel the stream's first request on this plan."""
        runtime = self.home.ranks[0]._runtime
        runtime.handle(self._request_id(stream, 0), wire.Cancel(request=self._request_id(stream, 0)), [])

    def _request_id(self, stream: str, first_index: int) -> bytes:
        name = f"{self.epoch} {stream} {first_index}"
        return hashlib.sha256(name.encode()).digest()[:8]

    def begin(self, sampling: wire.Sampling) -> tuple[list[int], list[int]]:
        """The whole answer, and as many of its tokens as arrive before the plan ends."""
        whole, _ = self.generate(PROMPT, COUNT, sampling, stream="whole")
        return whole, self.generate(PROMPT, COUNT, sampling, stop_after=BREAK)[0]

    def go_on(self, tokens: list[int], sampling: wire.Sampling, stream: str = "story") -> tuple[list[int], int]:
        """The rest of the answer, and the number of rows that were not computed again."""
        rest, end = self.generate(PROMPT + tokens, COUNT - len(tokens), sampling, len(tokens), stream=stream)
        return rest, end.num_kept_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def home(model: Stored) -> Iterator[Home]:
    home = Home(model)
    yield home
    home.home.close()


CHANGES: list[tuple[Strategy, tuple[float, ...], int | None, Strategy, tuple[float, ...]]] = [
    ("hmp", (1, 1, 1), 0, "hmp", (1, 1)),
    ("hmp", (2, 1, 1), 1, "hmp", (1, 2)),
    ("hmp", (1, 2), 1, "local", (1,)),
    ("megatron-tp", (1, 1, 1), 2, "hmp", (1, 1)),
    ("hmp", (1, 1, 1), 1, "pipeline", (1, 1)),
    ("pipeline", (1, 1, 1), 1, "pipeline", (1, 1)),
    ("pipeline", (1, 1, 1), 0, "hmp", (1, 1)),
    ("sp", (1, 1, 1), 1, "hmp", (1, 1)),
    ("hmp", (1, 1), None, "hmp", (1, 1, 1)),  # a device joins
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "split", "lost", "after", "next_split", "sampling"),
    [
        *(
            pytest.param(
                *change, SAMPLED, id=f"{change}-sampled", marks=[] if number in (0, 4) else pytest.mark.thorough
            )
            for number, change in enumerate(CHANGES)
        ),
        *(
            pytest.param(*change, GREEDY, id=f"{change}-greedy", marks=[] if number in (0, 4) else pytest.mark.slow)
            for number, change in enumerate(CHANGES)
        ),
    ],
)
def test_stream_continues_with_its_kv_cache_after_a_loss(
    home: Home, before: Strategy, split: tuple[float, ...], lost: int | None, after: Strategy,
    next_split: tuple[float, ...], sampling: wire.Sampling,
) -> None:  # fmt: skip
    whole_prompts = {"prefill_rows": 512} if before == "sp" else {}
    home.deploy(NAMES[: len(split)], home.plan(before, split, **whole_prompts))
    whole, tokens = home.begin(sampling)
    assert len(whole) == COUNT
    names = [name for rank, name in enumerate(NAMES[: len(split)]) if rank != lost]
    if lost is not None:
        home.home.kill(NAMES[lost])
    else:
        names = [NAMES[2], *names]
    home.deploy(names, home.plan(after, next_split))
    rest, num_kept = home.go_on(tokens, sampling)
    assert tokens + rest == whole
    # The copy lags behind by less than one piece, and by what is computed while the plan ends.
    assert len(PROMPT) + BREAK - 20 <= num_kept < len(PROMPT) + BREAK


@pytest.mark.parametrize(
    ("before", "split", "lost", "after", "next_split"),
    mostly_slow([CHANGES[8], CHANGES[1]], lambda *case: case == CHANGES[8]),
    ids=str,
)
@pytest.mark.thorough
def test_stream_continues_on_cuda(
    model: Stored, before: Strategy, split: tuple[float, ...], lost: int | None, after: Strategy,
    next_split: tuple[float, ...],
) -> None:  # fmt: skip
    """What ranks keep is in host memory, and goes from there to other ranks' devices."""
    with gpu():
        home = Home(model, "cuda")
        test_stream_continues_with_its_kv_cache_after_a_loss(home, before, split, lost, after, next_split, GREEDY)
        home.home.close()


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_stream_continues_with_a_cache_in_another_format(home: Home, kind: KvFormat) -> None:
    home.spec = home.spec.model_copy(update={"kv_cache": kind})
    home.deploy(NAMES[:2], home.plan("hmp", (1, 1)))
    whole, tokens = home.begin(GREEDY)
    home.home.kill(NAMES[1])
    home.deploy(NAMES[:1], home.plan("local", (1,)))
    rest, num_kept = home.go_on(tokens, GREEDY)
    assert tokens + rest == whole
    assert num_kept > len(PROMPT)


def test_stream_is_replayed_where_no_copy_was_kept(home: Home) -> None:
    home.deploy(NAMES[:3], home.plan("hmp", (1, 1, 1), kv_copies=False))
    tokens, _ = home.generate(PROMPT, COUNT, GREEDY, stop_after=BREAK)
    home.home.kill(NAMES[1])
    home.deploy((NAMES[0], NAMES[2]), home.plan("hmp", (1, 1)))
    rest, num_kept = home.go_on(tokens, GREEDY)
    assert num_kept == 0
    assert len(tokens + rest) == COUNT


def test_second_loss_before_a_stream_continues(home: Home) -> None:
    """What is kept outlives a plan on which nothing ran, and copies of two neighbours are enough for two losses."""
    home.deploy(NAMES, home.plan("hmp", (1, 1, 1, 1)))
    whole, tokens = home.begin(SAMPLED)
    home.home.kill(NAMES[0])
    home.deploy(NAMES[1:], home.plan("hmp", (1, 1, 1)))
    home.home.kill(NAMES[2])
    home.deploy((NAMES[3], NAMES[1]), home.plan("hmp", (1, 1)))
    rest, num_kept = home.go_on(tokens, SAMPLED)
    assert tokens + rest == whole
    assert num_kept > len(PROMPT)


def test_cancelled_stream_continues_in_the_next_plan(home: Home) -> None:
    """The coordinator cancels the streams when it replaces a plan, although all devices are there."""
    home.deploy(NAMES[:2], home.plan("hmp", (1, 1), kv_copies=False))
    whole, tokens = home.begin(GREEDY)
    home.cancel()
    home.generate(PROMPT[:5], 2, GREEDY, stream="")  # further steps
    home.deploy(NAMES[:3], home.plan("hmp", (1, 1, 1)))
    rest, num_kept = home.go_on(tokens, GREEDY)
    assert tokens + rest == whole
    assert num_kept == len(PROMPT) + BREAK - 1


def test_only_equal_tokens_are_taken_over(home: Home) -> None:
    home.deploy(NAMES[:2], home.plan("hmp", (1, 1)))
    home.generate(PROMPT, COUNT, GREEDY, stop_after=BREAK)
    home.deploy(NAMES[:2], home.plan("hmp", (1, 2)))
    assert [kept.stream for kept in home.home.kept] == ["story"]
    other = [*PROMPT[:100], 7, *PROMPT[101:]]
    changed, end = home.generate(other, 20, GREEDY)
    assert end.num_kept_rows == 100
    fresh, end = home.generate(other, 20, GREEDY, stream="fresh")
    assert end.num_kept_rows == 0
    assert changed == fresh


def test_what_has_no_room_is_dropped_and_replayed(home: Home) -> None:
    home.deploy(NAMES[:2], home.plan("hmp", (1, 1)))
    whole, tokens = home.begin(GREEDY)
    home.deploy(NAMES[:2], home.plan("hmp", (1, 2), kv_tokens=len(PROMPT) + COUNT))
    rest, num_kept = home.go_on(tokens, GREEDY)
    assert tokens + rest == whole
    assert num_kept == 0


def test_new_requests_take_the_room_of_streams_that_do_not_return(home: Home) -> None:
    home.deploy(NAMES[:2], home.plan("hmp", (1, 1)))
    home.generate(PROMPT, COUNT, GREEDY, stop_after=BREAK)
    home.deploy(NAMES[:2], home.plan("hmp", (1, 2), kv_tokens=260))
    assert home.home.kept
    tokens, end = home.generate(PROMPT[:20], 100, GREEDY, stream="another")
    assert end is not None
    assert len(tokens) == 100
    runtime = home.home.ranks[0]._runtime
    assert not len(runtime._kept)  # type: ignore[union-attr]


# ---- the prefix cache -------------------------------------------------------------------------------------------------

# Names by rank before and after; whether the devices have all heads of all layers then.
PREFIX_CHANGES: list[tuple[Strategy, tuple[float, ...], str, Strategy, tuple[float, ...], str, bool]] = [
    ("hmp", (1, 2), "ka", "megatron-tp", (1, 2), "ka", True),  # all heads stay
    ("hmp", (1, 2), "ka", "hmp", (2, 1), "ka", True),  # one head of three moves
    ("hmp", (1, 2), "ka", "hmp", (1, 1, 1), "akc", True),  # a device joins, and ranks change
    ("hmp", (1, 2), "ka", "pipeline", (1, 2), "ka", True),
    ("pipeline", (1, 1, 1), "kac", "pipeline", (2, 1), "kc", False),  # the layer of a lost device is gone
    ("local", (1,), "k", "hmp", (1, 1), "ka", True),
]


@pytest.mark.parametrize("change", PREFIX_CHANGES, ids=str)
def test_prefix_cache_outlives_a_change_of_plan(
    home: Home, change: tuple[Strategy, tuple[float, ...], str, Strategy, tuple[float, ...], str, bool]
) -> None:
    before, split, names, after, next_split, next_names, is_whole = change
    by_letter = {name[0]: name for name in NAMES}
    home.deploy([by_letter[each] for each in names], home.plan(before, split))
    whole, _ = home.generate(PROMPT, COUNT, GREEDY, stream="", scope="app")
    for gone in set(names) - set(next_names):
        home.home.kill(by_letter[gone])
    home.deploy([by_letter[each] for each in next_names], home.plan(after, next_split))
    for scope, num_cached in (("another", 0), ("app", 144 if is_whole else 0)):  # 9 of the prompt's blocks are full
        answer, end = home.generate(PROMPT, COUNT, GREEDY, stream=f"as {scope}", scope=scope)
        assert end.num_kept_rows == num_cached
        assert answer == whole
    turn = [*PROMPT, *whole, 5, 6]
    _, end = home.generate(turn, 4, GREEDY, stream="next", scope="app")
    assert end.num_kept_rows >= 144


def test_prefix_cache_outlives_a_plan_that_ran_nothing(home: Home) -> None:
    home.deploy(NAMES[:2], home.plan("hmp", (1, 2)))
    whole, _ = home.generate(PROMPT, COUNT, GREEDY, stream="", scope="app")
    for _ in range(2):
        home.deploy(NAMES[:2], home.plan("hmp", (1, 2)))
    again, end = home.generate(PROMPT, COUNT, GREEDY, stream="", scope="app")
    assert again == whole
    assert end.num_kept_rows == 144


def test_prefix_cache_is_cut_to_the_room_of_the_next_plan(home: Home) -> None:
    home.deploy(NAMES[:2], home.plan("hmp", (1, 2)))
    home.generate(PROMPT, COUNT, GREEDY, stream="", scope="app")
    home.deploy(NAMES[:2], home.plan("hmp", (1, 2), kv_tokens=64))
    _, end = home.generate(PROMPT[:50], 10, GREEDY, stream="", scope="app")
    assert 0 < end.num_kept_rows <= 48
