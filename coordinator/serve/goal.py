"""From a goal to a planner request: reads the model, selects the allowed devices, builds the request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from coordinator.models.checkpoint.families import read_pooling, read_spec
from coordinator.models.graph_file import GraphFile, read_graph_file
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.limits import NamedDevice, profile_with_limits
from coordinator.plan.transformer.request import DEFAULT_SEQUENCES, GenerationRequest, PlanRequest
from coordinator.serve.state import DEFAULT_MAX_DRAFTED, Goal, GraphGoal, TransformerGoal
from coordinator.serve.text.prompts import GenerationDefaults, TextTokenizer, read_generation_defaults
from coordinator.serve.text.sentences import SentenceTokenizer, open_tokenizer
from hearth.errors import BadSetting
from hearth.plan.common import ValueFormatName
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import GraphPlan, TransformerPlan
from hearth.plan.profile import ClusterProfile

DEFAULT_SEQ_LEN = 512  # tokens per step without --seq-len: BERT's limit; more reserves more memory for activations
DEFAULT_CONTEXT = 2048  # tokens per sequence, likewise; a larger context reserves more KV cache on every device

_D = TypeVar("_D", bound=NamedDevice)
_ADVICE = "choose a draft model of the same family as the model, or omit --draft"


@dataclass(frozen=True)
class Draft:
    """A small model that guesses tokens for another one, which has the same vocabulary."""

    directory: Path
    spec: ModelSpec


@dataclass(frozen=True)
class TransformerModel:
    """A model, read once from its directory. A decoder processes a prompt longer than a step in chunks."""

    directory: Path
    spec: ModelSpec
    seq_len: int  # most rows of a step; for an encoder also the most tokens of a text
    tokenizer: SentenceTokenizer | TextTokenizer | None  # the latter for decoders; None: only token ids work
    generation: GenerationRequest | None = None  # None for encoders
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    draft: Draft | None = None


def open_model(goal: Goal) -> TransformerModel | GraphFile:
    """`read_model`; of a graph, the weights are hashed, too, for its `fingerprint`, which takes long."""
    model = read_model(goal)
    if isinstance(model, GraphFile):
        _ = model.fingerprint  # it is kept
    return model


def read_model(goal: Goal) -> TransformerModel | GraphFile:
    """Read the model of a goal, without weights. Raises BadCheckpoint, BadModelFile, BadSetting, UnsupportedOperator, ..."""
    if isinstance(goal, GraphGoal):
        return read_graph_file(Path(goal.model_file), goal.dims)
    return open_transformer(goal)


def open_transformer(goal: TransformerGoal) -> TransformerModel:
    """Read config and tokenizer. Raises BadCheckpoint, UnsupportedArchitecture, BadSetting."""
    directory = Path(goal.model_dir)
    spec = _spec_in_formats(goal, directory)
    draft = _open_draft(goal, spec)
    generation = _generation_request(goal, spec, draft)
    max_seq_len = generation.context if generation else spec.max_positions
    seq_len = min(goal.seq_len or DEFAULT_SEQ_LEN, max_seq_len)
    if not spec.causal:
        read_pooling(directory)
    tokenizer = None
    if (directory / "tokenizer.json").exists():
        tokenizer = (
            TextTokenizer(directory, special_contents=goal.special_contents)
            if spec.causal
            else SentenceTokenizer(directory)
        )
    defaults = read_generation_defaults(directory) if spec.causal else GenerationDefaults()
    return TransformerModel(directory, spec, seq_len, tokenizer, generation, defaults, draft)


def _spec_in_formats(goal: TransformerGoal, directory: Path) -> ModelSpec:
    """The spec of a model, with weights and KV cache in the formats of the goal."""
    # A bfloat16 cache rounds differently for one row and for several.
    exact = goal.weights == "float32" or goal.deterministic
    kv_cache = goal.kv_cache or ("float32" if exact else "bfloat16")
    spec = read_spec(directory)
    return spec.model_copy(update={"weights": goal.weights, "kv_cache": kv_cache if spec.causal else "float32"})


def _open_draft(goal: TransformerGoal, spec: ModelSpec) -> Draft | None:
    """The draft model of the goal. Raises BadSetting if it cannot guess for this model, BadCheckpoint."""
    if goal.draft_dir is None:
        return None
    if goal.deterministic or not goal.max_drafted:
        option = "--deterministic" if goal.deterministic else "--speculate off"
        raise BadSetting(setting="--draft", reason=f"no tokens are guessed with {option}; omit one of the two")
    directory = Path(goal.draft_dir)
    draft = _spec_in_formats(goal, directory)
    if spec.causal and draft.causal:
        check_vocabularies(Path(goal.model_dir), spec, directory, draft)
        return Draft(directory, draft)
    name = draft.name if spec.causal else spec.name
    raise BadSetting(setting="--draft", reason=f"{name} generates no text")


def _generation_request(goal: TransformerGoal, spec: ModelSpec, draft: Draft | None) -> GenerationRequest | None:
    if not spec.causal:
        given = (
            ("--context", goal.context),
            ("--sequences", goal.sequences),
            ("--kv-cache", goal.kv_cache not in (None, "float32")),
            ("--speculate", goal.max_drafted != DEFAULT_MAX_DRAFTED),
        )
        for option, value in given:
            if value:
                raise BadSetting(setting=option, reason=f"{spec.name} generates no text")
        return None
    context = goal.context or min(spec.max_positions, DEFAULT_CONTEXT)
    if context > spec.max_positions:
        raise BadSetting(setting="--context", reason=f"{spec.name} takes at most {spec.max_positions} tokens")
    sequences, draft_spec = goal.sequences or DEFAULT_SEQUENCES, draft.spec if draft is not None else None
    return GenerationRequest(context, sequences, kv_copies=goal.kv_copies, draft=draft_spec)


def allowed_devices(goal: Goal, devices: Iterable[_D]) -> list[_D]:
    """The devices that the user did not exclude, by name or id."""
    excluded = set(goal.exclude)
    return [device for device in devices if not {device.name, device.device_id} & excluded]


def plan_request(
    goal: TransformerGoal,
    model: TransformerModel,
    cluster: ClusterProfile,
    values: ValueFormatName | None = None,
    deployed: TransformerPlan | None = None,
) -> PlanRequest:
    """The planner's request, with the user's memory limits applied.

    `values`: activation format chosen by the accuracy budget, if any. `deployed`: the current plan; its memory counts as
    free, because it is unloaded before the new plan is loaded, and its devices keep what they hold of the new plan.
    """
    wire = goal.wire if values is None else goal.wire.model_copy(update={"values": values})
    return PlanRequest(
        model.spec,
        profile_with_limits(cluster, goal.limits, deployed),
        model.seq_len,
        wire,
        goal.strategy,
        spare_accuracy=values is not None,
        generation=model.generation,
        held=deployed,
    )


def graph_request(
    goal: GraphGoal, graph: GraphFile, cluster: GraphCluster, deployed: GraphPlan | None = None
) -> GraphRequest:
    """The planner's request for an operator graph.

    `deployed`: the current plan, whose weights its devices hold. One of other tiles shares neither operators nor weights.
    """
    return GraphRequest(
        spec=graph.spec,
        cluster=cluster,
        objective=goal.objective,
        strategy=goal.strategy,
        congestion=goal.congestion,
        time_limit_seconds=goal.time_limit_seconds,
        wire=goal.wire,
        model_hash=graph.fingerprint,
        tiles=graph.tiles,
        held=deployed if deployed is not None and deployed.model.tiles == graph.tiles else None,
    )


def check_vocabularies(model_dir: Path, model: ModelSpec, draft_dir: Path, draft: ModelSpec) -> None:
    """Compare the tokenizers, or the sizes of the vocabularies if a model has no tokenizer.

    With equal tokenizers the sizes may differ: some models round theirs up. Raises BadSetting, BadCheckpoint.
    """
    if not all((directory / "tokenizer.json").exists() for directory in (model_dir, draft_dir)):
        if model.vocab_size != draft.vocab_size:
            sizes = f"{draft.name} has {draft.vocab_size} tokens, {model.name} has {model.vocab_size}"
            raise BadSetting(setting="--draft", reason=f"its vocabulary is another one ({sizes}): {_ADVICE}")
        return
    own, other = (open_tokenizer(directory).get_vocab(with_added_tokens=True) for directory in (model_dir, draft_dir))
    differing = own.items() ^ other.items()
    if differing:
        token = min(differing, key=lambda item: item[1])[0]
        ids = f"{token!r} is {other.get(token, 'no token')} in {draft.name} and {own.get(token, 'no token')} in {model.name}"
        raise BadSetting(setting="--draft", reason=f"its vocabulary is another one ({ids}): {_ADVICE}")
