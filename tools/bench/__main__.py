"""`python -m tools.bench`: measures Hearth's strategies on the emulated testbed and reproduces the Galaxy paper's tables."""

from __future__ import annotations

import itertools
import json as _json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional, cast, get_args

import typer
from rich.console import Console
from rich.status import Status

from coordinator.cli.output import err, handles_errors, out
from coordinator.models.checkpoint.families import read_json
from hearth.errors import BadSetting
from hearth.plan.model_spec import WeightFormat
from hearth.plan.value_formats import Values
from tools.bench import (
    generation,
    graphs_command,
    interrupts,
    moirai_coarsening,
    moirai_command,
    paper,
    partition_command,
    plots,
    proofs,
    versions,
)
from tools.bench.drive import StoredModel
from tools.bench.measure import MIN_ROUNDS, Bench, Models, Setting, emulated, temporary_folder
from tools.bench.paper import ENVIRONMENTS, Wanted
from tools.bench.plans import NAMES, entries, parse_names, parse_wires
from tools.bench.rows import Row, as_json, by_setting, check_files, check_writable, footnotes, markdown, rich_table
from tools.bench.shapes import SHAPES, Shape, shape_named, shape_of_file
from tools.testbed import Scenario, load_scenario
from tools.testbed.cluster import check_possible

_FILE_WIDTH = 160  # columns of tables, if the output is not a terminal
screen = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)

_DEFAULT_SCENARIO = "galaxy-a"
_LAYERS = 4  # of the model, by default

Json = Annotated[
    Optional[Path],  # noqa: UP045 (typer reads the annotation on Python 3.10)
    typer.Option("--json", help="Save all rows to this file.", metavar="FILE"),
]
Markdown = Annotated[Optional[Path], typer.Option(help="Save the tables to this file.", metavar="FILE")]  # noqa: UP045
Plot = Annotated[Optional[Path], typer.Option(help="Save a plot to this file.", metavar="FILE.png")]  # noqa: UP045
Rounds = Annotated[int, typer.Option(help=f"Rounds; each strategy runs once per round. At least {MIN_ROUNDS}.")]
Layers = Annotated[int, typer.Option(help="Number of the model's layers to run.", min=1)]
SeqLen = Annotated[int, typer.Option(help="Tokens.", min=1)]
Model = Annotated[list[str], typer.Option(help=f"{', '.join(SHAPES)}; may be repeated.", metavar="NAME")]
Wires = Annotated[str, typer.Option(help="Activation formats on the wire: exact, fp16, bf16, int8.", metavar="LIST")]

app = typer.Typer(
    name="python -m tools.bench",
    help="Measure Hearth's strategies on an emulated cluster on this machine. Needs root.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True)
class Files:
    """Output files; written after every setting, so that an interrupt loses only the unfinished one."""

    json: Path | None
    markdown: Path | None
    plot: Path | None
    draw: plots.Draw
    title: str
    summary: Callable[[Sequence[Row]], list[str]]

    def check(self) -> None:
        """Raise BadSetting if a file cannot be written."""
        check_files(self.json, self.markdown)
        check_writable("--plot", self.plot)
        if self.plot is not None:
            plots.check_plots()

    def save(self, rows: Sequence[Row]) -> None:
        if self.json is not None:
            self.json.write_text(as_json(rows))
        if self.markdown is not None:
            self.markdown.write_text(markdown(rows, self.summary(rows)))
        if self.plot is not None and rows:
            plots.save_plot(self.plot, rows, self.draw, self.title)


@app.command()
@handles_errors
def galaxy(
    env: Annotated[list[str], typer.Option(help="Environment of the paper, a to f; may be repeated.")] = [],  # noqa: B006
    scenario: Annotated[list[str], typer.Option(help="A scenario's name or TOML file; may be repeated.")] = [],  # noqa: B006
    devices: Annotated[Optional[int], typer.Option(help="Use only the first N devices.", min=1, metavar="N")] = None,  # noqa: UP045
    model: Model = [],  # noqa: B006
    config: Annotated[list[Path], typer.Option(help="The config.json of a supported model; may be repeated.")] = [],  # noqa: B006
    layers: Layers = _LAYERS,
    seq_len: Annotated[list[int], typer.Option(help="Tokens; may be repeated.", min=1)] = [284],  # noqa: B006
    mbit: Annotated[list[float], typer.Option(help="Real rate of every link; may be repeated.")] = [],  # noqa: B006
    strategies: Annotated[str, typer.Option(help=f"Of {', '.join(NAMES)}.", metavar="LIST")] = ",".join(NAMES),
    wires: Wires = "exact",
    rounds: Rounds = 15,
    plain: Annotated[bool, typer.Option("--plain", help="Also run hmp without encryption.")] = False,
    baseline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Strategy that speed-ups are relative to. Default: gloo-tp if it is run.", show_default=False
        ),
    ] = None,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """Compare strategies in interleaved rounds, on one or more models."""
    names = parse_names(strategies)
    if baseline is not None and baseline not in names:
        raise BadSetting(setting="--baseline", reason=f"'{baseline}' is none of the strategies that are run")
    shapes = [*map(shape_named, model), *map(shape_of_file, config)] or [shape_named("bert-large")]
    chosen = entries(names, parse_wires(wires), plain)
    scenarios = [_environment(letter) for letter in env] + [load_scenario(name) for name in scenario]
    wanted = paper.galaxy(shapes, seq_len, _rates(mbit), chosen, baseline or "gloo-tp")
    scenarios = [_first(each, devices) for each in scenarios or [load_scenario(_DEFAULT_SCENARIO)]]
    draw = plots.bandwidth_lines if len(mbit) > 2 else plots.latency_bars
    files = Files(json, markdown, plot, draw, "Strategies on the emulated testbed", _summary)
    _measure([(each, wanted) for each in scenarios], layers, rounds, files)


