"""Standard errors of an ablation's figures, and the paper's directions that they show.

Shape legend: N predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.ablations.tables import Row, Table, TableName, Variant

# A difference counts if it exceeds this number of standard errors.
_NUM_ERRORS: Final = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one run.

    Attributes:
        figures: the means, by name.
        predictions: (N,) what each figure is the mean of; the same ones were asked for, in the
            same order, in all runs.
    """

    figures: Mapping[str, Any]
    predictions: Mapping[str, NDArray[np.float32]]


Results: TypeAlias = Mapping[Variant, Result]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean, over seeds where there are several, and its standard error."""

    mean: float
    error: float


class Estimates:
    """The figures of rows, with the error of sampling and, where it is known, of the seed.

    How much a figure varies between seeds is pooled over all models that were trained with
    several. Without such, it is not in the errors.
    """

    def __init__(self, results: Results) -> None:
        self._results = results

    def of(self, row: Row, figure: str) -> Estimate | None:
        """A row's figure; None where no run of it has that."""
        runs = self._runs(row, figure)
        if not runs:
            return None
        return Estimate(
            mean=fmean(run.figures[figure] for run in runs),
            error=math.hypot(_sampling_error(_mean(runs, figure)), self._seed_error(runs, figure)),
        )

    def difference(self, row: Row, figure: str, other: Row, of_other: str) -> Estimate | None:
        """Return a row's figure minus another's, or minus another figure of the same row.

        Where both were asked the same, they are compared prediction by prediction: what is hard
        for both is no noise.
        """
        one, two = self._runs(row, figure), self._runs(other, of_other)
        if not one or not two:
            return None
        ones, twos = _mean(one, figure), _mean(two, of_other)
        if len(ones) == len(twos):
            sampling = _sampling_error(ones - twos)
        else:
            sampling = math.hypot(_sampling_error(ones), _sampling_error(twos))
        seeds = [self._seed_error(one, figure), self._seed_error(two, of_other)]
        mean = float(ones.mean(dtype=np.float64) - twos.mean(dtype=np.float64))
        return Estimate(mean=mean, error=math.hypot(sampling, *seeds))

    def above_no_model(self, row: Row, accuracy: str) -> Estimate | None:
        """Return a sentence task's accuracy minus the best one that reads no text.

        That is always to give the more frequent label, or to go by the segments' lengths.
        """
        task, estimate = accuracy.split("_")[0], self.of(row, accuracy)
        by_lengths = self.difference(row, accuracy, row, f"{task}_lengths_accuracy")
        if estimate is None or by_lengths is None:
            return None
        majority = self._runs(row, accuracy)[0].figures[f"{task}_majority"]
        by_label = Estimate(mean=estimate.mean - majority, error=estimate.error)
        return min(by_lengths, by_label, key=lambda each: each.mean)

    def seed_variance(self, figure: str) -> float:
        """Return the variance of a figure over seeds; 0 if no model was trained with several."""
        groups: dict[tuple[object, ...], list[float]] = {}
        for each, run in self._results.items():
            if figure in run.figures and each.num_steps > 1:
                key = (each.sharing, each.embedding_size, each.sentence_task, each.num_steps)
                groups.setdefault(key, []).append(run.figures[figure])
        several = [group for group in groups.values() if len(group) > 1]
        degrees = sum(len(group) - 1 for group in several)
        if not degrees:
            return 0.0
        return sum(variance(group) * (len(group) - 1) for group in several) / degrees

    def _runs(self, row: Row, figure: str) -> list[Result]:
        runs = [self._results[each] for each in row.variants if each in self._results]
        return [run for run in runs if figure in run.predictions]

    def _seed_error(self, runs: Sequence[Result], figure: str) -> float:
        return math.sqrt(self.seed_variance(figure) / len(runs))


def _mean(runs: Sequence[Result], figure: str) -> NDArray[np.float32]:
    """Each prediction (N,), over runs with different seeds."""
    mean: NDArray[np.float32] = np.mean([run.predictions[figure] for run in runs], axis=0)
    return mean


