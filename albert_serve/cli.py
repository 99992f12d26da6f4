"""The command line: `albert-serve serve | score | info`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from albert_serve import __version__
from albert_serve.bundle import Bundle
from albert_serve.engine import Engine
from albert_serve.errors import AlbertServeError, InvalidInputError, NotFoundError
from albert_serve.score import score_file
from albert_serve.settings import BUNDLE_VARIABLE, Settings
from albert_serve.tasks import TASKS
from albert_serve.tasks.load import load_setups

_SERVICE: Final = "albert_serve.service:AlbertServe"
_SERVE_EXAMPLES: Final = """\
examples:
  albert-serve serve
  albert-serve serve --bundle bundles/qa --port 8080 --host 0.0.0.0
  albert-serve serve --threads 4 --deadline-s 10

Further settings are environment variables; the README lists them.
"""
_SCORE_EXAMPLES: Final = """\
examples:
  albert-serve score --task text-classification reviews.jsonl scored.jsonl
  albert-serve score --task question-answering --parameters '{"top_k": 3}' in.jsonl.gz out.jsonl.gz

A row of the input is {"inputs": ...} as the endpoint takes it, or the fields of one item: {"text"},
{"text", "text_pair"} or {"question", "context"}. An "id" is passed through.
"""
_INFO_EXAMPLES: Final = """\
examples:
  albert-serve info models/base
  albert-serve info models/base --json | jq .evaluation
"""
# What to try first, for each endpoint.
_REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "fill-mask": {"inputs": "He was born in the United [MASK].", "parameters": {"top_k": 3}},
    "text-classification": {"inputs": "A moving film with a wonderful cast."},
    "question-answering": {
        "inputs": {
            "question": "When was the bridge built?",
            "context": "The bridge over the river was built in 1932.",
        }
    },
    "sentence-order": {
        "inputs": {
            "text": "He was born in Vienna in 1901. He studied physics there.",
            "text_pair": "After that, he moved to Berlin and worked as a teacher until 1970.",
        }
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (AlbertServeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return status


def _serve(options: argparse.Namespace) -> int:
    settings = Settings.from_environment(_chosen(options))
    bundle = Bundle.open(settings.bundle)
    host = "127.0.0.1" if options.host == "localhost" else options.host
    command = [sys.executable, "-m", "bentoml", "serve", _SERVICE]
    print(greeting(bundle, host, options.port), flush=True)
    # In this process's place, so that signals reach the server and its status is ours.
    os.execvpe(
        sys.executable,
        [*command, "--host", host, "--port", str(options.port)],
        settings.environment(),
    )


def greeting(bundle: Bundle, host: str, port: int) -> str:
    """Where the service will answer, and a request to try for each task that it has."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
    lines = [f"{bundle.folder} on {url} (API: {url}/docs; ready when {url}/readyz answers 200)", ""]
    for task in bundle.manifest.tasks:
        if task in TASKS:
            body = shlex.quote(json.dumps(_REQUESTS[task]))
            lines += [f"curl {url}/{task} -H 'Content-Type: application/json' \\", f"  -d {body}"]
    return "\n".join([*lines, ""])


def _score(options: argparse.Namespace) -> int:
    settings = Settings.from_environment(_chosen(options))
    bundle = Bundle.open(settings.bundle)
    setups = load_setups(bundle)
    if options.task not in setups:
        raise NotFoundError(f"{bundle.folder} has no {options.task}; it has {', '.join(setups)}")
    engine = Engine.open(bundle, num_threads=settings.num_threads)
    summary = score_file(
        engine,
        options.task,
        setups[options.task],
        options.source,
        options.output,
        parameters=_read_parameters(options.parameters),
    )
    print(f"{options.output}: {summary}")
    return 0


def _read_parameters(text: str) -> dict[str, Any]:
    try:
        parameters = json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"--parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise InvalidInputError('--parameters must be a JSON object, such as {"top_k": 3}')
    return parameters


