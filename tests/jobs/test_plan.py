"""Units come out the same whatever row planning starts from, and never exceed their limits."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from jobs.plan import Planner, Row, RowKey, Unit, UnitLimits


def plan(rows: Iterable[Row], limits: UnitLimits, first: int = 0) -> list[Unit]:
    planner = Planner(limits, first)
    units: list[Unit] = []
    for row in rows:
        placement = planner.add(row)
        units.extend(placement.complete)
        assert placement.unit in {len(units) + first, len(units) + first - 1}
    last = planner.close()
    assert planner.close() is None
    return units + ([last] if last else [])


def rows_of(sizes: Iterable[int]) -> list[Row]:
    return [Row(RowKey(number // 10, number), size) for number, size in enumerate(sizes)]


def layout(units: list[Unit]) -> list[list[int]]:
    return [[row.size for row in unit.rows] for unit in units]


def test_small_rows_share_a_unit_across_files() -> None:
    units = plan(rows_of([1] * 25), UnitLimits(rows=20, size=1000))
    assert [len(unit.rows) for unit in units] == [20, 5]
    assert {row.key.input for row in units[0].rows} == {0, 1}


def test_a_large_row_has_a_unit_of_its_own() -> None:
    limits = UnitLimits(rows=256, size=100)
    assert layout(plan(rows_of([10, 10, 500, 10, 100, 60, 41]), limits)) == [[10, 10], [500], [10], [100], [60], [41]]


def test_a_unit_is_complete_as_soon_as_it_is_full() -> None:
    planner = Planner(UnitLimits(rows=2, size=100))
    assert planner.add(Row(RowKey(0, 0), 1)) == (0, ())
    second = planner.add(Row(RowKey(0, 1), 1))
    assert (second.unit, [unit.index for unit in second.complete]) == (0, [0])
    large = planner.add(Row(RowKey(0, 2), 100))
    assert (large.unit, [unit.index for unit in large.complete]) == (1, [1])


@pytest.mark.parametrize("seed", range(20))
def test_limits_hold_and_planning_may_start_at_any_unit(seed: int) -> None:
    dice = random.Random(seed)
    limits = UnitLimits(rows=dice.randint(1, 9), size=dice.randint(50, 300))
    rows = rows_of(dice.choice([0, 1, 20, 50, 299, 300, 301, 5000]) for _ in range(200))
    units = plan(rows, limits)
    assert [row for unit in units for row in unit.rows] == rows
    assert [unit.index for unit in units] == list(range(len(units)))
    for unit in units:
        assert len(unit.rows) <= limits.rows
        assert len(unit.rows) == 1 or sum(row.size for row in unit.rows) <= limits.size
    for begin in dice.sample(units, 10):
        assert plan(rows[rows.index(begin.rows[0]) :], limits, begin.index) == units[begin.index :]


def test_no_rows_no_units() -> None:
    assert plan([], UnitLimits()) == []
