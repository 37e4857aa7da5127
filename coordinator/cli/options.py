"""Command-line options that several commands share, and the kinds of MODEL that each option applies to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, get_args

import typer

from coordinator.models.graph_file import ModelFileKind, model_file_kind
from coordinator.plan.graph.request import DEFAULT_TIME_LIMIT_SECONDS
from coordinator.plan.methods import REGISTRY
from hearth.errors import BadSetting
from hearth.plan.graph import Objective as GraphObjective
from hearth.plan.value_formats import VALUE_FORMAT_NAMES

# ---- any command ------------------------------------------------------------------------------------------------------

AsJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
KeyPathOption = Annotated[Path | None, typer.Option(help="Key file. Default: $HEARTH_KEY, else ~/.config/hearth/key.")]
AddressOption = Annotated[
    str | None, typer.Option(help="Coordinator addresses, host[:port],host2[:port]. Default: discover it over mDNS.")
]
DevicesOption = Annotated[
    str | None, typer.Option("--devices", help="Agent addresses, host[:port],host2[:port], where multicast is blocked.")
]
InterfacesOption = Annotated[str | None, typer.Option(help="Local addresses to use for mDNS, comma-separated.")]
TimeoutOption = Annotated[float, typer.Option(help="Timeout in seconds.", min=0.1)]
ServedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Name of a served model, as `hearth ps` shows it. Default: the oldest one of the kind that is asked.",
        metavar="NAME",
    ),
]


def interface_list(interfaces: str | None) -> list[str] | None:
    """The addresses of a comma-separated list; None (all interfaces) if there are none."""
    return [part.strip() for part in (interfaces or "").split(",") if part.strip()] or None


# ---- what to plan: `plan` and `serve` -----------------------------------------------------------------------------------

_LATENCY, _THROUGHPUT = (", ".join(REGISTRY["graph"].names(objective)) for objective in get_args(GraphObjective))
StrategyOption = Annotated[
    str,
    typer.Option(
        help=f"How the devices share the work: auto, {', '.join(REGISTRY['transformer'].names())}. "
        "For a graph, see --objective.",
        metavar="NAME",
    ),
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        help=f"(graph) latency (default): minimise the time of one request; strategies {_LATENCY}. throughput: "
        f"maximise the rate of a full pipeline; strategies {_THROUGHPUT}.",
        metavar="WHAT",
    ),
]
DimsOption = Annotated[
    list[str],
    typer.Option(help="(graph) Size of a dynamic dimension, e.g. batch=1. Repeatable.", metavar="NAME=N"),
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        help=f"(graph) Time limit of each planner's search in seconds (default {DEFAULT_TIME_LIMIT_SECONDS:g}).",
        min=0.1,
        max=86400,
        metavar="SECONDS",
    ),
]
NoCongestionOption = Annotated[
    bool, typer.Option("--no-congestion", help="(graph) Ignore contention between transfers of one device.")
]
LearnOption = Annotated[
    str | None,
    typer.Option(
        help="(graph) Let the policy of --strategy doppler learn on this graph and these devices for 30s or 5min, say, before "
        "the search. It is kept for the next plans, also those of `hearth serve`.",
        metavar="TIME",
    ),
]
TilesOption = Annotated[
    str,
    typer.Option(
        help="(ONNX) Cut operators into tiles that several devices compute: off (default), auto (if that is faster), or N "
        "tiles of each product of matrices.",
        metavar="auto|off|N",
    ),
]
NoLearnOption = Annotated[
    bool,
    typer.Option(
        "--no-learn",
        help="(ONNX) Plan by profiled times only, without calibrating them by the times of requests.",
    ),
]
SeqLenOption = Annotated[
    int | None,
    typer.Option(help="Maximum number of tokens in one step. Default: the model's limit, at most 512.", min=1),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        help="(decoder) Maximum number of tokens of prompt and answer together. Default: the model's limit, at most 2048.",
        min=1,
    ),
]
SequencesOption = Annotated[
    int | None,
    typer.Option(
        help="(decoder) Concurrent sequences of --context tokens to reserve KV cache for. Default: 4.",
        min=1,
        max=4096,
    ),
]
NoKvCopiesOption = Annotated[
    bool,
    typer.Option(
        "--no-kv-copies",
        help="(decoder) Keep no copy of a device's KV cache on the next one. After the loss of a device, answers are then "
        "computed again. Default: copies, if every device has memory for them.",
    ),
]
KvCacheOption = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        help="(decoder) Number format of keys and values: float32, bfloat16 (half the memory) or int8 (about a quarter; "
        "converted in every step, so a long context is slower). Default: bfloat16, or float32 with --weights float32 or "
        "--deterministic.",
        metavar="FORMAT",
    ),
]
SharedPrefixesOption = Annotated[
    bool,
    typer.Option(
        "--shared-prefixes",
        help="(decoder) Share the KV cache of equal beginnings of prompts between apps, too. By the time to the first token, "
        "an app can then tell whether another one has sent a prompt. Default: only between requests of one key.",
    ),
]
SpeculateOption = Annotated[
    str,
    typer.Option(
        help="(decoder) Guess the next tokens of an answer where it repeats the prompt or itself, and verify them in one step "
        "(speculative decoding): auto (default), off, or at most N tokens. As many as pay by measured times and hits.",
        metavar="auto|off|N",
    ),
]
DraftOption = Annotated[
    Path | None,
    typer.Option(
        help="(decoder) Directory of a small model with the same vocabulary that also guesses tokens (speculative "
        "decoding). It runs on the fastest device with room for it, and only where that is faster.",
        metavar="MODEL",
        show_default=False,
    ),
]
WireOption = Annotated[
    str,
    typer.Option(
        help=f"Number format of activations sent between devices: {', '.join(VALUE_FORMAT_NAMES)}.", metavar="FORMAT"
    ),
]
WeightsOption = Annotated[
    str,
    typer.Option(
        help="Number format of weight matrices in memory: float32, bfloat16, float16, int8, int4.", metavar="FORMAT"
    ),
]
DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Multiply each matrix by one kernel for all numbers of rows, so that an answer does not depend on requests that "
        "run at the same time; guess no tokens. Default: the fastest kernel for each number of rows.",
    ),
]
Lz4Option = Annotated[str, typer.Option(help="Compress activations with lz4: auto, on or off.", metavar="WHEN")]
ExcludeOption = Annotated[list[str], typer.Option(help="Device not to use. Repeatable.", metavar="NAME")]
LimitOption = Annotated[
    list[str],
    typer.Option(
        help="Memory limit of a device: kitchen=1.5GiB, or kitchen=50% of what its agent offers. Repeatable.",
        metavar="NAME=SIZE",
    ),
]

# ---- what to generate: `generate` and `chat` ----------------------------------------------------------------------------

_SAMPLING = "Sampling"
MaxTokensOption = Annotated[
    int | None, typer.Option(help="Maximum number of tokens to generate. Default: the model's setting, else 512.")
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        help="0 takes the most likely token; 1 samples from the model's distribution.", rich_help_panel=_SAMPLING
    ),
]
TopKOption = Annotated[
    int | None, typer.Option(help="Sample from the k most likely tokens (0 disables).", rich_help_panel=_SAMPLING)
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        help="Sample from the smallest set of likely tokens with this total probability.", rich_help_panel=_SAMPLING
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option(help="Drop tokens less likely than this fraction of the top token.", rich_help_panel=_SAMPLING),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(help="Values above 1 penalise tokens already in the context.", rich_help_panel=_SAMPLING),
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="Random seed: the same seed gives the same tokens.", rich_help_panel=_SAMPLING),
]
AnswerTimeoutOption = Annotated[float, typer.Option(help="Timeout of the whole answer in seconds.", min=0.1)]

# ---- kinds of MODEL -----------------------------------------------------------------------------------------------------

_TRANSFORMER: frozenset[ModelFileKind] = frozenset({"transformer"})
_GRAPH: frozenset[ModelFileKind] = frozenset({"onnx", "graph"})
_INSTANCE: frozenset[ModelFileKind] = frozenset({"instance"})
_KIND_TITLES: Mapping[ModelFileKind, str] = {
    "transformer": "the directory of a transformer",
    "onnx": "an ONNX graph",
    "graph": "a graph of operators",
    "instance": "a placement problem, with its own devices",
}
# Options of `plan` and `serve` that apply to some kinds of MODEL only, by parameter name. All others apply to every kind.
OPTION_KINDS: Mapping[str, frozenset[ModelFileKind]] = {
    **dict.fromkeys(
        (
            "seq_len",
            "context",
            "sequences",
            "no_kv_copies",
            "kv_cache",
            "shared_prefixes",
            "speculate",
            "draft",
            "weights",
            "deterministic",
            "accuracy_budget",
        ),
        _TRANSFORMER,
    ),
    **dict.fromkeys(("dim", "cluster", "tiles", "learn", "no_learn"), _GRAPH),
    **dict.fromkeys(("objective", "time_limit", "no_congestion", "picture"), _GRAPH | _INSTANCE),
    **dict.fromkeys(("compare", "rounds", "timeline", "save_profile", "load_profile"), _TRANSFORMER | _GRAPH),
    **dict.fromkeys(("save", "exclude", "limit"), _TRANSFORMER | _GRAPH),
}
# Options of `serve` that require MODEL.
MODEL_OPTIONS = (
    "name_as", "plan", "strategy", "objective", "dim", "time_limit", "no_congestion", "tiles", "seq_len", "context",
    "sequences", "no_kv_copies", "kv_cache", "shared_prefixes", "speculate", "draft", "weights", "deterministic", "wire", "lz4",
    "accuracy_budget", "exclude", "limit", "no_learn", "pin", "keep_alive",
)  # fmt: skip


def given_options(context: typer.Context) -> dict[str, str]:
    """Options given on the command line: the option string by parameter name."""
    return {
        each.name: each.opts[0]
        for each in context.command.params
        if each.name and getattr(context.get_parameter_source(each.name), "name", "") == "COMMANDLINE"
    }


def check_kind(context: typer.Context, model: Path) -> ModelFileKind:
    """Return the kind of MODEL. Raises BadSetting for an option that does not apply to it."""
    kind = model_file_kind(model)
    for name, option in given_options(context).items():
        kinds = OPTION_KINDS.get(name, get_args(ModelFileKind))
        if kind not in kinds:
            raise BadSetting(
                setting=option, reason=f"it applies to {_kind_names(kinds)}, but {model} is {_KIND_TITLES[kind]}"
            )
    return kind


def reject_options(context: typer.Context, names: Collection[str], reason: str) -> None:
    """Raise BadSetting for the first of these options that was given."""
    for name, option in given_options(context).items():
        if name in names:
            raise BadSetting(setting=option, reason=reason)


def _kind_names(kinds: Collection[ModelFileKind]) -> str:
    names = ("transformers" if "transformer" in kinds else "", "graphs of operators" if "onnx" in kinds else "")
    return " and ".join(filter(None, names))
