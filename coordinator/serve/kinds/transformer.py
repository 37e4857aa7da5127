"""Serving transformers: encoders embed, one step at a time; decoders generate concurrently (`generation`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.deploy.deployment import RunResult, Weights
from coordinator.deploy.transformer import TransformerDeployment, shard_weights
from coordinator.devices.block_profiling import block_cluster, block_workload, chosen_kernels, known_kernels
from coordinator.devices.registry import Device
from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.plan.transformer.cost.predict import request_seconds
from coordinator.plan.transformer.request import PlanRequest, build_plan, on_subset
from coordinator.serve.goal import TransformerModel, plan_request
from coordinator.serve.kinds import accuracy
from coordinator.serve.kinds.generation import (
    MAX_GENERATIONS,
    GenerationRunner,
    TextModel,
    decode_prompt,
    max_context_tokens,
    probe,
)
from coordinator.serve.kinds.kind import RequestHandler, SharedServices
from coordinator.serve.planners.process import PlannerKind, plans_or_errors, solve_transformer
from coordinator.serve.requests.runner import ComputedReply, Requests
from coordinator.serve.state import TransformerGoal
from coordinator.serve.text.prompts import TextTokenizer
from coordinator.serve.text.sentences import SentenceTokenizer, mean_pool, pack_sequences, step_batches
from coordinator.serve.text.threads import TextThreads
from hearth.errors import BadPlan, BadRequest, HearthError, TextTooLong
from hearth.plan.common import ValueFormatName
from hearth.plan.kernels import KernelChoice
from hearth.plan.plan import DRAFT_RANK, Plan, TransformerPlan, is_transformer_plan
from hearth.plan.profile import ClusterProfile
from hearth.wire import messages as wire
from hearth.wire.codec import Array
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import AnswerKind
from hearth.wire.rpc import Reply

# Files of a model directory above this size are not sent to a standby: tokenizers and configurations are far smaller.
_MAX_SMALL_FILE_BYTES = 256 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
_PROBE_TOKENS = 8  # of the probe of an encoder: short, but several rows to share


class TransformerKind:
    """A `ModelKind`."""

    usage = "the model is a transformer; it embeds (home.embed()) or generates (home.generate())"
    planner: PlannerKind = "transformer"

    def __init__(
        self,
        goal: TransformerGoal,
        model: TransformerModel,
        services: SharedServices,
        requests: Requests[TransformerDeployment],
    ) -> None:
        self.model = model
        self.answers: AnswerKind = "text" if model.generation is not None else "vectors"
        self.takes_tools = isinstance(model.tokenizer, TextTokenizer) and model.tokenizer.takes_tools
        self.context_tokens = model.generation.context if model.generation is not None else model.seq_len
        self.workload = block_workload(self.model.spec, self.model.seq_len, goal.deterministic)
        self.handlers: Mapping[type[wire.Message], RequestHandler] = {
            wire.Embed: self.embed,
            wire.GetHiddenStates: self.hidden_states,
            wire.Generate: self.generate,
        }
        self._goal = goal
        self._services = services
        self._requests = requests
        self._values: ValueFormatName | None = None  # activation format that the accuracy budget chose last
        self._text_model: TextModel | None = None  # None for encoders
        if self.model.spec.causal:
            tokenizer = self.model.tokenizer
            assert not isinstance(tokenizer, SentenceTokenizer)
            self._text_model = TextModel(self.model.spec, tokenizer, self.model.defaults)
            if tokenizer is not None and tokenizer.template is not None:
                tokenizer.template.process()  # so that no chat waits for its start
        self._kernels: dict[str, tuple[KernelChoice, ...]] = {}  # by device id; of devices that were profiled
        self._threads = TextThreads()
        # Attention rounds differently for one row and for several, such as those of guessed tokens.
        max_drafted = 0 if goal.deterministic else goal.max_drafted
        self._generation_runner = GenerationRunner(requests, self._threads, goal.shared_prefixes, max_drafted)

    # ---- plans ----------------------------------------------------------------------------------------------------

    @property
    def files(self) -> Sequence[Path]:
        draft = self.model.draft
        return [*transformer_files(self.model.directory), *(transformer_files(draft.directory) if draft else [])]

    def check(self, plan: Plan) -> None:
        model, spec = self.model, self.model.spec
        if not is_transformer_plan(plan):
            raise BadPlan(reason=f"it is for a graph of operators, and {spec.name} is a transformer")
        body, generation = plan.body, model.generation
        if plan.model != spec:
            same_name = plan.model.name == spec.name
            what = "weights or a KV cache in another format" if same_name else f"the model {plan.model.name}"
            raise BadPlan(reason=f"it was made for {what}, not for {model.directory} with weights in {spec.weights}")
        if body.seq_len != model.seq_len:
            raise BadPlan(reason=f"it was made for --seq-len {body.seq_len}, not {model.seq_len}")
        if body.generation is not None if generation is None else not generation.matches(body, model.seq_len):
            raise BadPlan(reason="it was made for another --context, --sequences or --draft")

    async def profile(
        self, devices: Sequence[Device], deployed: Plan | None = None, joined: bool = False
    ) -> ClusterProfile:
        cluster = await block_cluster(self._services.profiler, devices, self.workload, self._services.taken)
        self._kernels |= chosen_kernels(cluster, self.workload)
        return cluster

    async def plan(self, cluster: ClusterProfile, recovering: bool, held: Plan | None = None) -> TransformerPlan:
        request = self._request(cluster, held)
        return self._services.chosen(await solve_transformer(request, self._services.spare_planners))

    async def plans_ahead(self, clusters: Sequence[ClusterProfile], held: Plan) -> list[Plan | HearthError]:
        return await plans_or_errors("transformer", [self._request(cluster, held) for cluster in clusters])

    def _request(self, cluster: ClusterProfile, held: Plan | None) -> PlanRequest:
        deployed = self._services.held(held) if held is not None and is_transformer_plan(held) else None
        return plan_request(self._goal, self.model, cluster, self._values, deployed)

    def summary(self, plan: Plan) -> str:
        """Whether the draft model runs."""
        if self.model.draft is None or not is_transformer_plan(plan) or plan.body.generation is None:
            return ""
        if plan.body.generation.draft is None:
            return f"no device has room for the draft model {self.model.draft.spec.name}; tokens are only looked up"
        return f"the draft model {self.model.draft.spec.name} runs on {plan.devices[DRAFT_RANK].name}"

    async def revise(self, cluster: ClusterProfile, deployment: TransformerDeployment) -> tuple[Plan, float, float]:
        deployed = deployment.plan
        request = self._request(cluster, deployed)
        members = tuple(device.device_id for device in deployed.devices)
        new = await self.plan(cluster, False, deployed)
        old = build_plan(on_subset(request, members), deployed.body, deployed.planner)
        return new, request_seconds(new), request_seconds(old)

    # ---- deployments ----------------------------------------------------------------------------------------------

    async def weights(self, plan: Plan) -> Weights:
        assert is_transformer_plan(plan)
        manifests = self._services.settings.state_dir / "manifests"
        fleet, profiler = self._services.fleet, self._services.profiler
        ids = {device.device_id for device in plan.devices} & fleet.devices.keys() - self._kernels.keys()
        unknown = [fleet.devices[device_id] for device_id in ids]
        known = await profiler.read(lambda: known_kernels(profiler, unknown, self.workload))
        draft_dir = self.model.draft.directory if self.model.draft is not None else None
        return await shard_weights(
            self.model.directory, plan, manifests, self._kernels | known, self._packed_vocabulary, draft_dir
        )

    def _packed_vocabulary(self) -> bytes | None:
        return self._text_model.packed_vocabulary if self._text_model is not None else None

    def deployment(self, plan: Plan, name: str) -> TransformerDeployment:
        assert is_transformer_plan(plan)
        deployment = TransformerDeployment(self._services.fleet, plan, name)
        if self._goal.accuracy_budget is not None:
            deployment.values = "exact"  # until measured
        return deployment

    def capacity(self, deployment: TransformerDeployment) -> int:
        return MAX_GENERATIONS if self.model.spec.causal else 1

    async def probe(self, deployment: TransformerDeployment) -> None:
        if self.model.spec.causal:
            await probe(deployment)
        else:
            await deployment.run_step(*pack_sequences([[0] * min(_PROBE_TOKENS, self.model.seq_len)]), "mean")

    async def tune(self, deployment: TransformerDeployment) -> None:
        """Choose the activation format within the accuracy budget; until then activations are sent exactly.

        A decoder's error is that of its logits, and its time that of a token.
        """
        budget = self._goal.accuracy_budget
        self._values = deployment.values
        if budget is None or deployment.plan.num_ranks == 1:  # one device sends nothing
            return

        exact: dict[int, Array] = {}  # hidden states, by number of tokens

        async def embed(values: ValueFormatName, keep: bool, ids: Array) -> tuple[float, float]:
            async with self._requests.admission.exclusively():
                result = await deployment.run_step(*pack_sequences([ids.tolist()]), "hidden", values=values)
            if keep:
                exact[len(ids)] = result.outputs
            return accuracy.max_relative_error(exact[len(ids)], result.outputs), result.step_seconds

        async def decode(values: ValueFormatName, keep: bool, ids: Array) -> tuple[float, float]:
            async with self._requests.admission.exclusively():
                return await decode_prompt(deployment, ids, values, keep)

        spec = self.model.spec
        if spec.causal:
            room = max_context_tokens(deployment.plan) - accuracy.DECODED_TOKENS
            measured = await accuracy.calibrate(
                decode, spec.vocab_size, max(min(accuracy.DECODED_PROMPT_TOKENS, room), 1)
            )
        else:
            measured = await accuracy.calibrate(embed, spec.vocab_size, self.model.seq_len)
        chosen = accuracy.choose_format(measured, budget)
        self._values = deployment.values = chosen.values
        self._services.report(accuracy.describe_choice(measured, chosen, budget))

    # ---- requests to an encoder -----------------------------------------------------------------------------------

    async def embed(self, request: wire.Embed, payload: Sequence[Any]) -> Reply:
        """Normalised sentence embeddings [N,H]."""
        self._require_encoder()
        model, ticket = self.model, self._requests.arrive(request.timeout_seconds)
        if not isinstance(model.tokenizer, SentenceTokenizer):
            raise BadRequest(reason="the model has no tokenizer.json; send token ids instead of texts")
        num_characters = sum(map(len, request.texts))
        encode = partial(model.tokenizer.encode, request.texts, model.seq_len)
        encoded = await self._threads.run(request.timeout_seconds, num_characters, encode)

        batches = step_batches([len(ids) for ids in encoded], model.seq_len)
        vectors: list[Array] = []  # of the batches that are done, also on an earlier plan
        traces: list[wire.DeviceTrace] = []
        seconds = 0.0

        async def compute(deployment: TransformerDeployment) -> ComputedReply:
            nonlocal seconds
            for batch in batches[len(vectors) :]:
                ids, lengths = pack_sequences([encoded[i] for i in batch])
                result = await deployment.run_step(ids, lengths, "mean", request.trace)
                self._observe(deployment, len(ids), result)
                vectors.append(mean_pool(result.outputs, lengths))
                traces.extend(result.traces)
                seconds += result.latency_seconds
                self._requests.record_progress(ticket)
            reply = wire.Vectors(latency_seconds=seconds, num_tokens=sum(map(len, encoded)), traces=tuple(traces))
            return reply, pack_array(np.concatenate(vectors))

        return await self._requests.run(compute, ticket)

    async def hidden_states(self, request: wire.GetHiddenStates, payload: Sequence[Any]) -> Reply:
        """Last hidden states [T,H] of one sequence."""
        token_ids, model = _token_ids(payload), self.model
        self._require_encoder()
        if token_ids.ndim != 1 or token_ids.dtype != np.int32 or len(token_ids) == 0:
            raise BadRequest(reason="token ids must be a non-empty list of 32-bit integers")
        if len(token_ids) > model.seq_len:
            raise TextTooLong(index=0, num_tokens=len(token_ids), max_tokens=model.seq_len)
        if token_ids.min() < 0 or token_ids.max() >= model.spec.vocab_size:
            raise BadRequest(reason=f"token ids must lie between 0 and {model.spec.vocab_size - 1}")
        ids, lengths = pack_sequences([token_ids.tolist()])

        async def compute(deployment: TransformerDeployment) -> ComputedReply:
            result = await deployment.run_step(ids, lengths, "hidden")
            self._observe(deployment, len(ids), result)
            return wire.Vectors(latency_seconds=result.latency_seconds, num_tokens=len(ids)), pack_array(result.outputs)

        return await self._requests.run(compute, self._requests.arrive(request.timeout_seconds))

    def _observe(self, deployment: TransformerDeployment, num_rows: int, result: RunResult[Array]) -> None:
        """Pass a step's times to the drift monitor."""
        share = num_rows / deployment.plan.body.seq_len
        self._requests.observe(deployment, share, result.compute_seconds, result.step_seconds)

    def _require_encoder(self) -> None:
        if self.model.spec.causal:
            name = self.model.spec.name
            raise BadRequest(reason=f"{name} does not embed; it generates (`hearth generate`, home.generate())")

    # ---- requests to a decoder ------------------------------------------------------------------------------------

    async def generate(
        self, request: wire.Generate, payload: Sequence[Any]
    ) -> AsyncGenerator[wire.TextGenerated | wire.TextEnded, None]:
        """Stream the answer to a prompt (see `GenerationRunner.run`). Closing the stream early ends it on the workers too."""
        token_ids = _token_ids(payload) if payload else None
        if self._text_model is None:
            name = self.model.spec.name
            raise BadRequest(reason=f"{name} does not generate text; it embeds (`hearth embed`, home.embed())")
        return self._generation_runner.run(self._text_model, request, token_ids)


def _token_ids(payload: Sequence[Any]) -> Array:
    if len(payload) != 2:
        raise BadRequest(reason=f"token ids must be one array (2 frames), not {len(payload)} frames")
    return unpack_array(payload)


def transformer_files(model_dir: Path) -> list[Path]:
    """The files of a model directory that a standby needs."""
    small = [
        path
        for path in sorted(model_dir.iterdir())
        if path.is_file() and path.suffix not in _WEIGHTS and path.stat().st_size <= _MAX_SMALL_FILE_BYTES
    ]
    return [*small, *Checkpoint(model_dir).files]
