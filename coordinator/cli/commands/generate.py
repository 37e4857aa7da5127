"""`hearth generate` and `hearth chat`: continue a prompt or a conversation, and print tokens as they arrive."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from coordinator.cli.options import AnswerOptions, AsJsonOption, HomeOptions, SamplingOptions
from coordinator.cli.output import err, print_json, report
from hearth.client.answers import Generation, Usage
from hearth.errors import BadSetting, HearthError
from hearth.platform.units import format_seconds
from hearth.wire.messages import ChatMessage

_HELP = "/reset starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops the answer"


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


def chat(
    system: Annotated[str | None, typer.Option(help="System message: instructions for the model.")] = None,
    *,
    sampling: SamplingOptions,
    answer: AnswerOptions,
    where: HomeOptions,
) -> None:
    """Chat with the served model, which must have a chat template."""
    with suppress(ImportError):
        import readline  # noqa: F401 (gives input() line editing and a history)
    beginning = [ChatMessage(role="system", content=system)] if system else []
    history = list(beginning)
    with where.connect() as home:
        err.print(f"[dim]{_HELP}[/]")
        while (line := _read_line()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                history = list(beginning)
            elif line.startswith("/"):
                err.print(f"[dim]{_HELP}[/]")
            elif line:
                question = ChatMessage(role="user", content=line)
                try:
                    text = _print_answer(home.generate(messages=[*history, question], **vars(answer), **vars(sampling)))
                except HearthError as error:  # only this question failed: the conversation goes on
                    report(f"\n[red]error:[/] {error.explanation()} {error.next_step()}")
                    continue
                if text:
                    history += [question, ChatMessage(role="assistant", content=text)]


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


def _read_line() -> str | None:
    """Read one stripped line; Ctrl-C discards it. None at the end of input (Ctrl-D)."""
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            typer.echo()
            return None
        except KeyboardInterrupt:
            typer.echo()


def _print_answer(answer: Generation) -> str:
    """Print tokens as they arrive, until the answer ends or Ctrl-C. Returns the printed text."""
    text = ""
    with answer:
        try:
            for token in answer:
                text += token.text
                typer.echo(token.text, nl=False)
        except KeyboardInterrupt:
            pass
    typer.echo()
    if answer.usage is not None:
        report(f"[dim]{usage_line(answer.usage)}[/]")
    return text
