"""`albert-serve score`: answer every row of files."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, get_args

from albert_serve.bundle.weights import CLASSIFICATION
from albert_serve.cli.options import add_command, add_model_options, chosen, one_bundle
from albert_serve.errors import AlbertServeError, ConfigError, InvalidInputError
from albert_serve.files import write_atomically
from albert_serve.models_file import store_tag
from albert_serve.scoring.answering import PART_ROWS
from albert_serve.scoring.answers import SCORED_TASKS
from albert_serve.scoring.distributed.model import WorkerModel
from albert_serve.scoring.distributed.ray_workers import RayScorer
from albert_serve.scoring.errors import LockedOutputError, StoppedError
from albert_serve.scoring.formats import STDOUT, Format, is_stdout
from albert_serve.scoring.job import score_files
from albert_serve.scoring.local import LocalScorer, Scorer
from albert_serve.scoring.options import ScoreOptions, ScoreSummary
from albert_serve.scoring.output.parts import writing
from albert_serve.scoring.remote import NUM_CONCURRENT, WAIT_S, RemoteScorer
from albert_serve.settings import Settings

_SCORE_EXAMPLES: Final = """\
examples:
  albert-serve score --task text-classification reviews.jsonl scored.jsonl
  albert-serve score --task text-classification --column text=review --keep id in.csv out.parquet
  albert-serve score --task question-answering --parameters '{"top_k": 3}' in.jsonl.gz out.jsonl.gz
  albert-serve score --task feature-extraction --parameters '{"normalize": true}' 'logs/*.csv' out/
  albert-serve score --task fill-mask --server http://albert:3000 - - < in.jsonl > out.jsonl
  albert-serve score --task fill-mask --engine ray --ray-address auto in.parquet out.parquet

Input and output are CSV, TSV, JSONL or Parquet, by their names (.csv, .jsonl.gz, ...; also .bz2,
.xz, .zst). A row has the fields of one item in columns of their names: text, text_pair, question,
context, choices, sentences; or, in JSONL, {"inputs": ..., "parameters": ...} as the endpoint takes
it. The output has the rows of the input, in order, with the columns of the answer beside their own.
A row that cannot be answered has an "error" and an "error_type" instead.

The output appears when it is complete. Until then its parts are in OUTPUT.parts: a job that was
killed goes on where it was, with the same command, and writes the same bytes. An output that is a
folder (OUTPUT/) holds the parts themselves. A pipe, a device or - is written to at once.

