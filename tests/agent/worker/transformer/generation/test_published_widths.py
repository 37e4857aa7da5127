"""Tokens and logits equal those of `transformers` at the widths of published models, with fewer layers.

Random weights with randomised biases and norm gains, float32; greedy; all prompts in one batch, but one at a time in
`transformers`. All ranks of a plan run in this process over the in-memory transport. The whole table takes long: its tests
are marked `slow`. The same comparison on a small model runs with all other tests.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_seq_len

from agent.daemon.store import ShardStore
from coordinator.models.checkpoint.families import read_spec
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits, LayerMode, Strategy
from hearth.wire.messages import ChunkRef

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
transformers = pytest.importorskip("transformers")

from support.engines import EngineCluster, GenerationCluster, store_chunks  # noqa: E402 (needs torch)

LOGIT_TOLERANCE = 1e-3  # largest accepted absolute difference of a logit: float32 sums in another order came to 7.5e-5
# Lengths of the prompts in one batch: one token, several chunks, past a sliding window.
PROMPT_TOKENS = (1, 17, 129, 500)
NEW_TOKENS = 64  # generated per prompt: enough decoding steps to read what earlier ones wrote into the KV cache
CHUNK_ROWS = 96  # of a prefill step in chunked cases: splits two of the four prompts, one of them into six chunks


# ---- the table of families and plans ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A published model's config, reduced to `num_layers` layers so that it fits in memory twice."""

    config: Mapping[str, Any]
    num_layers: int = 4

    @property
    def shortened(self) -> Any:
        """The config as read by transformers, without special tokens: random weights emit them at random."""
        depth = "n_layer" if self.config["model_type"] == "gpt2" else "num_hidden_layers"
        changes = {depth: self.num_layers, "bos_token_id": None, "eos_token_id": None}
        values = {key: value for key, value in self.config.items() if key != "model_type"}
        return transformers.AutoConfig.for_model(self.config["model_type"], **{**values, **changes})


def llama(num_layers: int = 4, **config: Any) -> Family:
    return Family({"hidden_act": "silu", "rms_norm_eps": 1e-5, **config}, num_layers)


