"""`hearth infer` and `hearth bench-model`: run a served operator graph once, or measure it under load."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from coordinator.cli.load_generator import LoadResult, measure_load, random_inputs
from coordinator.cli.options import AsJsonOption, HomeOptions, ServedModelOption, TimeoutOption
from coordinator.cli.output import out, print_json, report, write_file
from coordinator.cli.render.graph_tables import prediction_line
from coordinator.plan.graph.predict import requests_in_flight
from hearth.errors import BadSetting, NotAuthorised
from hearth.plan.plan import GraphPlan, is_graph_plan
from hearth.platform.units import format_seconds

# Concurrent requests with an app's key, which may not read the plan: fills the pipelines of a few devices.
_DEFAULT_CONCURRENCY = 8


def infer(
    inputs: Annotated[
        Path | None,
        typer.Argument(
            help="Inputs by name, in an .npz file (numpy.savez). Default: random inputs.", show_default=False
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the outputs to this .npz file.", metavar="FILE")] = None,
    model: ServedModelOption = None,
    timeout: TimeoutOption = 60.0,
    *,
    where: HomeOptions,
    as_json: AsJsonOption = False,
) -> None:
    """Run the served graph once. Prints name, type, shape and first values of each output."""
    file_inputs = _read_npz(inputs) if inputs is not None else None
    with where.connect() as home:
        arrays = file_inputs if file_inputs is not None else random_inputs(home.model_info(timeout, model=model).inputs)
        result = home.request_inference(arrays, timeout, model=model)
    if output is not None:
        write_file("--output", output, _npz_bytes(result.outputs))
    if as_json:
        outputs = {
            name: {"dtype": str(array.dtype), "shape": list(array.shape)} for name, array in result.outputs.items()
        }
        print_json({"outputs": outputs, "latency_seconds": result.latency_seconds})
        return
    for name, array in result.outputs.items():
        first = ", ".join(f"{value:.4g}" for value in array.reshape(-1)[:6].tolist())
        out.print(
            f"{name}: {array.dtype} {list(array.shape)}: {first}{', ...' if array.size > 6 else ''}", markup=False
        )
    out.print(format_seconds(result.latency_seconds))


def bench_model(
    concurrency: Annotated[
        int | None,
        typer.Option(help="Concurrent requests. Default: as many as fill the pipeline.", min=1, max=200, metavar="N"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds of concurrent load, after half of it one request at a time.", min=0.5)
    ] = 20.0,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Inputs by name, in an .npz file (numpy.savez). Default: random inputs.", metavar="FILE"),
    ] = None,
    model: ServedModelOption = None,
    timeout: TimeoutOption = 60.0,
    *,
    where: HomeOptions,
    as_json: AsJsonOption = False,
) -> None:
    """Measure the served graph with sequential, then with concurrent requests, and show the prediction."""
    file_inputs = _read_npz(inputs) if inputs is not None else None

    async def run() -> tuple[LoadResult, LoadResult, GraphPlan | None]:
        async with await where.connect_async() as home:
            info = await home.model_info(timeout, model=model)
            arrays = file_inputs if file_inputs is not None else random_inputs(info.inputs)
            try:
                served = (await home.status(model=model)).plan
            except NotAuthorised:  # an app's key
                served = None
            plan = served if is_graph_plan(served) else None
            num_concurrent = concurrency or (requests_in_flight(plan.body.segments) if plan else _DEFAULT_CONCURRENCY)
            report(f"measuring {info.name} for {seconds / 2:g} s, one request at a time")
            alone = await measure_load(home, arrays, 1, seconds / 2, timeout, model)
            report(f"measuring {info.name} for {seconds:g} s, {num_concurrent} concurrent requests")
            return alone, await measure_load(home, arrays, num_concurrent, seconds, timeout, model), plan

    alone, full, plan = asyncio.run(run())
    if as_json:
        predicted = plan.predicted.model_dump(mode="json") if plan else None
        print_json({"alone": alone.as_json(), "load": full.as_json(), "predicted": predicted})
        return
    for load in (alone, full):
        out.print(load.summary(), soft_wrap=True)
    if plan is not None:
        out.print(prediction_line(plan), soft_wrap=True)


def _read_npz(path: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or "it is not an .npz file of plain arrays"
        raise BadSetting(setting="--inputs", reason=f"{path}: {reason}") from None


def _npz_bytes(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # an output may have any name
    return file.getvalue()
