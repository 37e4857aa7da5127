"""Outputs of plans run on devices in this process, described in plain data for comparison across versions.

Plans are made without a planner, from shares. Everything runs on one thread, so that the order of sums is fixed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.engines import EngineCluster, GenerationCluster
from support.graph_engines import GraphCluster, random_array, random_cut, random_model
from support.models import save_random_model, small_bert, small_decoder, small_distilbert
from support.plans import make_plan

from coordinator.models.checkpoint.families import read_spec
from hearth.plan.common import WireFormat
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import GenerationLimits, LayerMode
from hearth.wire.messages import Sampling

torch.set_num_threads(1)

Arrays = dict[str, np.ndarray[Any, Any]]


@cache
def model_dir(folder: Path, family: str, quantised: bool = False) -> Path:
    """A small model with random weights, and with four layers, so that a pipeline can be split.

    For a model that will be `quantised`, a share of the MLP is a multiple of 32, as torch's int8 kernel requires.
    """
    if quantised:
        config = small_decoder(family, num_hidden_layers=4, intermediate_size=320)
        return save_random_model(folder / f"{family}-320", config, generates=True)
    if family == "bert":
        return save_random_model(folder / family, small_bert(num_hidden_layers=4))
    if family == "distilbert":
        return save_random_model(folder / family, small_distilbert(), seed=1)
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return save_random_model(folder / family, small_decoder(family, **{layers: 4}), generates=True)


def transformer_outputs(
    folder: Path,
    family: str,
    strategy: str,
    split: Sequence[int],
    lengths: Sequence[int],
    *,
    values: str = "exact",
    weights: str = "float32",
    replicated: Sequence[str] = (),
    row_weights: Sequence[float] | None = None,
    micro_batches: int = 1,
    prefill_rows: int = 512,
    sampling: Mapping[str, float] | None = None,
) -> Arrays:
    """`rows` [T,H] of random sequences of these lengths; for a decoder also generated `tokens` [sequences, 12].

    `replicated` are groups of weights (qkv, out, mlp) that every device holds whole, in every other layer.
    """
    directory = model_dir(folder, family, weights in ("int8", "int4"))
    spec = read_spec(directory).model_copy(update={"weights": weights})
    mode = LayerMode.model_validate(dict.fromkeys(replicated, "replicated"))
    modes = [(mode, LayerMode())[layer % 2] for layer in range(spec.num_layers)] if replicated else ()
    wire = WireFormat.model_validate({"values": values, "lz4": "on" if values != "exact" else "off"})
    plan = make_plan(spec, strategy, split, row_weights, wire, modes=modes)  # type: ignore[arg-type]
    if spec.causal:
        limits = GenerationLimits(kv_tokens=4096, max_sequences=8, prefill_rows=prefill_rows)
        body = plan.body.model_copy(update={"micro_batches": micro_batches, "generation": limits})
        plan = plan.model_copy(update={"body": body})
    prompts = _sequences(spec, lengths)
    with EngineCluster(directory, plan) as cluster:
        rows, _ = cluster.run(prompts)
        return {"rows": rows, **(_tokens(cluster, plan, prompts, sampling) if spec.causal else {})}


def _sequences(spec: ModelSpec, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(3, spec.vocab_size, length).tolist() for length in lengths]


def _tokens(
    cluster: EngineCluster,
    plan: TransformerPlan,
    prompts: Sequence[Sequence[int]],
    sampling: Mapping[str, float] | None,
) -> Arrays:
    home = GenerationCluster(cluster)
    chosen = Sampling.model_validate(dict(sampling)) if sampling else None
    requests = [home.submit(prompt, 12, chosen) for prompt in prompts]
    home.run()
    return {"tokens": np.array([home.answers[request] for request in requests], dtype=np.int64)}


def graph_outputs(
    folder: Path, seed: int, num_operators: int, num_segments: int, num_ranks: int, values: str = "exact"
) -> Arrays:
    """Outputs, by name, of a random graph with random cuts; two requests are in flight at once."""
    rng = random.Random(seed)
    model = random_model(rng, num_operators)
    plan = random_cut(model, rng, num_segments, num_ranks)
    plan = plan.model_copy(update={"wire": WireFormat.model_validate({"values": values, "lz4": "off"})})
    found: Arrays = {}
    with GraphCluster(plan, model, folder / f"graph{seed}-{values}") as cluster:
        for step in range(2):
            cluster.start(step, {"x": random_array(step), "z": random_array(step + 1000)})
        for step in range(2):
            found |= {f"{step}.{name}": array for name, array in cluster.outputs(step).items()}
    return found
