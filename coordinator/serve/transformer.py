"""Serving transformers: encoders embed, one step at a time; decoders generate, side by side (`generation`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from coordinator.deploy.deployment import Result, Weights
from coordinator.deploy.transformer import TransformerDeployment, shard_weights
from coordinator.devices.block_profiling import block_cluster, block_workload
from coordinator.devices.registry import Device
from coordinator.plan.transformer.cost.predict import seconds_of
from coordinator.plan.transformer.request import on_subset, price
from coordinator.serve.accuracy import calibrate, choose, describe
from coordinator.serve.generation import Generations, TextModel, warm_up
from coordinator.serve.goal import check_plan, open_model, plan_request
from coordinator.serve.kind import Handler, Revision, Tools
from coordinator.serve.planner_process import solve_transformer
from coordinator.serve.requests import Requests
from coordinator.serve.sentences import SentenceTokenizer, batches, mean_pool, pack
from coordinator.serve.state import TransformerGoal
from hearth.errors import BadPlan, BadRequest, BadSetting, HearthError, TextTooLong
from hearth.plan.plan import Plan, is_transformer_plan
from hearth.plan.profile import ClusterProfile
from hearth.plan.value_formats import Values
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import (
    DeviceTrace,
    Embed,
    Generate,
    GetHiddenStates,
    Message,
    TextEnded,
    TextGenerated,
    Vectors,
)
from hearth.wire.rpc import Reply

if TYPE_CHECKING:
    import numpy as np

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """float32 vectors [N,H] or [T,H]."""

    vectors: np.ndarray[Any, Any]
    latency_seconds: float
    num_tokens: int
    traces: tuple[DeviceTrace, ...] = ()

    def reply(self) -> Reply:
        message = Vectors(latency_seconds=self.latency_seconds, num_tokens=self.num_tokens, traces=self.traces)
        return Reply(message, pack_array(self.vectors))


class TransformerKind:
    """A `ModelKind`. Raises BadCheckpoint, UnsupportedArchitecture, BadSetting."""

    usage = "the model is a transformer; it embeds (home.embed()) or generates (home.generate())"

    def __init__(self, goal: TransformerGoal, tools: Tools, requests: Requests[TransformerDeployment]) -> None:
        self.model = open_model(goal)
        self.workload = block_workload(self.model.spec, self.model.seq_len)
        self.handlers: Mapping[type[Message], Handler] = {
            Embed: self._on_embed,
            GetHiddenStates: self._on_hidden_states,
            Generate: self._on_generate,
        }
        self._goal = goal
        self._tools = tools
        self._requests = requests
        self._values: Values | None = None  # of activations, as the accuracy budget chose last
        self._text_model: TextModel | None = None  # of a decoder
        if self.model.spec.causal:
            if goal.accuracy_budget is not None:
                raise BadSetting(
                    setting="--accuracy-budget", reason="it is measured on models that embed, not generate"
                )
            self._text_model = TextModel.of(self.model)
        self._generations = Generations(requests, tools.settings.queue_limit)

    # ---- plans ----------------------------------------------------------------------------------------------------

    def check(self, plan: Plan) -> None:
        if not is_transformer_plan(plan):
            raise BadPlan(reason=f"it is for a graph of operators, and {self.model.spec.name} is a transformer")
        check_plan(plan, self.model)

    async def profile(self, devices: Sequence[Device]) -> ClusterProfile:
        return await block_cluster(self._tools.profiler, devices, self.workload)

    async def plan(self, cluster: ClusterProfile, recovering: bool) -> Plan:
        return (await solve_transformer(plan_request(self._goal, self.model, cluster, self._values))).plan

    async def revise(self, cluster: ClusterProfile, deployment: TransformerDeployment) -> Revision:
        deployed = deployment.plan
        request = plan_request(self._goal, self.model, cluster, self._values, deployed)
        members = tuple(device.device_id for device in deployed.devices)
        new = (await solve_transformer(request)).plan
        old = price(on_subset(request, members), deployed.body, deployed.planner)
        return Revision(new, seconds_of(new), seconds_of(old))

    # ---- deployments ----------------------------------------------------------------------------------------------

    def weights(self, plan: Plan) -> AbstractAsyncContextManager[Weights]:
        assert is_transformer_plan(plan)
        return shard_weights(self.model.directory, plan, self._tools.settings.state_dir / "manifests")

    def deployment(self, plan: Plan, name: str) -> TransformerDeployment:
        assert is_transformer_plan(plan)
        deployment = TransformerDeployment(self._tools.fleet, plan, name)
        if self._goal.accuracy_budget is not None:
            deployment.values = "exact"  # until measured
        return deployment

    def capacity(self, deployment: TransformerDeployment) -> int:
        return self._generations.limit if self.model.spec.causal else 1

    async def warm_up(self, deployment: TransformerDeployment) -> None:
        if deployment.weight_error:
            lost = f"{100 * deployment.weight_error:.2g} %"
            self._tools.report(
                f"weights in {self.model.spec.weights} are {lost} off the checkpoint's (root mean square)"
            )
        if self.model.spec.causal:
            await warm_up(deployment)
        else:
            await deployment.run_step(*pack([[0] * min(_WARM_UP_TOKENS, self.model.seq_len)]), "mean")

    async def tune(self, deployment: TransformerDeployment) -> None:
        """Choose the format of activations within the accuracy budget; until then they are sent exactly."""
        budget = self._goal.accuracy_budget
        self._values = deployment.values
        if budget is None or deployment.plan.num_ranks == 1:  # one device sends nothing
            return

        async def run(values: Values, ids: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
            async with self._requests.admission.exclusively():
                result = await deployment.run_step(*pack([ids.tolist()]), "hidden", values=values)
            return result.outputs, result.step_seconds

        measured = await calibrate(run, self.model.spec.vocab_size, self.model.seq_len)
        chosen = choose(measured, budget)
        self._values = deployment.values = chosen.values
        self._tools.report(describe(measured, chosen, budget))

    # ---- requests to an encoder -----------------------------------------------------------------------------------

    async def embed(self, texts: tuple[str, ...], timeout_seconds: float, trace: bool) -> Answer:
        """Normalised sentence embeddings [N,H]."""
        self._require_encoder()
        model = self.model
        if not isinstance(model.tokenizer, SentenceTokenizer):
            raise BadRequest(reason="the model has no tokenizer.json; send token ids instead of texts")
        encoded = await asyncio.to_thread(model.tokenizer.encode, texts, model.seq_len)

        async def compute(deployment: TransformerDeployment) -> Answer:
            import numpy as np

            vectors: list[np.ndarray[Any, Any]] = []
            traces: list[DeviceTrace] = []
            seconds = 0.0
            for batch in batches([len(ids) for ids in encoded], model.seq_len):
                ids, lengths = pack([encoded[i] for i in batch])
                result = await self._run_step(deployment, ids, lengths, "mean", trace)
                vectors.append(mean_pool(result.outputs, lengths))
                traces.extend(result.traces)
                seconds += result.latency_seconds
            return Answer(np.concatenate(vectors), seconds, sum(map(len, encoded)), tuple(traces))

        return await self._requests.run(compute, timeout_seconds)

    async def hidden_states(self, token_ids: np.ndarray[Any, Any], timeout_seconds: float) -> Answer:
        """Last hidden states [T,H] of one sequence."""
        import numpy as np

        self._require_encoder()
        model = self.model
        if token_ids.ndim != 1 or token_ids.dtype != np.int32 or len(token_ids) == 0:
            raise BadRequest(reason="token ids must be a non-empty list of 32-bit integers")
        if len(token_ids) > model.seq_len:
            raise TextTooLong(index=0, num_tokens=len(token_ids), max_tokens=model.seq_len)
        if token_ids.min() < 0 or token_ids.max() >= model.spec.vocab_size:
            raise BadRequest(reason=f"token ids must lie between 0 and {model.spec.vocab_size - 1}")
        ids, lengths = pack([token_ids.tolist()])

        async def compute(deployment: TransformerDeployment) -> Answer:
            result = await self._run_step(deployment, ids, lengths, "hidden")
            return Answer(result.outputs, result.latency_seconds, len(ids))

        return await self._requests.run(compute, timeout_seconds)

    async def _run_step(
        self,
        deployment: TransformerDeployment,
        ids: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
        output: Literal["hidden", "mean"],
        trace: bool = False,
    ) -> Result[np.ndarray[Any, Any]]:
        """A request's step, watched for drift."""
        result = await deployment.run_step(ids, lengths, output, trace)
        share = len(ids) / deployment.plan.body.seq_len
        self._requests.observe(deployment, share, result.compute_seconds, result.step_seconds)
        return result

    def _require_encoder(self) -> None:
        if self.model.spec.causal:
            name = self.model.spec.name
            raise BadRequest(reason=f"{name} embeds nothing; it generates (`hearth generate`, home.generate())")

    # ---- requests to a decoder ------------------------------------------------------------------------------------

    async def generate(
        self, request: Generate, token_ids: np.ndarray[Any, Any] | None
    ) -> AsyncGenerator[TextGenerated | TextEnded, None]:
        """The answer to a prompt, as it comes (see `Generations.run`); closed early, it ends on the workers too."""
        if self._text_model is None:
            name = self.model.spec.name
            raise BadRequest(reason=f"{name} generates no text; it embeds (`hearth embed`, home.embed())")
        try:
            async with aclosing(self._generations.run(self._text_model, request, token_ids)) as parts:
                async for part in parts:
                    yield part
        except HearthError as error:
            self._requests.count_failure(error)
            raise
        if isinstance(part, TextEnded):
            self._requests.count(part.first_token_seconds + part.decode_seconds)

    # ---- messages -------------------------------------------------------------------------------------------------

    async def _on_embed(self, message: Embed, payload: Sequence[Any]) -> Reply:
        return (await self.embed(message.texts, message.timeout_seconds, message.trace)).reply()

    async def _on_hidden_states(self, message: GetHiddenStates, payload: Sequence[Any]) -> Reply:
        return (await self.hidden_states(_token_ids(payload), message.timeout_seconds)).reply()

    async def _on_generate(self, message: Generate, payload: Sequence[Any]) -> AsyncGenerator[Reply, None]:
        parts = self.generate(message, _token_ids(payload) if payload else None)

        async def replies() -> AsyncGenerator[Reply, None]:
            async with aclosing(parts):
                async for part in parts:
                    yield Reply(part)

        return replies()


def _token_ids(payload: Sequence[Any]) -> np.ndarray[Any, Any]:
    if len(payload) != 2:
        raise BadRequest(reason=f"token ids are one array, not {len(payload)} frames")
    return unpack_array(payload)
