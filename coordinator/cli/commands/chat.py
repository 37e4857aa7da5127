"""`hearth chat`: a conversation with the model that this home serves."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from coordinator.cli import options
from coordinator.cli.commands.generate import usage_line
from coordinator.cli.output import err, report
from hearth.client.answers import Generation
from hearth.client.sync import connect
from hearth.errors import HearthError
from hearth.wire.messages import ChatMessage

_HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C ends an answer"


def chat(
    system: Annotated[str | None, typer.Option(help="System message: instructions before the conversation.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    timeout: options.AnswerTimeout = 600.0,
    address: options.Address = None,
    mdns_interfaces: options.Interfaces = None,
    key: options.KeyPath = None,
) -> None:
    """Talk with the model that this home serves; it must have a chat template."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input() has a history and editing with it)
    beginning = [ChatMessage(role="system", content=system)] if system else []
    history = list(beginning)
    with connect(address, key, interfaces=options.interface_list(mdns_interfaces)) as home:
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
                    answer = home.generate(
                        messages=[*history, question], max_tokens=max_tokens, temperature=temperature, top_k=top_k,
                        top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed, timeout_seconds=timeout,
                    )  # fmt: skip
                    text = _print_answer(answer)
                except HearthError as error:  # this question gets no answer; the next one may
                    report(f"\n[red]error:[/] {error.explanation()} {error.next_step()}")
                    continue
                if text:
                    history += [question, ChatMessage(role="assistant", content=text)]


def _read_line() -> str | None:
    """What the person says; None when they have left."""
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            typer.echo()
            return None
        except KeyboardInterrupt:
            typer.echo()


def _print_answer(answer: Generation) -> str:
    """Print it as it comes, up to its end or Ctrl-C. Returns what was printed."""
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