FAMILIES: dict[str, Family] = {
    "gpt2-124m": Family(
        {"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257},
    ),
    "opt-125m": Family(
        {"model_type": "opt", "num_attention_heads": 12, "hidden_size": 768, "ffn_dim": 3072, "vocab_size": 50272,
         "max_position_embeddings": 2048, "word_embed_proj_dim": 768},
    ),
    "llama2-7b": llama(
        2, model_type="llama", hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "llama3.2-1b": llama(
        model_type="llama", hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "qwen2-0.5b": llama(
        model_type="qwen2", hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, max_position_embeddings=131072, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3-0.6b": llama(
        model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    # The published window is 4096 tokens; 128 here, so that prompts of 129 and 500 tokens exceed it.
    "mistral-7b": llama(
        2, model_type="mistral", hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=32000, max_position_embeddings=32768, sliding_window=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One plan. `split`: relative shares of the devices; `chunked`: prefill long prompts in several steps."""

    strategy: Strategy
    split: tuple[float, ...]
    chunked: bool = False
    replicated: bool = False

    def __str__(self) -> str:
        said = f"{self.strategy}-{':'.join(f'{weight:g}' for weight in self.split)}"
        return said + "-replicated" * self.replicated + "-chunked" * self.chunked


CASES = (
    Case("local", (1,)),
    Case("local", (1,), chunked=True),
    Case("hmp", (2, 1)),
    Case("hmp", (2, 1, 3), chunked=True),
    Case("hmp", (1, 0, 2)),  # a device with no share
    Case("hmp", (1, 3, 1, 2)),
    Case("hmp", (3, 1, 2), replicated=True),
    Case("sp", (3, 1)),
    Case("sp", (1, 2, 1, 1)),
    Case("megatron-tp", (1, 2), chunked=True),
    Case("megatron-tp", (2, 1, 1, 3)),
    Case("pipeline", (1, 3)),
    Case("pipeline", (2, 1, 1), chunked=True),
    Case("pipeline", (1, 1, 1, 1)),
)


# ---- the comparison -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The answer of `transformers` to one prompt: tokens, and the logits that they were chosen from."""

    prompt: list[int]
    tokens: list[int]
    logits: Any  # [T,V]


@dataclass(frozen=True)
class Model:
    """A checkpoint with its chunks, and the reference answers."""

    directory: Path
    spec: ModelSpec
    chunks: Mapping[ChunkRef, Path]
    expected: Sequence[Expected]


@contextmanager
def made(config: Any) -> Iterator[Model]:
    """A model with random weights. Its files are removed at once: those of all families are too large to keep."""
    with tempfile.TemporaryDirectory(prefix="hearth-widths-") as folder:
        directory = save_random_model(Path(folder) / "model", config, generates=True)
        spec = read_spec(directory)
        chunks = store_chunks(directory, spec, ShardStore(Path(folder) / "chunks", 1 << 40, "all devices"))
        yield Model(directory, spec, chunks, expected_answers(directory, spec))
    gc.collect()


def expected_answers(directory: Path, spec: ModelSpec) -> list[Expected]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    chance = np.random.default_rng(20240229)
    found = []
    for length in PROMPT_TOKENS:
        prompt: list[int] = chance.integers(3, spec.vocab_size, length).tolist()
        with torch.inference_mode():
            answer = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, length, dtype=torch.int64), do_sample=False,
                max_new_tokens=NEW_TOKENS, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        tokens = answer.sequences[0, length:].tolist()
        found.append(Expected(prompt, tokens, torch.cat(answer.logits).float()))
    return found


class RecordedHead:
    """An output head that records its logits, one row per chosen token."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self.logits: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def matmul(self, x_sk: Any, bias_n: Any = None, out: Any = None) -> Any:
        y_sn = self._head.matmul(x_sk, bias_n, out)
        self.logits.extend(y_sn.clone())
        return y_sn


class Comparison(NamedTuple):
    """The answers of a plan against those of `transformers`."""

    num_equal: int  # tokens before the first one that differs, of all prompts
    largest: float  # difference of a logit up to there
    differences: list[str]  # answers whose tokens differ, or whose logits differ by the tolerance or more


def compare(model: Model, cluster: EngineCluster) -> Comparison:
    heads = []
    for shard in cluster.shards:
        if shard.embedding.head is not None and shard.embedding.head_rows.size:
            heads.append(RecordedHead(shard.embedding.head))
            shard.embedding.head = heads[-1]
    home = GenerationCluster(cluster)
    requests = [home.submit(each.prompt, NEW_TOKENS) for each in model.expected]
    home.run()
    assert all(len(head.logits) == len(home.chosen) for head in heads)

    found, num_equal, most = list[str](), 0, 0.0
    for each, request in zip(model.expected, requests, strict=True):
        tokens, name = home.answers[request], f"prompt of {len(each.prompt)} tokens"
        rows = [row for row, chosen in enumerate(home.chosen) if chosen == request]
        logits_TV = torch.stack([torch.cat([head.logits[row] for head in heads]) for row in rows])
        assert len(tokens) == len(each.tokens) == NEW_TOKENS
        first = next((at for at, pair in enumerate(zip(tokens, each.tokens, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            best = each.logits[first].topk(2).values
            found.append(f"{name}: token {first} differs; its best two logits are {best[0] - best[1]:.1e} apart")
        compared = NEW_TOKENS if first is None else first + 1  # later logits follow from another text
        largest = float((logits_TV[:compared] - each.logits[:compared]).abs().max())
        if not largest < LOGIT_TOLERANCE:
            found.append(f"{name}: a logit differs by {largest:.1e}")
        num_equal, most = num_equal + (NEW_TOKENS if first is None else first), max(most, largest)
    return Comparison(num_equal, most, found)


def plan_of(spec: ModelSpec, case: Case) -> TransformerPlan:
    """The case's plan with room for the whole batch. The number of rows per step decides whether prefill is chunked."""
    context = max(PROMPT_TOKENS) + NEW_TOKENS
    rows = CHUNK_ROWS if case.chunked else sum(PROMPT_TOKENS)
    limits = GenerationLimits(
        kv_tokens=context * len(PROMPT_TOKENS), max_sequences=len(PROMPT_TOKENS), prefill_rows=rows, context=context
    )
    everything = LayerMode(qkv="replicated", out="replicated", mlp="replicated")
    modes = [everything] * spec.num_layers if case.replicated else []
    plan = make_plan(spec, case.strategy, case.split, modes=modes, generation=limits)
    return plan.model_copy(update={"body": with_seq_len(plan.body, rows, limits)})


# ---- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> Iterator[Model]:
    with made(FAMILIES[family].shortened) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_logits_equal_transformers_at_published_widths(
    model: Model, case: Case, family: str, record_property: Callable[[str, object], None]
) -> None:
    """The properties are the rows of `python -m tools.bench run exactness`."""
    if case.strategy == "pipeline" and len(case.split) > model.spec.num_layers:
        pytest.skip(f"{len(case.split)} stages are more than {model.spec.num_layers} layers")
    gc.collect()  # shards of the case before lie in reference cycles
    with EngineCluster(model.directory, plan_of(model.spec, case), chunks=model.chunks) as cluster:
        found = compare(model, cluster)
    row = {
        "family": family, "case": case, "num_tokens": NEW_TOKENS * len(model.expected), "num_equal": found.num_equal,
        "largest_difference": found.largest,
    }  # fmt: skip
    for name, value in row.items():
        record_property(name, value)
    assert found.differences == []


def test_comparison_detects_a_wrong_weight() -> None:
    case = Case("hmp", (2, 1), chunked=True)
    with made(small_decoder("llama")) as model:
        with EngineCluster(model.directory, plan_of(model.spec, case), chunks=model.chunks) as right:
            assert compare(model, right).differences == []
        with EngineCluster(model.directory, plan_of(model.spec, case), chunks=model.chunks) as wrong:
            wrong.shards[0].layers[0].norms["norm1"].weight += 1.0
            assert any("a logit differs" in each for each in compare(model, wrong).differences)
