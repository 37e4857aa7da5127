"""Cases of the exactness benchmark (model families at published widths, plans, prompts) and its tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from hearth.errors import BadSetting
from hearth.plan.transformer import Strategy
from tools.bench.findings import table

LOGIT_TOLERANCE = 1e-3  # largest accepted absolute difference of a logit
PROMPT_TOKENS = (1, 17, 129, 500)  # lengths of the prompts in one batch
NEW_TOKENS = 64  # generated per prompt


@dataclass(frozen=True)
class Family:
    """A published model's config, reduced to `num_layers` layers."""

    what: str
    config: Mapping[str, Any]
    num_layers: int = 4


def _llama(what: str, num_layers: int = 4, **config: Any) -> Family:
    return Family(what, {"hidden_act": "silu", "rms_norm_eps": 1e-5, **config}, num_layers)


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT-2 124M",
        {"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257},
    ),
    "opt": Family(
        "OPT-125M",
        {"model_type": "opt", "num_attention_heads": 12, "hidden_size": 768, "ffn_dim": 3072, "vocab_size": 50272,
         "max_position_embeddings": 2048, "word_embed_proj_dim": 768},
    ),
    "llama2": _llama(
        "Llama 2 7B", 2, model_type="llama", hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "llama3": _llama(
        "Llama 3.2 1B (GQA, llama3 scaling)", model_type="llama", hidden_size=2048, intermediate_size=8192,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=128256,
        max_position_embeddings=131072, tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "qwen2": _llama(
        "Qwen2 0.5B", model_type="qwen2", hidden_size=896, intermediate_size=4864, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, max_position_embeddings=131072, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3": _llama(
        "Qwen3 0.6B", model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    # The published window is 4096 tokens; 128 here, so that prompts of 500 tokens exceed it.
    "mistral": _llama(
        "Mistral 7B (window 128)", 2, model_type="mistral", hidden_size=4096, intermediate_size=14336,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=32000,
        max_position_embeddings=32768, sliding_window=128,
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
        said = f"{self.strategy} {':'.join(f'{weight:g}' for weight in self.split)}"
        return said + " replicated" * self.replicated + " chunked" * self.chunked


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


class ExactnessRow(BaseModel):
    """Result of one case of one family.

    `different_at` describes the first differing token: prompt length, index, and gap of the reference's two best logits.
    """

    model_config = ConfigDict(frozen=True)

    family: str
    what: str
    num_layers: int
    case: str
    devices: int
    tokens: int
    equal_tokens: int
    largest_difference: float
    largest_logit: float
    different_at: str = ""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return self.equal_tokens == self.tokens and self.largest_difference < LOGIT_TOLERANCE


def chosen_families(names: str) -> dict[str, Family]:
    """Parse a list of families. Raises BadSetting."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in FAMILIES]
    if unknown or not wanted:
        said = f"'{unknown[0]}' is none of" if unknown else "it is empty; there are"
        raise BadSetting(setting="--families", reason=f"{said} {', '.join(FAMILIES)}")
    return {name: FAMILIES[name] for name in wanted}


def chosen_cases(strategies: str) -> tuple[Case, ...]:
    """The cases of a list of strategies. Raises BadSetting."""
    known = list(dict.fromkeys(case.strategy for case in CASES))
    wanted = [name.strip() for name in strategies.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        said = f"'{unknown[0]}' is none of" if unknown else "it is empty; there are"
        raise BadSetting(setting="--strategies", reason=f"{said} {', '.join(known)}")
    return tuple(case for case in CASES if case.strategy in wanted)


def summary(rows: Sequence[ExactnessRow]) -> str:
    """Markdown table with one line per family."""
    lines = []
    for name in dict.fromkeys(row.family for row in rows):
        group = [row for row in rows if row.family == name]
        equal, tokens = sum(row.equal_tokens for row in group), sum(row.tokens for row in group)
        worst = max(row.largest_difference for row in group)
        lines.append(
            (group[0].what, str(group[0].num_layers), str(len(group)), f"{equal} of {tokens}", f"{worst:.1e}",
             f"{max(row.largest_logit for row in group):.1f}", "yes" if all(row.holds for row in group) else "**no**")
        )  # fmt: skip
    headings = (
        "family, widths of",
        "layers",
        "cases",
        "tokens equal",
        "largest logit difference",
        "largest logit",
        "holds",
    )
    return table(headings, lines)


def details(rows: Sequence[ExactnessRow]) -> str:
    """Markdown table of the largest logit difference by case and family; `!` marks a differing token."""
    families = list(dict.fromkeys(row.family for row in rows))
    found = {(row.case, row.family): row for row in rows}
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        cells = []
        for name in families:
            row = found.get((case, name))
            cells.append(
                "-" if row is None else f"{row.largest_difference:.1e}" + " !" * (row.equal_tokens < row.tokens)
            )
        lines.append((case, *cells))
    return table(("case", *families), lines)
