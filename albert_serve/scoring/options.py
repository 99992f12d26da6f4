"""The options of a job, and its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from pydantic import NonNegativeInt

from albert_serve.errors import ConfigError, TextTooLongError
from albert_serve.tables.formats import Format
from albert_serve.tasks.text_length import describe_long_texts

PART_ROWS: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOptions:
    """The options of a job.

    Attributes:
        parameters: the task's, for all rows; a row's own take precedence.
        truncation: whether long texts are truncated, where no parameter says it; otherwise their
            rows are in error.
        columns: the columns that hold the task's fields, where they have other names.
        keep: the columns of the input that the output keeps; None for all.
        errors: whether rows that cannot be answered are kept, with the error, or end the job.
        max_errors: the limit of rows that are kept with an error; None for none.
        part_rows: the limit of a part's rows.
        restart: whether the job begins again, whatever parts there are.
        input_format: of all inputs, whatever their names.
        output_format: of the output, whatever its name.
        has_quotes: whether fields of CSV and TSV are quoted, as in RFC 4180.
        delimiter: of CSV and TSV, one character; None to detect it.
        shard: (i, n) scores the files i, i + n, ... of the input only.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    truncation: bool = True
    columns: Mapping[str, str] = field(default_factory=dict)
    keep: Sequence[str] | None = None
    errors: Literal["keep", "fail"] = "keep"
    max_errors: int | None = None
    part_rows: int = PART_ROWS
    restart: bool = False
    input_format: Format | None = None
    output_format: Format | None = None
    has_quotes: bool = True
    delimiter: str | None = None
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if self.part_rows < 1:
            raise ConfigError(f"part_rows is {self.part_rows}; it must be 1 or more")
        if self.max_errors is not None and self.max_errors < 0:
            raise ConfigError(f"max_errors is {self.max_errors}; it must be 0 or more")
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise ConfigError(f"the delimiter is {self.delimiter!r}; give one character, as ';'")
        index, count = self.shard
        if not 0 <= index < count:
            raise ConfigError(f"the shard is {index} of {count}; it must be 0 to {count - 1}")

    @property
    def error_limit(self) -> int | None:
        """The rows with errors that do not end the job; None for any number."""
        return 0 if self.errors == "fail" else self.max_errors


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts of rows.

    Attributes:
        num_tokens: the tokens that were computed.
        num_truncated: rows whose texts were truncated.
        first_error: the message of the first row with an error.
    """

    num_rows: NonNegativeInt = 0
    num_errors: NonNegativeInt = 0
    num_tokens: NonNegativeInt = 0
    num_truncated: NonNegativeInt = 0
    errors_by_type: dict[str, int] = field(default_factory=dict)
    first_error: str | None = None

    def add(self, other: Counts) -> None:
        """Add the counts of more rows."""
        self.num_rows += other.num_rows
        self.num_errors += other.num_errors
        self.num_tokens += other.num_tokens
        self.num_truncated += other.num_truncated
        self.errors_by_type = dict(Counter(self.errors_by_type) + Counter(other.errors_by_type))
        self.first_error = self.first_error or other.first_error


@dataclass(kw_only=True, slots=True)
class ScoreSummary(Counts):
    """The counts of a job's rows, of earlier runs too, and the rates of this run.

    Attributes:
        text_length: the maximum tokens of a text, over which it was truncated or in error.
        num_resumed_rows: rows that an earlier run of the job had answered.
        num_run_tokens: tokens that this run computed.
        num_parts: the parts of the output.
        duration_s: the time of this run.
    """

    text_length: int = 0
    num_resumed_rows: int = 0
    num_run_tokens: int = 0
    num_parts: int = 0
    duration_s: float = 0.0

    @property
    def rows_per_s(self) -> float:
        """The rows that this run answered in a second."""
        return self._per_s(self.num_rows - self.num_resumed_rows)

    @property
    def tokens_per_s(self) -> float:
        """The tokens that this run computed in a second."""
        return self._per_s(self.num_run_tokens)

    def __str__(self) -> str:
        notes = f"{self.num_rows} rows, {self.num_errors} with errors"
        if self.num_resumed_rows:
            notes += f", {self.num_resumed_rows} from an earlier run"
        return f"{notes}, in {self.duration_s:.1f} s ({self.rows_per_s:.1f} rows/s)"

    def long_texts(self) -> list[str]:
        """Return the lines about rows whose texts were too long."""
        num_omitted = self.errors_by_type.get(TextTooLongError.error_type, 0)
        counts = {True: self.num_truncated, False: num_omitted}
        return [
            describe_long_texts(count, self.num_rows, self.text_length, truncation=truncation)
            for truncation, count in counts.items()
            if count
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        values = asdict(self)
        del values["num_run_tokens"]
        return {
            **values,
            "duration_s": round(self.duration_s, 3),
            "rows_per_s": round(self.rows_per_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
        }

    def _per_s(self, count: int) -> float:
        return count / self.duration_s if self.duration_s else 0.0
