"""`albert-serve score`: answer every row of files."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, get_args

from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.cli.options import add_model_options, chosen, one_bundle, serving_parser
from albert_serve.errors import AlbertServeError, ConfigError, InvalidInputError, how_to_install
from albert_serve.files import write_atomically
from albert_serve.scoring.errors import LockedOutputError, OutputError, StoppedError, writing
from albert_serve.scoring.options import PART_ROWS, ScoreOptions
from albert_serve.settings import Settings
from albert_serve.tables.formats import WRITTEN_FORMATS, Format
from albert_serve.tasks import TASKS
from albert_serve.tasks.text_length import TRUNCATION_HELP

_SCORE_EXAMPLES: Final = """\
examples:
  albert-serve score --task text-classification reviews.jsonl scored.jsonl
  albert-serve score --task text-classification --column text=review --keep id in.csv out.parquet
  albert-serve score --task question-answering --parameters '{"top_k": 3}' in.jsonl.gz out.jsonl.gz
  albert-serve score --task feature-extraction --parameters '{"normalize": true}' 'logs/*.csv' out/
  albert-serve score --task fill-mask - - < in.jsonl > out.jsonl

Input and output are CSV, TSV, JSONL or Parquet, by their names (.csv, .jsonl.gz, ...; also .bz2,
.xz, .zst). Columns have the names of the task's fields (text, text_pair, question, context,
sentences) or the names that finetune recognises (sentence, premise, ...). A row of JSONL can also
be a request: {"inputs": ..., "parameters": ...}. The output has the rows of the input, in order,
with the columns of the answer. A row that fails has an "error" and an "error_type" instead.

The output appears when it is complete. Until then, its parts are in OUTPUT.parts. To resume an
interrupted job, repeat the command. If OUTPUT is a folder (OUTPUT/), it contains the parts. The
job writes to a pipe, a device or - immediately.

