"""Reader of a run's records: the lines of `training.loop.metrics`, and `run.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from training.errors import TrainingError

XAxis = Literal["steps", "tokens", "hours"]
_X_FIGURES: Final[dict[XAxis, str]] = {"steps": "step", "tokens": "tokens", "hours": "elapsed_s"}
_Values = NDArray[np.float64]


class RecordError(TrainingError):
    """A run whose records cannot be read or drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """The recorded metrics of one run.

    Attributes:
        name: the folder's name.
        lines: of `metrics.jsonl`, in order.
        unigram_entropy: of its corpus in nats; None where `run.json` lacks it.
    """

    name: str
    lines: Sequence[Mapping[str, Any]]
    unigram_entropy: float | None

    def curve(self, figure: str, x: XAxis) -> tuple[_Values, _Values]:
        """Return x and y of a figure's points, (P,) each; empty where the run lacks the figure.

        Raises:
            RecordError: the run does not record the x axis.
        """
        steps, values = self._points(figure)
        known_steps, known = self._points(_X_FIGURES[x])
        if not len(known):
            raise RecordError(f"{self.name} records no {_X_FIGURES[x]}; give --x steps")
        # A line may lack the tokens or seconds of its step; they are interpolated.
        positions = np.interp(steps, known_steps, known)
        return (positions / 3600 if x == "hours" else positions), values

    def _points(self, figure: str) -> tuple[_Values, _Values]:
        lines = [line for line in self.lines if line.get(figure) is not None]
        points = np.array([(line["step"], line[figure]) for line in lines], np.float64)
        points = points.reshape(-1, 2)
        finite = points[np.isfinite(points).all(1)]
        return finite[:, 0], finite[:, 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLayers:
    """The recorded layer similarities of one run.

    Attributes:
        name: the folder's name.
        steps: (P,) steps of the measurements.
        distance: (P, L) L2 distance of each layer's input and output.
        angle_degrees: (P, L) the angle between them.
    """

    name: str
    steps: _Values
    distance: _Values
    angle_degrees: _Values


def read_run(folder: Path) -> RecordedRun:
    """Read the metrics of a run, which may still be training.

    A truncated last line is ignored: the run is writing it, or was killed.

    Raises:
        RecordError: the folder is not a run's, or its metrics are empty or damaged.
    """
    file = folder / "metrics.jsonl"
    return RecordedRun(
        name=folder.resolve().name,
        lines=_read_lines(file, _are_numbers, "numbers by name, with a step"),
        unigram_entropy=_read_entropy(folder / "run.json"),
    )


def read_layers(folder: Path) -> RecordedLayers:
    """Read how far each layer of a run moved its embeddings.

    Raises:
        RecordError: as `read_run`.
    """
    file = folder / "layers.jsonl"
    records = _read_lines(file, _are_layers, "a step, distance and angle_degrees of each layer")
    if len({len(record["distance"]) for record in records}) > 1:
        raise RecordError(f"{file}: its lines are of models with different numbers of layers")
    return RecordedLayers(
        name=folder.resolve().name,
        steps=np.array([record["step"] for record in records], np.float64),
        distance=np.array([record["distance"] for record in records], np.float64),
        angle_degrees=np.array([record["angle_degrees"] for record in records], np.float64),
    )


_Recorded = TypeVar("_Recorded", RecordedRun, RecordedLayers)


def with_paths_for_names(records: Sequence[_Recorded], folders: Sequence[Path]) -> list[_Recorded]:
    """Return the records, named by their paths if two folders have the same name."""
    if len({record.name for record in records}) == len(records):
        return list(records)
    return [
        replace(record, name=str(folder)) for record, folder in zip(records, folders, strict=True)
    ]


def _read_lines(
    file: Path, is_whole: Callable[[Mapping[str, Any]], bool], content: str
) -> list[dict[str, Any]]:
    if not file.is_file():
        raise RecordError(f"{file.parent} has no {file.name}; give the --output folder of a run")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RecordError(f"{file} line {number} is not JSON: {error}; delete it") from error
        if not isinstance(record, dict) or not _is_number(record.get("step")):
            raise RecordError(f"{file} line {number} has no step; delete it")
        if not is_whole(record):
            raise RecordError(f"{file} line {number} must hold {content}; delete it")
        records.append(record)
    if not records:
        raise RecordError(f"{file} is empty: the run has recorded nothing yet")
    return records


def _are_numbers(record: Mapping[str, Any]) -> bool:
    return all(value is None or _is_number(value) for value in record.values())


def _are_layers(record: Mapping[str, Any]) -> bool:
    distance, angle = record.get("distance"), record.get("angle_degrees")
    if not isinstance(distance, list) or not isinstance(angle, list):
        return False
    are_numbers = all(value is None or _is_number(value) for value in [*distance, *angle])
    return are_numbers and len(distance) == len(angle) > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _read_entropy(file: Path) -> float | None:
    if not file.is_file():
        return None
    try:
        entropy = json.loads(file.read_bytes()).get("unigram_entropy")
    except (ValueError, AttributeError) as error:
        raise RecordError(f"{file} is not what a run writes: {error}") from error
    return float(entropy) if _is_number(entropy) else None
