"""Examples of every message type, for golden bytes and round trips."""

from __future__ import annotations

import msgpack
from support.graph_plans import make_graph_plan
from support.plans import BERT_LARGE, device_profile, make_plan

from hearth.plan.geometry import Span
from hearth.plan.kept_caches import CacheBlock, CacheTransfer
from hearth.plan.kernels import KernelChoice, KernelTime
from hearth.plan.phases import Phase, Work
from hearth.plan.profile import Link
from hearth.wire import messages as m

_KEY = "0123456789" * 4
_HASH = "ab" * 32
_GPU = m.Gpu(
    name="Orin", kind="tegra", memory_total_bytes=8, memory_free_bytes=4, load_fraction=0.25, compute_capability=(8, 7)
)
_TELEMETRY = m.Telemetry(
    host_id="h", cpu_model="Cortex-A72", num_cores=4, load_1min=0.5, frequency_mhz=1500.0, memory_total_bytes=4 << 30,
    memory_available_bytes=3 << 30, memory_budget_bytes=2 << 30, disk_free_bytes=1 << 34, temperature_celsius=51.5,
    gpu=_GPU, gpu_problem="no driver", num_threads=4, compute_device="cpu", clock_unix_seconds=1.5e9,
    python_version="3.10.12", memory_held_bytes={"default": 1 << 29}, confined="files calls",
)  # fmt: skip
FORK_WORKER = m.ForkWorker(
    endpoint="ipc:///tmp/hearth-worker-1/worker", log_level="INFO", store="/var/cache/hearth-agent",
    scratch="/var/cache/hearth-agent/scratch-1", bind_ports=(47810, 47829), connect_ports=((47810, 47829),),
    compute_device="cpu",
)  # fmt: skip
_CHUNK = m.ChunkRef(hash=_HASH, num_bytes=1000, kind="mlp", layer=3, grain=2)
_CACHE_BLOCK = CacheBlock(Span(0, 2), Span(1, 3))
_LINK = Link(source="a", target="b", bytes_per_second=1e7, round_trip_seconds=0.001)
_EVENT = m.TraceEvent(lane="compute", kind=Work.QKV, layer=3, tile=1, start_seconds=1.0, end_seconds=1.5)
_SENT = m.TraceEvent(lane="send", kind=Phase.TENSOR, layer=0, peer=1, tensor="a", start_seconds=1.0, end_seconds=1.0)
_WIRE = m.WireStats(num_tiles=2, raw_bytes=100, sent_bytes=50, lz4_tiles=1)
_PLAN = make_plan(BERT_LARGE, "hmp", (2, 1))
_KERNELS = KernelChoice(
    num_outputs=64, num_inputs=32, layout="torch", rows=(1, 64), kernels=("torch", "expand-bfloat16")
)
_KERNEL_TIME = KernelTime(
    num_outputs=64, num_inputs=32, rows=4, layout="torch", kernel="torch", seconds=1e-4, bytes_per_weight=0.625
)
_LOAD = m.Load(
    holder="c",
    plan=_PLAN,
    rank=1,
    parts=m.ShardParts(chunks=(_CHUNK,), kernels=(_KERNELS,), vocabulary="0" * 64, draft_chunks=(_CHUNK,)),
    plan_token=bytes(range(16)),
)
_LOG_PROBS = m.TokenLogProbs(
    chosen=m.LogProb(token_id=17, value=-0.5, piece=b" Yes"), top=(m.LogProb(token_id=17, value=-0.5, piece=b" Yes"),)
)
_GRAPH_PLAN = make_graph_plan([(0, ("x",), ("t",)), (1, ("t",), ("y",))], inputs=("x",), outputs=("y",))
_LOAD_GRAPH = m.Load(
    holder="c",
    plan=_GRAPH_PLAN,
    rank=1,
    plan_token=bytes(range(16)),
    parts=m.SegmentParts(
        max_in_flight=4,
        files=(
            m.SegmentFiles(
                graph=(_HASH,),
                initializers=(m.ArrayChunks(name="w", dtype="float32", shape=(64, 3, 7, 7), chunks=(_HASH,)),),
            ),
        ),
    ),
)
_PROFILE = m.Profile(subject=m.BlocksOf(model=BERT_LARGE, seq_len=284), timeout_seconds=120.0)
_WORKER = m.WorkerStatus(
    state="ready",
    epoch=3,
    peak_bytes=1 << 30,
    busy_seconds=7.5,
    step=9,
    step_seconds=0.25,
    silent_seconds=0.5,
    late_rank=2,
    sent_bytes={"b": 1 << 20},
)
_ASKED = {"request_id": "r1", "deployment": "minilm"}
_EVENTS: tuple[m.Event, ...] = (
    m.RequestEnded(
        request_id="r1",
        app="lamp",
        deployment="minilm",
        model="minilm",
        operation="embed",
        outcome="failed",
        devices=("a", "b"),
        seconds=0.5,
        queued_seconds=0.25,
        error="DeviceLost",
        message="It is lost.",
        advice="Wait.",
    ),
    m.DeviceSampled(
        device_id="d",
        name="a",
        cpu_load=0.5,
        gpu_load=0.25,
        memory_available_bytes=1 << 30,
        memory_budget_bytes=1 << 29,
        worker_peak_bytes=1 << 28,
        temperature_celsius=51.5,
    ),
    m.DeviceChanged(device_id="d", name="a", state="dead", reason="no answer"),
    m.LinkRated(source="d", target="e", bytes_per_second=1e7, round_trip_seconds=0.001),
    m.PlanChanged(
        deployment="minilm",
        model="minilm",
        strategy="hmp",
        planner="galaxy",
        epoch=3,
        devices=("a", "b"),
        predicted_seconds=0.25,
        reason="DeviceLost",
    ),
    m.PhaseChanged(deployment="minilm", phase="serving", cause="warm-up request completed"),
    m.CoordinatorStarted(name="home", version="0.1.0"),
)
_ARRAY = m.ArrayInfo(name="x", dtype="float32", shape=(1, 3, 224, 224))
_SAMPLING = m.Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1, seed=7)
_MOVE = m.PhaseEntered(phase="failed", cause="No device answered.", seconds_ago=12.5, times=3)

