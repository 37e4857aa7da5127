"""`hearth chat`: a conversation with the served model."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from coordinator.cli.commands.generate import usage_line
from coordinator.cli.options import AnswerOptions, HomeOptions, SamplingOptions
from coordinator.cli.output import err, report
from hearth.client.answers import Generation
from hearth.errors import HearthError
from hearth.wire.messages import ChatMessage

_HELP = "/reset starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops the answer"


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
