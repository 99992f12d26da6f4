"""The options and the summary of a job."""

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
        parameters: task parameters for every row. Parameters of a row take precedence.
        truncation: whether long texts are truncated. Otherwise, their rows fail. A parameter of the
            same name takes precedence.
        columns: input column of each field of the task (default: the column with the field's name).
        keep: input columns to keep in the output (default: all).
        errors: "keep" to keep failed rows with their errors, or "fail" to end the job.
        max_errors: maximum number of rows that may fail (default: unlimited).
        part_rows: maximum number of rows in a part.
        restart: whether existing parts are discarded.
        input_format: input format (default: from each file name).
        output_format: output format (default: from the file name).
        has_quotes: whether fields of CSV and TSV can be quoted, as in RFC 4180.
        delimiter: delimiter of CSV and TSV, one character (default: detected).
        shard: (i, n) to score only every n-th input file, starting with file i.
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
            raise ConfigError(f"part_rows is {self.part_rows}. It must be 1 or more.")
        if self.max_errors is not None and self.max_errors < 0:
            raise ConfigError(f"max_errors is {self.max_errors}. It must be 0 or more.")
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise ConfigError(f"delimiter is {self.delimiter!r}. Use one character, such as ';'.")
        index, count = self.shard
        if not 0 <= index < count:
            raise ConfigError(f"shard is {index} of {count}. It must be 0 to {count - 1}.")

    @property
    def error_limit(self) -> int | None:
        """The maximum number of rows that may fail, or None if it is unlimited."""
        return 0 if self.errors == "fail" else self.max_errors


@dataclass(kw_only=True, slots=True)
class Counts:
    """The counts of a part or a job.

    Attributes:
        num_errors: number of rows that failed.
        num_tokens: number of tokens that were computed.
        num_truncated: number of rows whose texts were truncated.
        errors_by_type: number of rows that failed, by error type.
        first_error: error message of the first row that failed.
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
    """Counts of all rows of a job, including previous runs, and the throughput of this run.

    Attributes:
        text_length: maximum number of tokens in a text. Longer texts are truncated or fail.
        num_resumed_rows: number of rows that a previous run of the job answered.
        num_run_tokens: number of tokens that this run computed.
        num_parts: number of parts of the output.
        duration_s: duration of this run, in seconds.
    """

    text_length: int = 0
    num_resumed_rows: int = 0
    num_run_tokens: int = 0
    num_parts: int = 0
    duration_s: float = 0.0

    @property
    def rows_per_s(self) -> float:
        """The number of rows that this run answered per second."""
        return self._per_s(self.num_rows - self.num_resumed_rows)

    @property
    def tokens_per_s(self) -> float:
        """The number of tokens that this run computed per second."""
        return self._per_s(self.num_run_tokens)

    def __str__(self) -> str:
        notes = f"{self.num_rows} rows, {self.num_errors} with errors"
        if self.num_resumed_rows:
            notes += f", {self.num_resumed_rows} from an earlier run"
        return f"{notes}, in {self.duration_s:.1f} s ({self.rows_per_s:.1f} rows/s)"

    def long_texts(self) -> list[str]:
        """Return one line about truncated and one about omitted texts, if there are any."""
        num_omitted = self.errors_by_type.get(TextTooLongError.error_type, 0)
        counts = {True: self.num_truncated, False: num_omitted}
        return [
            describe_long_texts(count, self.num_rows, self.text_length, truncation=truncation)
            for truncation, count in counts.items()
            if count
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
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