exit status: 0 done; 1 wrong options, model or input, or no row was answered; 2 usage; 3 too many
rows with errors; 4 the parts are of another job (--restart); 5 another job writes there; 6 the
service (--server) or Ray is unavailable; 7 the output cannot be written; 130 interrupted; 143
stopped by SIGTERM, after the part that it was at. After 5, 6, 7, 130 and 143 the same command goes
on.
"""


def add_score(commands: Any) -> None:
    """Add the command and its options."""
    score = add_command(commands, "score", "answer every row of files", _SCORE_EXAMPLES)
    score.add_argument("--task", required=True, choices=list(SCORED_TASKS))
    score.add_argument("--parameters", default="{}", metavar="JSON", help="for all rows")
    score.add_argument(
        "--head", metavar="NAME", help="the classifier of a model that has several (its default)"
    )
    _add_columns(score.add_argument_group("columns and formats"))
    _add_job(score.add_argument_group("the job"))
    _add_server(score.add_argument_group("a running service instead of a model"))
    _add_ray(score.add_argument_group("many machines"))
    add_model_options(score)
    score.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="files, globs or folders; - for stdin"
    )
    score.add_argument("output", metavar="OUTPUT", help="a file, a folder (OUTPUT/), or - (stdout)")
    score.set_defaults(run=_score)


def _add_columns(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="FIELD=COLUMN",
        help="the column that holds a field of the task, such as text=review",
    )
    group.add_argument(
        "--keep",
        action="append",
        metavar="COLUMNS",
        help="the columns of the input that the output keeps, by commas (all); '' for none",
    )
    formats = get_args(Format)
    group.add_argument("--input-format", choices=formats, help="whatever the names (stdin: jsonl)")
    group.add_argument("--output-format", choices=formats, help="whatever the name (stdout: jsonl)")
    group.add_argument(
        "--no-quotes",
        action="store_true",
        help="quotes are ordinary characters of CSV and TSV input, as in GLUE's files",
    )
    group.add_argument(
        "--shard", default="0/1", metavar="I/N", help="the files I, I + N, ... of the input only"
    )


def _add_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--errors",
        choices=("keep", "fail"),
        default="keep",
        help="whether a row that cannot be answered is kept, or ends the job (%(default)s)",
    )
    group.add_argument("--max-errors", type=int, metavar="N", help="more rows in error end the job")
    group.add_argument(
        "--part-rows", type=int, default=PART_ROWS, metavar="N", help="rows of a part (%(default)s)"
    )
    group.add_argument("--no-dedupe", action="store_true", help="compute identical rows each")
    group.add_argument(
        "--restart", action="store_true", help="begin again, whatever parts there are"
    )
    group.add_argument(
        "--summary", type=Path, metavar="FILE", help="write counts and rates as JSON"
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--server", metavar="URL", help="the service's address")
    group.add_argument("--model", metavar="NAME", help="a model of it (its default)")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="the file of its key")
    group.add_argument(
        "--concurrency",
        type=int,
        default=NUM_CONCURRENT,
        metavar="N",
        help="requests at once (%(default)s)",
    )
    group.add_argument(
        "--server-wait",
        type=float,
        default=WAIT_S,
        metavar="SECONDS",
        help="the longest time to wait for a service that does not answer (%(default)g)",
    )


def _add_ray(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="where the model runs: in this process, or in actors of Ray (%(default)s)",
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="the cluster (RAY_ADDRESS, else the Ray of this machine, else one is started)",
    )
    group.add_argument(
        "--workers",
        dest="num_actors",
        type=int,
        metavar="N",
        help="actors, each with an engine of --threads CPUs (as many as the cluster has CPUs for)",
    )


def _score(options: argparse.Namespace) -> int:
    score_options = read_score_options(options)
    if options.summary is None:
        return _finish(options, _run(options, score_options))
    _check_summary(options)
    try:
        summary = _run(options, score_options)
    except LockedOutputError:
        raise  # the summary is the other job's
    except (AlbertServeError, OSError) as error:
        status = "stopped" if isinstance(error, StoppedError) else "failed"
        with suppress(OSError):
            _write_summary(options, {"status": status, "error": str(error)})
        raise
    with writing(options.summary):
        _write_summary(options, {"status": "complete", **summary.as_json()})
    return _finish(options, summary)


def _check_summary(options: argparse.Namespace) -> None:
    file: Path = options.summary
    if file.is_dir():
        raise ConfigError(f"--summary {file} is a folder; it must be a file")
    if file.resolve() in {Path(name).resolve() for name in (*options.inputs, options.output)}:
        raise ConfigError(f"--summary {file} is also an input or the output; name another file")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)


def _run(options: argparse.Namespace, score_options: ScoreOptions) -> ScoreSummary:
    with _scorer(options) as scorer, _termination() as is_terminated:
        return score_files(
            scorer,
            options.inputs,
            options.output,
            score_options,
            is_stopped=is_terminated.is_set,
        )


def _finish(options: argparse.Namespace, summary: ScoreSummary) -> int:
    output = STDOUT if options.output == "-" else options.output
    # Beside the rows, where the output is the standard output itself.
    print(f"{output}: {summary}", file=sys.stderr if is_stdout(Path(output)) else sys.stdout)
    if summary.num_errors and summary.num_errors == summary.num_rows:
        raise InvalidInputError(
            f"no row of {', '.join(options.inputs)} was answered; the first error: "
            f"{summary.first_error}"
        )
    return 0


def _write_summary(options: argparse.Namespace, result: dict[str, Any]) -> None:
    content = {
        **result,
        "task": options.task,
        "inputs": options.inputs,
        "output": options.output,
    }
    write_atomically(options.summary, json.dumps(content, indent=1).encode() + b"\n")


@contextmanager
def _scorer(options: argparse.Namespace) -> Iterator[Scorer[Any]]:
    if options.engine != "ray" and (options.ray_address or options.num_actors):
        raise ConfigError("--ray-address and --workers are for --engine ray")
    if options.server is not None:
        if options.engine == "ray":
            raise ConfigError("--server and --engine ray are given; choose one of them")
        # Each row has its warnings in the output.
        logging.getLogger("albert_serve.client").setLevel(logging.ERROR)
        with RemoteScorer(
            options.server,
            options.task,
            model=options.model,
            api_key=_read_key(options.api_key_file),
            num_concurrent=options.concurrency,
            wait_s=options.server_wait,
        ) as remote:
            yield remote
        return
    settings = Settings.from_environment(chosen(options))
    if options.engine == "ray":
        with _open_ray(options, settings) as distributed:
            yield distributed
        return
    yield LocalScorer.open(one_bundle(settings), options.task, settings.job_runtime)


def _open_ray(options: argparse.Namespace, settings: Settings) -> RayScorer:
    bundle = one_bundle(settings)
    tag = store_tag(settings.bundle) if settings.bundle else None
    model = WorkerModel(
        # The store may be elsewhere on another node.
        bundle=str(settings.bundle if tag else bundle.folder.absolute()),
        task=options.task,
        device="cuda" if settings.device == "cuda" else "cpu",
        prepack=settings.prepack,
    )
    return RayScorer(
        bundle,
        model,
        num_workers=options.num_actors,
        num_threads=settings.num_threads,
        address=options.ray_address,
    )


@contextmanager
def _termination() -> Iterator[threading.Event]:
    """Set an event at SIGTERM, instead of ending at once; a second one ends at once."""
    terminated = threading.Event()

    def stop(number: int, frame: Any) -> None:
        terminated.set()
        signal.signal(number, signal.SIG_DFL)
        print("stopping after this part; a second SIGTERM ends at once", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def read_score_options(options: argparse.Namespace) -> ScoreOptions:
    """Return the job's options.

    Raises:
        InvalidInputError: the parameters are not a JSON object.
        ConfigError: another option is not written as it must be.
    """
    parameters = _read_parameters(options.parameters)
    if options.head is not None:
        if options.task != CLASSIFICATION:
            raise ConfigError(f"--head is of {CLASSIFICATION}, not of {options.task}")
        also = parameters.get("head", options.head)
        if also != options.head:
            raise ConfigError(
                f"--head is {options.head} and --parameters has head {also!r}; name one of them"
            )
        parameters["head"] = options.head
    return ScoreOptions(
        parameters=parameters,
        columns=_read_columns(options.column),
        keep=None if options.keep is None else _split(options.keep),
        errors=options.errors,
        max_errors=options.max_errors,
        part_rows=options.part_rows,
        dedupe=not options.no_dedupe,
        restart=options.restart,
        input_format=options.input_format,
        output_format=options.output_format,
        has_quotes=not options.no_quotes,
        shard=_read_shard(options.shard),
    )


def _read_parameters(text: str) -> dict[str, Any]:
    try:
        parameters = json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"--parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise InvalidInputError('--parameters must be a JSON object, such as {"top_k": 3}')
    return parameters


def _read_columns(pairs: Sequence[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        field, separator, column = pair.partition("=")
        if not (field and separator and column):
            raise ConfigError(f"--column is {pair!r}; it must be FIELD=COLUMN, as in text=review")
        columns[field] = column
    return columns


def _split(texts: Sequence[str]) -> list[str]:
    names = [name for text in texts for name in text.split(",") if name]
    return list(dict.fromkeys(names))


def _read_shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise ConfigError(
            f"--shard is {text!r}; it must be I/N, such as 0/8 for the first of eight"
        )
    return int(index), int(count)


def _read_key(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file {file} is not UTF-8; it must hold the key") from error
