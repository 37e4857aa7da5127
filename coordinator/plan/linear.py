"""Linear and integer programs, built row by row and solved by HiGHS. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import highspy
import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
_INFINITY = highspy.kHighsInf


class LinearProgram:
    """The constraints of a program with non-negative variables. A row maps variable indices to coefficients."""

    def __init__(self, num_variables: int) -> None:
        self._num_variables = num_variables
        self._starts, self._columns, self._values = [0], list[int](), list[float]()
        self._lower, self._upper = list[float](), list[float]()

    def add_at_least(self, row: Mapping[int, float], value: float) -> None:
        self.add_between(row, value, _INFINITY)

    def add_at_most(self, row: Mapping[int, float], value: float) -> None:
        self.add_between(row, -_INFINITY, value)

    def add_equal(self, row: Mapping[int, float], value: float) -> None:
        self.add_between(row, value, value)

    def add_between(self, row: Mapping[int, float], lower: float, upper: float) -> None:
        self._columns += row.keys()
        self._values += row.values()
        self._starts.append(len(self._columns))
        self._lower.append(lower)
        self._upper.append(upper)

    def minimise(
        self, cost: Vector, upper: Vector, integer: bool = False, time_limit_seconds: float = _INFINITY
    ) -> Vector:
        """The values between 0 and `upper` with the least cost.

        Solved on one thread, so that results repeat. Raises ValueError if the program is infeasible, or if the optimum is
        not proven within the time limit.
        """
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self._num_variables, len(self._lower)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(self._num_variables), upper
        lp.row_lower_, lp.row_upper_ = np.array(self._lower), np.array(self._upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(self._columns, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self._values)
        if integer:
            lp.integrality_ = [highspy.HighsVarType.kInteger] * self._num_variables
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", time_limit_seconds)
        solver.passModel(lp)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise ValueError("the program has no solution, or its optimum was not proven in time")
        return np.array(solver.getSolution().col_value)