def _info(options: argparse.Namespace) -> int:
    described = describe_bundle(Bundle.open(options.bundle))
    if options.json:
        print(json.dumps(described, indent=2))
    else:
        print("\n".join(_lines(described)))
    return 0


def describe_bundle(bundle: Bundle) -> dict[str, Any]:
    """Sizes, sharing, precision, tasks, results and origin of a bundle, ready for JSON."""
    config, manifest = bundle.config, bundle.manifest
    files = {name: entry.size for name, entry in manifest.files.items()}
    return {
        "folder": str(bundle.folder),
        "model": {
            "layers": config.num_layers * config.num_inner_layers,
            "hidden size": config.hidden_size,
            "embedding size": config.embedding_size,
            "heads": config.num_heads,
            "vocabulary": config.vocab_size,
            "positions": config.max_positions,
            "backbone parameters": config.num_backbone_params,
            "weights applied per token": config.num_compute_weights,
        },
        "sharing": {
            "across layers": config.sharing,
            "stored attention blocks": config.num_attentions,
            "stored feed-forward blocks": config.num_ffns,
        },
        "precision": manifest.precision,
        "tasks": {
            name: entry.model_dump(exclude_none=True) for name, entry in manifest.tasks.items()
        },
        "files, bytes": {**files, "total": sum(files.values())},
        "largest difference from torch": manifest.parity,
        "evaluation": manifest.evaluation,
        "provenance": manifest.provenance,
    }


def _lines(described: Mapping[str, Any], indent: str = "") -> list[str]:
    """A mapping as an indented list for people."""
    lines: list[str] = []
    for name, value in described.items():
        if isinstance(value, Mapping):
            inner = _lines(value, indent + "  ")
            lines += [f"{indent}{name}", *inner] if inner else []
        else:
            lines.append(f"{indent}{name:<{max(1, 32 - len(indent))}} {_shown(value)}")
    return lines


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _chosen(options: argparse.Namespace) -> dict[str, str]:
    """The settings given as options, by variable."""
    given = {
        BUNDLE_VARIABLE: options.bundle,
        "ALBERT_SERVE_THREADS": options.threads,
        "ALBERT_SERVE_DEADLINE_S": getattr(options, "deadline_s", None),
        "ALBERT_SERVE_MAX_BATCH_TOKENS": getattr(options, "max_batch_tokens", None),
    }
    return {variable: str(value) for variable, value in given.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="albert-serve", description="Serve ALBERT, score files with it, look into a bundle."
    )
    parser.add_argument("--version", action="version", version=f"albert-serve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="serve | score | info")
    _add_serve(commands)
    _add_score(commands)
    _add_info(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = _add(commands, "serve", "answer requests over HTTP", _SERVE_EXAMPLES)
    _add_model_options(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=int, default=3000, help="port to listen on (%(default)s)")
    serve.add_argument("--deadline-s", metavar="SECONDS", help="give up a request after this")
    serve.add_argument("--max-batch-tokens", metavar="N", help="tokens that run together")
    serve.set_defaults(run=_serve)


def _add_score(commands: Any) -> None:
    score = _add(commands, "score", "answer every row of a JSONL file", _SCORE_EXAMPLES)
    score.add_argument("--task", required=True, choices=list(TASKS))
    score.add_argument("--parameters", default="{}", metavar="JSON", help="for all rows")
    _add_model_options(score)
    score.add_argument("source", type=Path, metavar="INPUT.jsonl")
    score.add_argument("output", type=Path, metavar="OUTPUT.jsonl")
    score.set_defaults(run=_score)


def _add_info(commands: Any) -> None:
    info = _add(commands, "info", "check a bundle and say what it holds", _INFO_EXAMPLES)
    info.add_argument("bundle", type=Path, metavar="BUNDLE")
    info.add_argument("--json", action="store_true", help="for programs instead of people")
    info.set_defaults(run=_info)


def _add(commands: Any, name: str, purpose: str, examples: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return added


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="the model (the one that ships in models/)"
    )
    parser.add_argument("--threads", metavar="N", help="threads of one run (the usable CPUs)")