def _sampling_error(values: NDArray[np.float32]) -> float:
    return float(values.std(dtype=np.float64)) / math.sqrt(len(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """Something that the paper found: one row does better than another, or no better.

    Attributes:
        table: the name of their table.
        better: label of the row that is better in the paper.
        worse: label of the other row; None to compare with a guess that needs no model.
        expects: whether the paper found a difference to speak of.
    """

    claim: str
    table: TableName
    figure: str
    better: str
    worse: str | None = None
    expects: bool = True


_DIRECTIONS: Final = (
    Direction(
        claim="SOP-trained can tell SOP (86.5 % in the paper)",
        table="sentence",
        figure="sop_head_accuracy",
        better="sop trained",
    ),
    Direction(
        claim="NSP-trained can tell NSP (90.5 %)",
        table="sentence",
        figure="nsp_head_accuracy",
        better="nsp trained",
    ),
    Direction(
        claim="SOP-trained can tell NSP (78.9 %)",
        table="sentence",
        figure="nsp_head_accuracy",
        better="sop trained",
    ),
    Direction(
        claim="NSP-trained cannot tell SOP (52.0 %)",
        table="sentence",
        figure="sop_head_accuracy",
        better="nsp trained",
        expects=False,
    ),
    Direction(
        claim="SOP-trained knows more of SOP than NSP-trained, by a probe",
        table="sentence",
        figure="sop_probe_accuracy",
        better="sop trained",
        worse="nsp trained",
    ),
    Direction(
        claim="NSP-trained knows more of NSP than SOP-trained, by a probe",
        table="sentence",
        figure="nsp_probe_accuracy",
        better="nsp trained",
        worse="sop trained",
    ),
    Direction(
        claim="masked tokens suffer from SOP (54.0 against 54.9 %)",
        table="sentence",
        figure="masked_accuracy",
        better="none trained",
        worse="sop trained",
    ),
    Direction(
        claim="sharing all costs (80.1 against 81.6)",
        table="sharing",
        figure="masked_loss",
        better="nothing shared",
        worse="all shared",
    ),
    Direction(
        claim="sharing the FFN costs (80.2 against 81.6)",
        table="sharing",
        figure="masked_loss",
        better="nothing shared",
        worse="FFN shared",
    ),
    Direction(
        claim="sharing attention does not cost (81.7 against 81.6)",
        table="sharing",
        figure="masked_loss",
        better="nothing shared",
        worse="attention shared",
        expects=False,
    ),
    Direction(
        claim="sharing the FFN costs more than sharing attention (80.2 against 81.7)",
        table="sharing",
        figure="masked_loss",
        better="attention shared",
        worse="FFN shared",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A direction as it came out here.

    Attributes:
        ahead: lead of the paper's better row; negative if it is behind.
    """

    direction: Direction
    ahead: Estimate

    @property
    def verdict(self) -> str:
        """The comparison with the paper, in words."""
        limit = _NUM_ERRORS * self.ahead.error
        if not self.direction.expects:
            return "does not reproduce" if self.ahead.mean > limit else "no better here either"
        if self.ahead.mean > limit:
            return "reproduces"
        if self.ahead.mean < -limit and self.direction.worse is not None:
            return "the reverse"
        return "not seen here"


def find_directions(tables: Sequence[Table], results: Results) -> list[Finding]:
    """The paper's directions, as far as there are results."""
    estimates = Estimates(results)
    findings: list[Finding] = []
    for direction in _DIRECTIONS:
        rows = {
            row.label: row
            for table in tables
            if table.name == direction.table
            for row in table.rows
        }
        if not rows:
            continue
        ahead = _ahead(direction, rows, estimates)
        if ahead is not None:
            findings.append(Finding(direction=direction, ahead=ahead))
    return findings


def _ahead(direction: Direction, rows: Mapping[str, Row], estimates: Estimates) -> Estimate | None:
    row, figure = rows[direction.better], direction.figure
    if direction.worse is None:
        return estimates.above_no_model(row, figure)
    if figure == "masked_loss":
        return estimates.difference(rows[direction.worse], figure, row, figure)
    return estimates.difference(row, figure, rows[direction.worse], figure)
