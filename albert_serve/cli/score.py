"""`albert-serve score`: answer every row of a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from albert_serve.cli.options import add_command, add_model_options, chosen, one_bundle
from albert_serve.errors import InvalidInputError, NotFoundError
from albert_serve.runtime.engine import Engine
from albert_serve.scoring.jsonl import is_stdout
from albert_serve.scoring.score import score_file
from albert_serve.settings import Settings
from albert_serve.tasks import TASKS
from albert_serve.tasks.load import load_setups

_SCORE_EXAMPLES: Final = """\
examples:
  albert-serve score --task text-classification reviews.jsonl scored.jsonl
  albert-serve score --task question-answering --parameters '{"top_k": 3}' in.jsonl.gz out.jsonl.gz
  albert-serve score --task feature-extraction --parameters '{"normalize": true}' in.jsonl out.jsonl

A row of the input is {"inputs": ..., "parameters": ...} as the endpoint takes it, or the fields of
one item: {"text"}, {"text", "text_pair"}, {"question", "context"} or {"sentences"}. A row of the
output is {"id", "output"}, with "truncated_at" where texts were cut ('{"truncation": true}'), or
{"id", "error", "error_type"}, with the "id" of the input: a bad row never stops the job. If every
row is in error, the exit status is 1. Files ending in .gz or .xz are compressed. The output appears
when it is whole; /dev/stdout, a pipe or a device is written to at once.
"""


def add_score(commands: Any) -> None:
    """Add the command and its options."""
    score = add_command(commands, "score", "answer every row of a JSONL file", _SCORE_EXAMPLES)
    score.add_argument("--task", required=True, choices=list(TASKS))
    score.add_argument("--parameters", default="{}", metavar="JSON", help="for all rows")
    add_model_options(score)
    score.add_argument("source", type=Path, metavar="INPUT.jsonl")
    score.add_argument("output", type=Path, metavar="OUTPUT.jsonl")
    score.set_defaults(run=_score)


def _score(options: argparse.Namespace) -> int:
    settings = Settings.from_environment(chosen(options))
    bundle = one_bundle(settings)
    setups = load_setups(bundle)
    if options.task not in setups:
        raise NotFoundError(f"{bundle.folder} has no {options.task}; it has {', '.join(setups)}")
    engine = Engine.open(bundle, settings.job_runtime)
    summary = score_file(
        engine,
        options.task,
        setups[options.task],
        options.source,
        options.output,
        parameters=_read_parameters(options.parameters),
    )
    # Beside the rows, where the output is the standard output itself.
    print(
        f"{options.output}: {summary}",
        file=sys.stderr if is_stdout(options.output) else sys.stdout,
    )
    if summary.num_errors and summary.num_errors == summary.num_rows:
        raise InvalidInputError(
            f"no row of {options.source} was answered; the first error: {summary.first_error}"
        )
    return 0


def _read_parameters(text: str) -> dict[str, Any]:
    try:
        parameters = json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"--parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise InvalidInputError('--parameters must be a JSON object, such as {"top_k": 3}')
    return parameters
