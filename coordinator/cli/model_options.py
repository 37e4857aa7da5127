"""Options of `hearth plan` and `hearth serve` that concern the model, each with the kinds of MODEL that it applies to."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, get_args

import typer

from coordinator.models.graph_file import ModelFileKind, model_file_kind
from coordinator.plan.graph.request import DEFAULT_TIME_LIMIT_SECONDS
from coordinator.plan.methods import REGISTRY
from hearth.errors import BadSetting
from hearth.plan.common import VALUE_FORMAT_NAMES
from hearth.plan.graph import Objective as GraphObjective

# Kinds of MODEL, in the annotation of an option. An option without them applies to every kind.
TRANSFORMER: frozenset[ModelFileKind] = frozenset({"transformer"})
GRAPH: frozenset[ModelFileKind] = frozenset({"onnx", "graph"})
INSTANCE: frozenset[ModelFileKind] = frozenset({"instance"})
_KIND_TITLES: Mapping[ModelFileKind, str] = {
    "transformer": "the directory of a transformer",
    "onnx": "an ONNX graph",
    "graph": "a graph of operators",
    "instance": "a placement problem, with its own devices",
}

_LATENCY, _THROUGHPUT = (", ".join(REGISTRY["graph"].names(objective)) for objective in get_args(GraphObjective))


@dataclass(frozen=True)
class PlanOptions:
    """What to plan."""

    strategy: Annotated[
        str,
        typer.Option(
            help=f"How the devices share the work: auto, {', '.join(REGISTRY['transformer'].names())}. "
            "For a graph, see --objective.",
            metavar="NAME",
        ),
    ] = "auto"
    objective: Annotated[
        str | None,
        typer.Option(
            help=f"(graph) latency (default): minimise the time of one request; strategies {_LATENCY}. throughput: "
            f"maximise the rate of a full pipeline; strategies {_THROUGHPUT}.",
            metavar="WHAT",
        ),
        GRAPH | INSTANCE,
    ] = None
    dim: Annotated[
        list[str],
        typer.Option(help="(graph) Size of a dynamic dimension, e.g. batch=1. Repeatable.", metavar="NAME=N"),
        GRAPH,
    ] = field(default_factory=list)
    time_limit: Annotated[
        float | None,
        typer.Option(
            help=f"(graph) Time limit of each planner's search in seconds (default {DEFAULT_TIME_LIMIT_SECONDS:g}).",
            min=0.1,
            max=86400,
            metavar="S",
        ),
        GRAPH | INSTANCE,
    ] = None
    no_congestion: Annotated[
        bool,
        typer.Option("--no-congestion", help="(graph) Ignore contention between transfers of one device."),
        GRAPH | INSTANCE,
    ] = False
    tiles: Annotated[
        str,
        typer.Option(
            help="(ONNX) Cut operators into tiles that several devices compute: off (default), auto (if that is faster), or N "
            "tiles of each product of matrices.",
            metavar="auto|off|N",
        ),
        GRAPH,
    ] = "off"
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens in one step. Default: the model's limit, at most 512.", min=1, metavar="N"
        ),
        TRANSFORMER,
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            help="(decoder) Maximum number of tokens of prompt and answer together. Default: the model's limit, at most 2048.",
            min=1,
            metavar="N",
        ),
        TRANSFORMER,
    ] = None
    sequences: Annotated[
        int | None,
        typer.Option(
            help="(decoder) Concurrent sequences of --context tokens to reserve KV cache for. Default: 4.",
            min=1,
            max=4096,
            metavar="N",
        ),
        TRANSFORMER,
    ] = None
    no_kv_copies: Annotated[
        bool,
        typer.Option(
            "--no-kv-copies",
            help="(decoder) Keep no copy of a device's KV cache on the next one. After the loss of a device, answers are then "
            "computed again. Default: copies, if every device has memory for them.",
        ),
        TRANSFORMER,
    ] = False
    kv_cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache",
            help="(decoder) Number format of keys and values: float32, bfloat16 (half the memory) or int8 (about a quarter; "
            "converted in every step, so a long context is slower). Default: bfloat16, or float32 with --weights float32 or "
            "--deterministic.",
            metavar="FORMAT",
        ),
        TRANSFORMER,
    ] = None
    draft: Annotated[
        Path | None,
        typer.Option(
            help="(decoder) Directory of a small model with the same vocabulary that also guesses tokens (speculative "
            "decoding). It runs on the fastest device with room for it, and only where that is faster.",
            metavar="MODEL",
            show_default=False,
        ),
        TRANSFORMER,
    ] = None
    weights: Annotated[
        str,
        typer.Option(
            help="Number format of weight matrices in memory: float32, bfloat16, float16, int8, int4.", metavar="FORMAT"
        ),
        TRANSFORMER,
    ] = "float32"
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Multiply each matrix by one kernel for all numbers of rows, so that an answer does not depend on requests "
            "that run at the same time; guess no tokens. Default: the fastest kernel for each number of rows.",
        ),
        TRANSFORMER,
    ] = False
    wire: Annotated[
        str,
        typer.Option(
            help=f"Number format of activations sent between devices: {', '.join(VALUE_FORMAT_NAMES)}.",
            metavar="FORMAT",
        ),
    ] = "exact"
    lz4: Annotated[str, typer.Option(help="Compress activations with lz4: auto, on or off.", metavar="WHEN")] = "auto"
    exclude: Annotated[
        list[str], typer.Option(help="Device not to use. Repeatable.", metavar="NAME"), TRANSFORMER | GRAPH
    ] = field(default_factory=list)
    limit: Annotated[
        list[str],
        typer.Option(
            help="Memory limit of a device: kitchen=1.5GiB, or kitchen=50% of what its agent offers. Repeatable.",
            metavar="NAME=SIZE",
        ),
        TRANSFORMER | GRAPH,
    ] = field(default_factory=list)


@dataclass(frozen=True)
class ServeOptions(PlanOptions):
    """What to serve, and how. Without options of its own, it is what `hearth plan` plans."""

    name_as: Annotated[
        str | None,
        typer.Option("--as", help="Name for requests to this model. Default: the model's own name.", metavar="NAME"),
    ] = None
    plan: Annotated[Path | None, typer.Option(help="Use the plan in this file, written by `hearth plan --save`.")] = (
        None
    )
    no_learn: Annotated[
        bool,
        typer.Option(
            "--no-learn", help="(ONNX) Plan by profiled times only, without calibrating them by the times of requests."
        ),
        GRAPH,
    ] = False
    shared_prefixes: Annotated[
        bool,
        typer.Option(
            "--shared-prefixes",
            help="(decoder) Share the KV cache of equal beginnings of prompts between apps, too. By the time to the first "
            "token, an app can then tell whether another one has sent a prompt. Default: only between requests of one key.",
        ),
        TRANSFORMER,
    ] = False
    special_contents: Annotated[
        bool,
        typer.Option(
            "--special-contents",
            help="(decoder) Read special tokens in the contents of chats, such as <|im_start|>: whoever writes a text that "
            "gets into a chat can then write a system message. Default: in contents they are text.",
        ),
        TRANSFORMER,
    ] = False
    speculate: Annotated[
        str,
        typer.Option(
            help="(decoder) Guess the next tokens of an answer where it repeats the prompt or itself, and verify them in one "
            "step (speculative decoding): auto (default), off, or at most N tokens. "
            "Hearth guesses as many as save time, by measured times and hits.",
            metavar="auto|off|N",
        ),
        TRANSFORMER,
    ] = "auto"
    accuracy_budget: Annotated[
        float | None,
        typer.Option(
            help="Maximum relative error of the output, or of a decoder's logits (0.01: one percent), from a lossy format of "
            "activations. Measures all formats and uses the fastest within this budget.",
            metavar="X",
        ),
        TRANSFORMER,
    ] = None
    pin: Annotated[
        bool, typer.Option("--pin", help="Where memory is short, models that are not pinned make room for this one.")
    ] = False
    keep_alive: Annotated[
        str | None,
        typer.Option(
            help="Unload the model after this time without a request (30, 10min); the next request loads it again, and waits.",
            metavar="TIME",
        ),
    ] = None


def kinds_of_options(context: typer.Context) -> dict[str, frozenset[ModelFileKind]]:
    """The kinds of MODEL that options of a command apply to, by parameter name; options for every kind are left out."""
    assert context.command.callback is not None
    return {
        name: kinds
        for name, parameter in inspect.signature(context.command.callback).parameters.items()
        for kinds in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(kinds, frozenset)
    }


def check_kind(context: typer.Context, model: Path) -> ModelFileKind:
    """Return the kind of MODEL. Raises BadSetting for an option that does not apply to it."""
    kind, kinds_of = model_file_kind(model), kinds_of_options(context)
    for name, option in _given_options(context).items():
        kinds = kinds_of.get(name, get_args(ModelFileKind))
        if kind not in kinds:
            reason = f"it applies to {_kind_names(kinds)}, but {model} is {_KIND_TITLES[kind]}"
            raise BadSetting(setting=option, reason=reason)
    return kind


def reject_options(context: typer.Context, names: Collection[str], reason: str) -> None:
    """Raise BadSetting for the first of these options that was given."""
    for name, option in _given_options(context).items():
        if name in names:
            raise BadSetting(setting=option, reason=reason)


def _given_options(context: typer.Context) -> dict[str, str]:
    """Options given on the command line: the option string by parameter name."""
    return {
        each.name: each.opts[0]
        for each in context.command.params
        if each.name and getattr(context.get_parameter_source(each.name), "name", "") == "COMMANDLINE"
    }


def _kind_names(kinds: Collection[ModelFileKind]) -> str:
    names = ("transformers" if "transformer" in kinds else "", "graphs of operators" if "onnx" in kinds else "")
    return " and ".join(filter(None, names))