@app.command()
@handles_errors
def table4(
    env: Annotated[list[str], typer.Option(help="Of a, b, c; may be repeated.")] = ["a", "b", "c"],  # noqa: B006
    model: Model = ["distilbert", "bert-large", "gpt2-large", "opt-large", "opt-xl"],  # noqa: B006
    layers: Layers = 2,
    seq_len: SeqLen = 284,
    rounds: Rounds = 15,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """The paper's Table IV: every model on two, three and four equal devices."""
    wanted = paper.table4(_shapes(model), seq_len)
    files = Files(json, markdown, plot, plots.speedup_bars, "Table IV: equal devices, 125 Mbit/s", _summary)
    _measure([(_environment(letter), wanted) for letter in env], layers, rounds, files)


@app.command()
@handles_errors
def fig8(
    env: Annotated[str, typer.Option(help="a to f.")] = "a",
    model: Model = ["bert-large"],  # noqa: B006
    layers: Layers = 2,
    seq_len: SeqLen = 284,
    rounds: Rounds = 15,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """The paper's Figure 8: one environment over a range of link rates."""
    wanted = paper.fig8(_shapes(model), seq_len)
    files = Files(json, markdown, plot, plots.bandwidth_lines, f"Figure 8: environment {env.upper()}", _summary)
    _measure([(_environment(env), wanted)], layers, rounds, files)


@app.command()
@handles_errors
def fig9(
    env: Annotated[list[str], typer.Option(help="Of d, e, f; may be repeated.")] = ["d", "e", "f"],  # noqa: B006
    model: Model = ["distilbert", "bert-large", "gpt2-large", "opt-large"],  # noqa: B006
    layers: Layers = 2,
    seq_len: SeqLen = 284,
    rounds: Rounds = 15,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """The paper's Figure 9: devices of different speed and memory."""
    wanted = paper.table4(_shapes(model), seq_len)
    files = Files(json, markdown, plot, plots.speedup_bars, "Figure 9: unequal devices, 125 Mbit/s", _summary)
    _measure([(_environment(letter), wanted) for letter in env], layers, rounds, files)


@app.command()
@handles_errors
def fig10(
    model: Model = ["gpt2-large", "opt-xl"],  # noqa: B006
    layers: Layers = 3,
    rounds: Rounds = 15,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """The paper's Figure 10, weak scaling: 96 rows for each of one to four devices, 1000 Mbit/s."""
    scenario = _environment("c")
    wanted = paper.scaling(_shapes(model), len(scenario.devices), lambda count: paper.WEAK_ROWS * count)
    files = Files(json, markdown, plot, plots.scaling_lines(_hidden), "Figure 10: weak scaling, 96 rows per device",
                  lambda rows: [*paper.say_scaling(rows, _hidden), *paper.say_prediction(rows)])  # fmt: skip
    _measure([(scenario, wanted)], layers, rounds, files, together=True)


@app.command()
@handles_errors
def fig11(
    model: Model = ["gpt2-large", "opt-xl"],  # noqa: B006
    layers: Layers = 3,
    rounds: Rounds = 15,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """The paper's Figure 11, strong scaling: 384 rows on one to four devices, 1000 Mbit/s."""
    scenario = _environment("c")
    wanted = paper.scaling(_shapes(model), len(scenario.devices), lambda count: paper.STRONG_ROWS)
    files = Files(json, markdown, plot, plots.scaling_lines(_hidden), "Figure 11: strong scaling, 384 rows",
                  lambda rows: [*paper.say_scaling(rows, _hidden), *paper.say_prediction(rows)])  # fmt: skip
    _measure([(scenario, wanted)], layers, rounds, files, together=True)


@app.command()
@handles_errors
def sweep(
    scenario: Annotated[str, typer.Option(help="A scenario's name or TOML file.")] = "galaxy-c",
    model: Model = list(paper.SWEEP_MODELS),  # noqa: B006
    seq_len: Annotated[list[int], typer.Option(help="Tokens; may be repeated.", min=1)] = list(paper.SWEEP_LENGTHS),  # noqa: B006
    mbit: Annotated[list[float], typer.Option(help="Real rates; may be repeated.")] = list(paper.SWEEP_MBIT),  # noqa: B006
    layers: Layers = 2,
    rounds: Rounds = MIN_ROUNDS,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """Measure the planner's prediction error and the choices of `auto`, on one to four devices and many links and models."""
    chosen = load_scenario(scenario)
    wanted = paper.sweep(_shapes(model), min(len(chosen.devices), 4), seq_len, _rates(mbit))
    files = Files(json, markdown, plot, plots.predicted_against_measured, "Predicted against measured",
                  lambda rows: [*paper.say_prediction(rows), *paper.say_auto(rows)])  # fmt: skip
    _measure([(chosen, wanted)], layers, rounds, files)


@app.command()
@handles_errors
def codec(
    scenario: Annotated[str, typer.Option(help="A scenario's name or TOML file.")] = _DEFAULT_SCENARIO,
    model: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}.", metavar="NAME")] = "bert-large",
    wires: Wires = "exact,bf16",
    mbit: Annotated[list[float], typer.Option(help="Real rates; may be repeated.")] = list(paper.CODEC_MBIT),  # noqa: B006
    layers: Layers = 2,
    seq_len: SeqLen = 284,
    rounds: Rounds = 15,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """Compare lz4 off, auto and on, on a slow and on a fast link. (Activations of random weights.)"""
    values: tuple[Values, ...] = parse_wires(wires)
    wanted = paper.codec(shape_named(model), seq_len, values, _rates(mbit))
    files = Files(json, markdown, plot, plots.speedup_bars, "lz4 on activations: speed-up over sending them as they are",
                  paper.say_codec)  # fmt: skip
    _measure([(load_scenario(scenario), wanted)], layers, rounds, files)


@app.command()
@handles_errors
def generate(
    scenario: Annotated[str, typer.Option(help="A scenario's name or TOML file.")] = "whole-cores",
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A decoder's config.json. Default: a Llama of 330 million weights.", show_default=False),
    ] = None,
    weights: Annotated[str, typer.Option(help=f"Of {', '.join(get_args(WeightFormat))}.", metavar="FORMAT")] = "int8",
    mbit: Annotated[list[float], typer.Option(help="Real rates; may be repeated.")] = [125.0, 500.0, 940.0],  # noqa: B006
    prompt: Annotated[int, typer.Option(help="Tokens.", min=1)] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens of the answer.", min=2)] = 64,
    rounds: Rounds = MIN_ROUNDS,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Measure generation by a decoder of random weights: on one device, on two, and with transformers (bfloat16) on one."""
    if weights not in get_args(WeightFormat):
        raise BadSetting(setting="--weights", reason=f"'{weights}' is none of {', '.join(get_args(WeightFormat))}")
    check_files(json, markdown)
    chosen = load_scenario(scenario)
    if len(chosen.devices) < 2:
        raise BadSetting(setting="--scenario", reason=f"{chosen.name} has one device; two are compared")
    check_possible(chosen)
    rates, rows = _rates(mbit), list[generation.GenerationRow]()
    with temporary_folder() as folder, Status("", console=err) as status:

        def report(what: str) -> None:
            interrupts.check()
            status.update(what)

        report("making the model")
        shape = generation.LLAMA if config is None else read_json(config)
        model = StoredModel(generation.save_random_decoder(folder / "model", shape), folder / "store")
        with (
            emulated(chosen, folder / "testbed", real_mbit=True) as testbed,
            generation.GenerationBench(testbed, model, cast(WeightFormat, weights), report) as bench,
        ):
            for rate in rates:
                rows += bench.measure(rate, prompt, tokens, rounds)
                if json is not None:
                    json.write_text(_json.dumps([row.model_dump() for row in rows], indent=1))
                if markdown is not None:
                    markdown.write_text(generation.markdown(rows))
    out.print(generation.markdown(rows), soft_wrap=True, markup=False)


app.command()(handles_errors(partition_command.partition))
app.command()(handles_errors(moirai_command.moirai))
app.command()(handles_errors(moirai_coarsening.coarsening))
app.command()(handles_errors(graphs_command.graphs))
app.command()(handles_errors(versions.versions))
for proof in (proofs.push, proofs.capacity, proofs.soak, proofs.exactness):
    app.command()(proof)


# ---- the same for all -----------------------------------------------------------------------------------------------


def _measure(
    work: Sequence[tuple[Scenario, Sequence[Wanted]]], layers: int, rounds: int, files: Files, together: bool = False
) -> None:
    """Measure settings and print each table when it is finished. Exits with 1 if an output was wrong.

    `together`: interleave all settings of a model, because they are compared with each other.
    """
    if rounds < MIN_ROUNDS:
        raise BadSetting(setting="--rounds", reason=f"{rounds} is too few; at least {MIN_ROUNDS} are needed")
    for _, wanted in work:
        for each in wanted:
            each.shape.shortened(layers, each.seq_len)  # report a length that a model does not support before starting
    files.check()
    rows: list[Row] = []
    with temporary_folder() as folder, Status("", console=err) as status:
        models = Models(folder)

        def report(what: str) -> None:
            interrupts.check()
            status.update(what)

        for scenario, wanted in work:
            real = all(each.mbit is not None for each in wanted)
            gloo = any(entry.strategy == "gloo-tp" for each in wanted for entry in each.entries)
            with Bench(scenario, folder, models, report, real, gloo) as bench:
                for group in _groups(wanted, together):
                    found = bench.measure(
                        *(
                            Setting(
                                shape=each.shape,
                                num_layers=layers,
                                seq_len=each.seq_len,
                                num_devices=each.num_devices or len(scenario.devices),
                                mbit=bench.paper_mbit(each.paper_mbit) if each.paper_mbit is not None else each.mbit,
                                entries=each.entries,
                                baseline=each.compared_with(),
                                rounds=rounds,
                            )
                            for each in group
                        )
                    )
                    rows += found
                    files.save(rows)
                    _print(found)
    for line in files.summary(rows):
        out.print(line, soft_wrap=True)
    if any(row.wrong for row in rows):
        err.print("[red]error:[/] an output differs from that of a single device; its row is marked", soft_wrap=True)
        raise typer.Exit(1)


def _groups(wanted: Sequence[Wanted], together: bool) -> list[list[Wanted]]:
    if not together:
        return [[each] for each in wanted]
    return [list(group) for _, group in itertools.groupby(wanted, key=lambda each: each.shape)]


def _print(rows: Sequence[Row]) -> None:
    for group in by_setting(rows):
        screen.print(rich_table(group, screen.width))
        for number, note in enumerate(footnotes(group), 1):
            out.print(f"[dim]{number}: {note}[/]", soft_wrap=True)
        out.print()


def _environment(letter: str) -> Scenario:
    if letter.lower() not in ENVIRONMENTS:
        raise BadSetting(setting="--env", reason=f"'{letter}' is none of {', '.join(ENVIRONMENTS)}")
    return load_scenario(ENVIRONMENTS[letter.lower()])


def _first(scenario: Scenario, devices: int | None) -> Scenario:
    if devices is None:
        return scenario
    if devices > len(scenario.devices):
        raise BadSetting(setting="--devices", reason=f"{scenario.name} has only {len(scenario.devices)}")
    return scenario.with_devices(devices)


def _rates(mbit: Sequence[float]) -> Sequence[float]:
    for rate in mbit:
        if not 0.01 <= rate <= 100_000:
            raise BadSetting(setting="--mbit", reason=f"{rate:g}; 0.01 to 100000 can be emulated")
    return mbit


def _shapes(names: Sequence[str]) -> list[Shape]:
    return [shape_named(name) for name in names]


def _hidden(model: str) -> int:
    return SHAPES[model].hidden_size


def _summary(rows: Sequence[Row]) -> list[str]:
    return [*paper.say_speedup(rows), *paper.say_prediction(rows), *paper.say_auto(rows)]


def main() -> None:
    interrupts.install()
    try:
        app()
    except (OSError, subprocess.SubprocessError) as error:
        err.print(f"[red]error:[/] {error}", soft_wrap=True)
        raise SystemExit(1) from None
    finally:
        interrupts.ignore()


if __name__ == "__main__":
    main()
