"""Tables of measured kernels."""

from __future__ import annotations

from rich.table import Column, Table

from coordinator.cli.render.tables import make_table, right_column
from coordinator.devices.kernel_tables import KernelTable


def kernel_table(table: KernelTable) -> Table:
    """Milliseconds of each kernel by shape of the matrix and number of rows; a star marks the chosen ones."""
    measured, subject = table.measured_on, table.subject
    options = list(dict.fromkeys((time.layout, time.kernel) for time in table.kernels))
    seconds = {(t.num_outputs, t.num_inputs, t.rows, t.layout, t.kernel): t.seconds for t in table.kernels}
    choices = {(choice.num_outputs, choice.num_inputs): choice for choice in table.choices}
    threads = "1 thread" if measured.num_threads == 1 else f"{measured.num_threads} threads"
    title = f"Kernels for {subject.model.weights} weights on {measured.processor}, {threads} ({measured.device}), ms"
    if subject.deterministic:
        title += ", deterministic"
    headings = [kernel if kernel == layout else f"{layout}\n{kernel}" for layout, kernel in options]
    shown = make_table(
        Column("matrix", no_wrap=True),
        right_column("rows"),
        *map(right_column, headings),
        title=title,
        caption="* chosen",
    )
    previous = None
    for num_outputs, num_inputs, rows in sorted({key[:3] for key in seconds}):
        cells, choice = [], choices.get((num_outputs, num_inputs))
        for option in options:
            key = num_outputs, num_inputs, rows, *option
            text = f"{seconds[key] * 1e3:.3g}" if key in seconds else "-"
            is_chosen = choice is not None and option == (choice.layout, choice.kernel(rows))
            cells.append(f"[green]{text}*[/]" if is_chosen else f"{text} ")
        shape = f"{num_outputs} x {num_inputs}"
        shown.add_row(shape if shape != previous else "", str(rows), *cells)
        previous = shape
    return shown