_CONFIGURATION = m.Configuration(
    number=3, leader="l", voters=("a", "b"), tie_breaker="a", previous_voters=("a", "b", "c"), previous_tie_breaker="c"
)

EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(name="client"),
    m.Done(),
    m.KeysChanged(warning="the standby has not confirmed it"),
    m.Failed(code="TextTooLong", details={"index": 1, "num_tokens": 600, "max_tokens": 512}, scope="request"),
    m.AgentWelcome(
        version="0.1.0", device_id="d", boot_id="b", name="kitchen", device_public_key=_KEY, link_port=47801,
        data_ports=(47810, 47829),
    ),
    m.GetTelemetry(),
    _TELEMETRY,
    m.AcquireLease(holder="c", holder_name="home", seconds=5.0, adopt={"default": 12, "minilm": 11}, ended="hub"),
    m.LeaseGranted(
        last_epoch=12,
        workers=(
            m.RunningWorker(epoch=12, plan_hash="0" * 64, rank=1, last_step=34),
            m.RunningWorker(deployment="minilm", epoch=11, plan_hash="1" * 64, rank=0, last_step=5),
        ),
        configuration=_CONFIGURATION,
    ),
    m.Follow(name="standby", confirms=True, apps=m.KnownKeys(revoked=((_KEY, "lamp"),))),
    m.ReplicaPart(path="models/default/bert/config.json", num_bytes=700, offset=0, is_last=True),
    m.LeaderAlive(name="home", is_complete=True, configuration=_CONFIGURATION, receipt=7),
    m.StoreConfiguration(holder="c", configuration=_CONFIGURATION),
    m.ReleaseLease(holder="c"),
    m.Heartbeat(holder="c"),
    m.WatchWorkers(holder="c"),
    m.AgentState(boot_id="b", workers=(_WORKER,)),
    m.OpenLinkProbe(peer_public_key=_KEY, seconds=5.0),
    m.MeasureLink(host="10.0.0.2", port=47801, peer_public_key=_KEY, max_bytes=1 << 20, max_seconds=1.0),
    m.LinkMeasured(bytes_per_second=1e7, round_trip_seconds=0.001, num_bytes=1 << 20, stable=True),
    _PROFILE,
    m.Profile(subject=m.OperatorsOf(), timeout_seconds=60.0),
    m.Profiled(result=device_profile(0, 1.0).blocks.model_copy(update={"kernels": (_KERNEL_TIME,)})),
    m.FindMissing(holder="c", hashes=(_HASH,)),
    m.ChunksMissing(hashes=(_HASH,)),
    m.PutChunk(holder="c", hash=_HASH),
    m.FetchChunks(holder="c", host="10.0.0.2", port=47801, peer_public_key=_KEY, hashes=(_HASH,), seconds=30.0),
    m.ChunksFetched(missing=(_HASH,)),
    m.GetChunk(hash=_HASH),
    _LOAD,
    m.WorkerBound(
        port=47810, public_key=_KEY, num_bytes_loaded=123,
        prefixes=m.HeldPrefixes(block=_CACHE_BLOCK, keys=bytes(range(16))),
    ),
    m.ConnectPeers(
        holder="c", epoch=3,
        peers=(m.Peer(rank=0, host="10.0.0.2", port=47810, public_key=_KEY, bytes_per_second=1e7),),
        prefixes=m.KeptPrefixes(
            keys=bytes(range(16)), transfers=(CacheTransfer(0, 0, _CACHE_BLOCK),), transfer_seconds=0.0
        ),
    ),
    m.Run(
        holder="c", epoch=3, step=9, names=("token_ids", "cumulative_lengths"), output="mean", values="bf16",
        timeout_seconds=2.0, trace=True,
    ),
    m.Abort(holder="c", epoch=3, reason="a peer is gone"),
    m.Profiled(result=m.GraphProfile(
        kernels=(
            m.Kernel(
                name="conv1_nchwc", kind="Conv", provider="CPUExecutionProvider", seconds=0.001,
                operators=("conv1", "relu1"),
            ),
        ),
        run_seconds=0.0015, provider="CPUExecutionProvider", process_bytes=60 << 20,
        load_bytes=40 << 20,
        peak_bytes=120 << 20,
        run_bytes=1 << 20,
        wire=device_profile(0, 1.0).blocks.wire,
    )),
    _LOAD_GRAPH,
    m.Run(holder="c", epoch=3, step=9, timeout_seconds=5.0, names=("x",), trace=True),
    m.RunDone(
        names=("y",), began_seconds=1.0, ended_seconds=2.0, compute_seconds=(0.25,), wire=_WIRE, dropped_messages=0,
        trace=(_EVENT,),
    ),
    m.Abort(holder="c", epoch=3, step=9, reason="another device gave it up"),
    m.StartProfile(
        profile=_PROFILE, device="kitchen", folder="/var/cache/hearth-agent/profile-1", num_threads=4, compute_device="cpu"
    ),
    m.Start(
        load=_LOAD_GRAPH, store_path="/var/cache/hearth-agent", bind_host="0.0.0.0", ports=(47810, 47829), num_threads=4,
        compute_device="cpu", scratch_path="/var/cache/hearth-agent/scratch-1",
    ),
    m.Unload(holder="c", epoch=3),
    m.ReportProgress(interval_seconds=0.5),
    FORK_WORKER,
    m.WorkerForked(pid=4711),
    m.WorkerProgress(step=9, step_seconds=0.25, busy_seconds=0.125, limit_seconds=15.0, late_rank=2, sent_bytes=(0, 7)),
    m.Start(
        load=_LOAD, store_path="/var/cache/hearth-agent", bind_host="0.0.0.0", ports=(47810, 47829), num_threads=4,
        compute_device="cpu",
    ),
    m.GenerateTokens(
        holder="c", epoch=3, sampling=_SAMPLING, max_tokens=64, stop_ids=(2,), first_index=5, grammar='start: "a"',
        top_log_probs=1, values="bf16", logits="compare",
    ),
    m.TokensGenerated(token_ids=(17, 4), log_probs=(_LOG_PROBS, _LOG_PROBS)),
    m.GenerationEnded(
        reason="stop", num_prompt_tokens=9, num_tokens=31, queued_seconds=0.0, prefill_seconds=0.5, decode_seconds=1.5,
        logit_error=0.003,
    ),
    m.Cancel(request=bytes(range(8))),
    m.StepOrder(
        kind="prefill", freed=(3,), values="bf16",
        rows=(
            m.SequenceRows(
                sequence=4, token_ids=(5, 6), sample=True,
                new=m.NewSequence(
                    blocks=(3, 4), num_prompt_tokens=2, sampling=_SAMPLING, grammar='start: "a"', top_log_probs=1
                ),
            ),
        ),
    ),
    m.StepOrder(
        kind="decode", rows=(m.SequenceRows(sequence=4, token_ids=(5, 6), sample=True, num_drafted=1, num_rejected=2),),
        published=(m.PublishedBlock(3, bytes(range(16))),),
    ),
    m.CoordinatorWelcome(version="0.1.0", name="home"),
    m.GetReadiness(**_ASKED),
    m.Readiness(ready=False, state="planning", model="minilm"),
    m.Embed(**_ASKED, texts=("Turn on the light.",)),
    m.GetHiddenStates(**_ASKED),
    m.Generate(
        **_ASKED,
        messages=(m.ChatMessage(role="user", content="Is the light on?"),), max_tokens=64, stop=("END",),
        sampling=m.SamplingChoice(temperature=0.5, seed=3), constraint=m.AnswerConstraint(kind="regex", text="[ab]+"),
        called_tools=("turn_on",), parallel_calls=False, top_log_probs=1,
    ),
    m.TextGenerated(token_ids=(17, 4), text=" Yes", log_probs=(_LOG_PROBS, _LOG_PROBS)),
    m.TextEnded(
        text=".", reason="length", num_prompt_tokens=9, num_tokens=64, queued_seconds=0.0, first_token_seconds=0.5,
        decode_seconds=1.5,
    ),
    m.Vectors(latency_seconds=0.25, num_tokens=7, traces=(m.DeviceTrace(device="a", rank=0, events=(_EVENT, _SENT)),)),
    m.GetModelInfo(**_ASKED),
    m.ModelInfo(name="resnet50", inputs=(_ARRAY,), outputs=(_ARRAY,)),
    m.Infer(**_ASKED, names=("x",), timeout_seconds=10.0),
    m.Inferred(names=("y",), latency_seconds=0.25, traces=(m.DeviceTrace(device="a", rank=0, events=(_EVENT, _SENT)),)),
    m.ListDevices(**_ASKED),
    m.DeviceList(
        devices=(
            m.DeviceInfo(
                device_id="d", name="a", host="10.0.0.2:47800", state="alive", workers=(_WORKER,), telemetry=None
            ),
        ),
        links=(_LINK,),
    ),
    m.GetStatus(**_ASKED),
    m.Status(
        name="home", version="0.1.0", phase="serving", state="serving", history=(_MOVE,),
        model_path="/srv/minilm", plan=_PLAN, queued_requests=0, served_requests=5, failed_requests=1,
        last_error="", last_latency_seconds=0.25, wire=_WIRE, dropped_messages=0, refused_requests=2, refused_connections=1,
        losses=(m.PreparedLoss(device="kitchen", is_prepared=True, spare_bytes=700, missing_bytes=70, pause_seconds=0.9),),
    ),
    m.KeepLoaded(**_ASKED, seconds=-1.0),
    m.ListModels(request_id="r1"),
    m.ModelList(
        models=(
            m.ServedModel(
                deployment="chat", model="/srv/models/llama", ready=True, phase="serving", state="serving llama on a, b (hmp)",
                answers="text", takes_tools=True, context_tokens=2048, devices=("a", "b"), memory_bytes=1 << 31,
                waiting_requests=1, running_requests=2, pinned=True, sent_bytes_per_second=2.5e6,
            ),
            m.ServedModel(
                deployment="sentences", model="/srv/models/minilm", ready=False, phase="failed", state="not ready",
                keep_alive_seconds=300.0, missing_bytes=5,
            ),
        )
    ),
    m.ServeModel(request_id="r1", goal='{"kind":"graph","model_file":"/srv/detector.onnx"}', name="detector", plan=_GRAPH_PLAN),
    m.StopModel(request_id="r1", name="detector"),
    m.ModelChanged(deployment="detector"),
    m.WatchEvents(**_ASKED, since="ab12-1000007", kinds=("request_ended",), follow=False),
    m.EventsRecorded(events=tuple(
        m.RecordedEvent(number=number, unix_seconds=1.5e9, event=event) for number, event in enumerate(_EVENTS, 1000008)
    ), cursor="ab12-1000014", has_gap=True),
    m.GetMetrics(**_ASKED),
    m.Metrics(content_type="text/plain; version=0.0.4; charset=utf-8"),
    m.AddApp(**_ASKED, name="lamp", public_key=_KEY),
    m.RevokeApp(**_ASKED, name="lamp"),
    m.AddDevice(**_ASKED, name="kitchen", public_key=_KEY),
    m.RevokeDevice(**_ASKED, name="kitchen"),
    m.ListApps(**_ASKED),
    m.AppList(names=("lamp",), revoked=()),
)  # fmt: skip


def named_examples() -> dict[str, m.Message]:
    """By tag; the second example of a type has the suffix `_2`."""
    found: dict[str, m.Message] = {}
    for message in EXAMPLES:
        number = sum(type(other) is type(message) for other in found.values()) + 1
        found[message.tag if number == 1 else f"{message.tag}_{number}"] = message
    return found


def as_version_1(message: m.Message) -> bytes:
    """As the first version of the protocol encoded it: without a field `v`."""
    fields = msgpack.unpackb(m.encode(message))
    del fields["v"]
    return bytes(msgpack.packb(fields | ({"protocol": 1} if "protocol" in fields else {})))
