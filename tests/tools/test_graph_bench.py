"""Tables of the graph benchmark: intervals, gains over paired rounds, and wrong outputs."""

from __future__ import annotations

from tools.bench.graphs import Served, predicts_gain, summarise_served


def served(
    label: str,
    seconds: tuple[float, ...],
    predicted: float,
    devices: int = 1,
    wire: str = "exact",
    difference: float = 0.0,
) -> Served:
    return Served.model_validate(
        {
            "label": label, "strategy": "moirai" if devices > 1 else "local", "wire": wire, "mbit": 60.0,
            "devices": tuple(f"d{index}" for index in range(devices)), "segments": devices,
            "predicted_seconds": predicted, "stage_seconds": (predicted,) * devices,
            "rounds": [{"seconds": each, "answers": 10, "difference": difference} for each in seconds],
        }
    )  # fmt: skip


def test_gain_is_paired() -> None:
    one = served("one device", (0.2, 0.4, 0.22), 0.21)
    slow, fast = served("exact", (0.11, 0.21, 0.12), 0.12, 3), served("int8", (0.08, 0.16, 0.088), 0.085, 3)
    (table,) = summarise_served("a title", [one, slow, fast]).tables
    gains = [row[table.columns.index("times one device's")] for row in table.rows]
    assert gains == ["1.00 [1.00, 1.00]", "1.83 [1.82, 1.90]", "2.50 [2.50, 2.50]"]


def test_gain_is_predicted_of_several_devices_only() -> None:
    one = served("one device", (1.0,), 1.0)
    assert predicts_gain(one, served("moirai", (1.0,), 0.7, 2))
    assert not predicts_gain(one, served("moirai", (1.0,), 0.999, 2))
    assert not predicts_gain(one, served("moirai", (1.0,), 0.7))


def test_wrong_answers_are_reported() -> None:
    assert not summarise_served("", [served("one device", (1.0,), 1.0, difference=1e-6)]).failure
    assert summarise_served("", [served("one device", (1.0,), 1.0, difference=1e-2)]).failure
    assert not summarise_served("", [served("one device", (1.0,), 1.0, difference=1e-2, wire="int8")]).failure


def test_table_has_a_row_for_each_plan() -> None:
    (table,) = summarise_served("a title", [served("one device", (1.0,), 0.9), served("two", (0.5,), 0.5, 2)]).tables
    assert [row[0] for row in table.rows] == ["one device", "two"]
    assert "-10.0%" in table.rows[0]
    assert {len(row) for row in table.rows} == {len(table.columns)}
