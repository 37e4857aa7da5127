"""`hearth generate`: continues a prompt and prints tokens as they arrive."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from coordinator.cli.options import AnswerOptions, AsJsonOption, HomeOptions, SamplingOptions
from coordinator.cli.output import print_json, report
from hearth.client.answers import Usage
from hearth.errors import BadSetting
from hearth.platform.units import format_seconds


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt to continue; '-' reads it from standard input.", show_default=False)
    ] = None,
    token_ids: Annotated[str | None, typer.Option(help='Prompt as token ids, e.g. "1,2,3"; prints token ids.')] = None,
    stop: Annotated[list[str], typer.Option(help="Stop at this text. Repeatable.")] = [],  # noqa: B006
    *,
    sampling: SamplingOptions,
    answer: AnswerOptions,
    where: HomeOptions,
    as_json: AsJsonOption = False,
) -> None:
    """Generate text with the served model. Ctrl-C stops it."""
    if (prompt is None) == (token_ids is None):
        raise BadSetting(setting="PROMPT", reason="give either a prompt ('-' reads standard input) or --token-ids")
    ids = _read_ids(token_ids) if token_ids is not None else None
    if prompt == "-":
        prompt = sys.stdin.read()
    with where.connect() as home:
        generation = home.generate(prompt, token_ids=ids, stop=stop, **vars(answer), **vars(sampling))
        text = ""
        with generation:
            for token in generation:
                text += token.text
                if as_json:
                    continue
                piece = token.text if ids is None else f"{token.token_id} " if token.token_id is not None else ""
                typer.echo(piece, nl=False)
    assert generation.usage is not None
    if as_json:
        usage = {**generation.usage._asdict(), "tokens_per_second": generation.usage.tokens_per_second}
        print_json({"text": text, "token_ids": generation.token_ids, "usage": usage})
        return
    typer.echo()
    report(f"[dim]{usage_line(generation.usage)}[/]")


def usage_line(usage: Usage) -> str:
    """Token counts, finish reason and rates, in one line."""
    ended = "length limit reached" if usage.finish_reason == "length" else "stopped"
    rate = f", then {usage.tokens_per_second:.1f} tokens/s" if usage.tokens_per_second else ""
    cached = f" ({usage.num_cached_tokens} cached)" if usage.num_cached_tokens else ""
    drafted, accepted = usage.num_drafted_tokens, usage.num_accepted_tokens
    guessed = f" ({accepted} of {drafted} guessed tokens accepted)" if drafted else ""
    return (
        f"{usage.num_prompt_tokens} tokens in{cached}, {usage.num_tokens} out ({ended}); "
        f"first token after {format_seconds(usage.first_token_seconds)}{rate}{guessed}"
    )


def _read_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadSetting(setting="--token-ids", reason=f"'{text}' is not a list of numbers such as 1,2,3") from None
