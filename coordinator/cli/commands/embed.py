"""`hearth embed`: text embeddings from the running coordinator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import AsJsonOption, HomeOptions, ServedModelOption, TimeoutOption
from coordinator.cli.output import out, print_json, report, write_file
from hearth.platform.units import format_seconds
from hearth.trace import chrome_trace, overlap_seconds


def embed(
    texts: Annotated[list[str], typer.Argument(help="Texts to embed; '-' reads one per line from standard input.")],
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a timeline of the request as a Chrome trace, for Perfetto or chrome://tracing."),
    ] = None,
    model: ServedModelOption = None,
    timeout: TimeoutOption = 60.0,
    *,
    where: HomeOptions,
    as_json: AsJsonOption = False,
) -> None:
    """Embed texts with the served model. Prints the most similar text of each; with --json, the vectors."""
    if texts == ["-"]:
        texts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    with where.connect() as home:
        result = home.request_embeddings(texts, timeout_seconds=timeout, trace=trace is not None, model=model)
    if trace is not None:
        write_file("--trace", trace, json.dumps(chrome_trace(result.traces)))
        report(f"wrote {trace}: transfers overlapped compute for {format_seconds(overlap_seconds(result.traces))}")
    if as_json:
        print_json({"embeddings": result.vectors.tolist(), "latency_seconds": result.latency_seconds})
        return
    out.print(
        f"{len(texts)} texts, {result.num_tokens} tokens, {result.vectors.shape[1]} dimensions, "
        f"{format_seconds(result.latency_seconds)}"
    )
    similarities = result.vectors @ result.vectors.T
    for i, text in enumerate(texts):
        if len(texts) > 1:
            similarities[i, i] = -2
            nearest = int(similarities[i].argmax())
            out.print(f"  {text}  ->  {texts[nearest]} ({similarities[i, nearest]:.3f})")
        else:
            out.print(" ".join(f"{value:.4f}" for value in result.vectors[i][:8]) + " ...")