exit status: 0 done; 1 invalid options, model or input, or no row was answered; 2 invalid command
line; 3 too many error rows; 4 the parts are of another job (--restart); 5 another job writes to
the output; 7 the output cannot be written; 130 interrupted; 143 stopped by SIGTERM.
After 5, 7, 130 and 143, repeat the command to continue.
"""


def score_parser(purpose: str) -> argparse.ArgumentParser:
    """Return the parser of the command. Many option names are fields of `ScoreOptions`."""
    score = serving_parser("score", purpose, _SCORE_EXAMPLES)
    score.add_argument("--task", required=True, choices=list(TASKS), help="task (required)")
    score.add_argument(
        "--parameters",
        type=_json_object,
        default={},
        metavar="JSON",
        help="task parameters for every row, such as '{\"top_k\": 3}'",
    )
    score.add_argument(
        "--head", metavar="NAME", help="classifier, if the model has several (default: the model's)"
    )
    score.add_argument(
        "--all-scores",
        action="store_true",
        help="return the scores of all labels (default: only the best; text classification)",
    )
    score.add_argument(
        "--truncation", action=argparse.BooleanOptionalAction, default=True, help=TRUNCATION_HELP
    )
    _add_columns(score.add_argument_group("columns and formats"))
    _add_job(score.add_argument_group("the job"))
    add_model_options(score)
    score.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="input files, globs or folders; - for stdin"
    )
    score.add_argument(
        "output", metavar="OUTPUT", help="output file or folder (OUTPUT/); - for stdout"
    )
    score.set_defaults(run=_score)
    return score


def _add_columns(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--column",
        dest="columns",
        action="append",
        type=_column,
        default=[],
        metavar="FIELD=COLUMN",
        help="column with a field of the task, such as text=review",
    )
    group.add_argument(
        "--keep",
        action="extend",
        type=_names,
        metavar="COLUMNS",
        help="input columns to keep in the output, separated by commas; '' for none (default: all)",
    )
    group.add_argument(
        "--input-format",
        choices=get_args(Format),
        help="input format (default: from the file name; jsonl for stdin)",
    )
    group.add_argument(
        "--output-format",
        choices=WRITTEN_FORMATS,
        help="output format (default: from the file name; jsonl for stdout)",
    )
    group.add_argument(
        "--delimiter",
        metavar="CHARACTER",
        help="delimiter of CSV and TSV input (default: CSV: detected from the header; TSV: a tab)",
    )
    group.add_argument(
        "--no-quotes",
        dest="has_quotes",
        action="store_false",
        help="read quotes in CSV and TSV input as ordinary characters",
    )
    group.add_argument(
        "--shard",
        type=_shard,
        default=(0, 1),
        metavar="I/N",
        help="score only every N-th file, starting with file I, counted from 0 (default: all)",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('it must be a JSON object, such as {"top_k": 3}')
    return value


def _column(text: str) -> tuple[str, str]:
    field, _, column = text.partition("=")
    if not (field and column):
        raise argparse.ArgumentTypeError(f"{text!r} must be FIELD=COLUMN, as in text=review")
    return field, column


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be I/N, such as 0/8 for the first of eight"
        )
    return int(index), int(count)


def _add_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--errors",
        choices=("keep", "fail"),
        default="keep",
        help="keep rows that cannot be answered, or end the job (default: %(default)s)",
    )
    group.add_argument(
        "--max-errors",
        type=int,
        metavar="N",
        help="end the job after more than N error rows (default: never)",
    )
    group.add_argument(
        "--part-rows",
        type=int,
        default=PART_ROWS,
        metavar="N",
        help="maximum number of rows in a part (default: %(default)s)",
    )
    group.add_argument(
        "--restart", action="store_true", help="discard existing parts and start over"
    )
    group.add_argument(
        "--summary", type=Path, metavar="FILE", help="file for counts and rates as JSON"
    )


def _score(options: argparse.Namespace) -> int:
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"score needs pyarrow. Run {how_to_install('score')}.") from error
    from albert_serve.scoring.job import is_stdout, output_path, score_files
    from albert_serve.scoring.local import LocalScorer

    score_options, output = read_score_options(options), output_path(options.output)
    with _summary_file(options) as write_summary:
        settings = Settings.from_environment(chosen(options))
        scorer = LocalScorer.open(one_bundle(settings), options.task, settings.job_runtime)
        with _signals(output) as is_terminated:
            summary = score_files(
                scorer, options.inputs, options.output, score_options, is_stopped=is_terminated
            )
        write_summary({"status": "complete", **summary.as_json()})
    # If rows go to standard output, the summary goes to stderr.
    stream = sys.stderr if is_stdout(output) else sys.stdout
    print(f"{output}: {summary}", *summary.long_texts(), sep="\n", file=stream)
    if summary.num_errors and summary.num_errors == summary.num_rows:
        raise InvalidInputError(
            f"No row of {', '.join(options.inputs)} was answered. The first error: "
            f"{summary.first_error}"
        )
    return 0


def read_score_options(options: argparse.Namespace) -> ScoreOptions:
    """Return the job's options."""
    values = {field.name: getattr(options, field.name) for field in fields(ScoreOptions)}
    values["columns"] = dict(options.columns)
    if options.head is not None:
        if options.task != CLASSIFICATION:
            raise ConfigError(f"--head requires --task {CLASSIFICATION}, not {options.task}.")
        other_head = options.parameters.get("head", options.head)
        if other_head != options.head:
            raise ConfigError(
                f"--head is {options.head}, but --parameters has head {other_head!r}. Pass one of "
                "them."
            )
        values["parameters"] = {**options.parameters, "head": options.head}
    if options.all_scores:
        if options.task != CLASSIFICATION or "top_k" in options.parameters:
            raise ConfigError(
                f"--all-scores requires --task {CLASSIFICATION}, without top_k in --parameters."
            )
        values["parameters"] = {**values["parameters"], "top_k": None}
    return ScoreOptions(**values)


@contextmanager
def _summary_file(options: argparse.Namespace) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes a complete job's summary, and write a failed job's summary."""
    file: Path | None = options.summary
    if file is None:
        yield lambda summary: None
        return
    from albert_serve.scoring.paths import check_local

    check_local(file)
    if file.is_dir():
        raise ConfigError(f"--summary {file} is a folder. Pass a file.")
    if file.resolve() in {Path(name).resolve() for name in (*options.inputs, options.output)}:
        raise ConfigError(f"--summary {file} is also an input or the output. Pass another file.")
    file = file.resolve()  # so that a link is not replaced
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)

    def write(result: dict[str, Any]) -> None:
        job = {"task": options.task, "inputs": options.inputs, "output": options.output}
        with writing(file):
            write_atomically(file, json.dumps({**result, **job}, indent=1).encode() + b"\n")

    try:
        yield write
    except LockedOutputError:
        raise  # the other job writes the summary
    except (AlbertServeError, OSError) as error:
        status = "stopped" if isinstance(error, StoppedError) else "failed"
        with suppress(OutputError):
            write({"status": status, "error": str(error)})
        raise


@contextmanager
def _signals(output: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that reports whether SIGTERM came. A second SIGTERM ends the process.

    If a reader closes the standard output, like `head`, the process ends without a message.
    """
    from albert_serve.scoring.job import is_stdout

    terminated = threading.Event()

    def stop(number: int, frame: Any) -> None:
        terminated.set()
        signal.signal(number, signal.SIG_DFL)
        print("Stopping after this part. A second SIGTERM stops immediately.", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield terminated.is_set
        return
    previous_handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    if is_stdout(output):
        previous_handlers[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield terminated.is_set
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
