"""`hearth generate`: a text that goes on from a prompt, printed as it comes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from coordinator.cli.options import Address, AsJson, Interfaces, KeyPath, interface_list
from coordinator.cli.output import handles_errors, print_json, report
from hearth.client.answers import Usage
from hearth.client.sync import connect
from hearth.errors import BadSetting
from hearth.platform.units import format_seconds

_SAMPLING = "Sampling"
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate. Default: the model's own, else 512.")]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 takes the most likely token; 1 samples as the model predicts.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int | None, typer.Option(help="Sample from the k most likely tokens (0 disables).", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the most likely tokens up to this total probability.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Drop tokens less likely than this fraction of the top token.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Values above 1 penalise tokens already in the context.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Repeats an answer: the same seed gives the same tokens.", rich_help_panel=_SAMPLING),
]
AnswerTimeout = Annotated[float, typer.Option("--timeout", help="Seconds for a whole answer.", min=0.1)]


@handles_errors
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="What the text begins with; '-' reads it from standard input.", show_default=False),
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(help='Token ids instead of a text, as "1,2,3"; prints token ids.')
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Annotated[list[str], typer.Option(help="A text that ends the answer; may be repeated.")] = [],  # noqa: B006
    timeout: AnswerTimeout = 600.0,
    address: Address = None,
    mdns_interfaces: Interfaces = None,
    key: KeyPath = None,
    as_json: AsJson = False,
) -> None:
    """Generate text with the model that this home serves; Ctrl-C ends it."""
    if (prompt is None) == (token_ids is None):
        raise BadSetting(setting="PROMPT", reason="give either a text ('-': from standard input) or --token-ids")
    ids = _read_ids(token_ids) if token_ids is not None else None
    if prompt == "-":
        prompt = sys.stdin.read()
    with connect(address, key, interfaces=interface_list(mdns_interfaces)) as home:
        answer = home.generate(
            prompt, token_ids=ids, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, stop=stop, timeout_seconds=timeout,
        )  # fmt: skip
        text = ""
        with answer:
            for token in answer:
                text += token.text
                if as_json:
                    continue
                piece = token.text if ids is None else f"{token.token_id} " if token.token_id is not None else ""
                typer.echo(piece, nl=False)
    assert answer.usage is not None
    if as_json:
        usage = {**answer.usage._asdict(), "tokens_per_second": answer.usage.tokens_per_second}
        print_json({"text": text, "token_ids": answer.token_ids, "usage": usage})
        return
    typer.echo()
    report(f"[dim]{usage_line(answer.usage)}[/]")


def usage_line(usage: Usage) -> str:
    """One line for people."""
    ended = "the length was reached" if usage.finish_reason == "length" else "ended by itself"
    rate = f", then {usage.tokens_per_second:.1f} tokens/s" if usage.tokens_per_second else ""
    return (
        f"{usage.num_prompt_tokens} tokens in, {usage.num_tokens} out ({ended}); "
        f"first token after {format_seconds(usage.first_token_seconds)}{rate}"
    )


def _read_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadSetting(setting="--token-ids", reason=f"'{text}' is no list of numbers such as 1,2,3") from None
