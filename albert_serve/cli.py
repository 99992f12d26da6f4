"""The command line: `albert-serve serve | score | info | doctor`."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, get_args

from albert_serve import __version__
from albert_serve.bundle.catalog import read_catalogue
from albert_serve.bundle.manifest import Bundle
from albert_serve.doctor.advice import advise
from albert_serve.doctor.examination import diagnose
from albert_serve.doctor.findings import findings_text
from albert_serve.doctor.inspection import describe_bundle
from albert_serve.doctor.overview import description_text
from albert_serve.errors import AlbertServeError, ConfigError, InvalidInputError, NotFoundError
from albert_serve.runtime.engine import Engine
from albert_serve.scoring.jsonl import is_stdout
from albert_serve.scoring.score import score_file
from albert_serve.server.greeting import greeting
from albert_serve.settings import (
    BUNDLE_VARIABLE,
    MODELS_VARIABLE,
    Device,
    Prepack,
    Settings,
)
from albert_serve.tasks import TASKS
from albert_serve.tasks.load import load_setups

# What a shell says of a program that SIGINT ended.
_INTERRUPTED: Final = 128 + 2
_MAX_PORT: Final = 65535
_SERVICE: Final = "albert_serve.service:AlbertServe"
# Longer than proxies and clients keep an idle connection (usually 60 s): if the server closed it
# first, a request sent at that moment would be lost.
_KEEP_ALIVE_S: Final = 75
_SERVE_EXAMPLES: Final = """\
examples:
  albert-serve serve
  albert-serve serve --bundle bundles/qa --port 8080 --host 0.0.0.0
  albert-serve serve --threads 4 --deadline-s 10
  albert-serve serve --models bundles/
  albert-serve serve --models models.yaml --workers 2

kill -HUP reads what is served again, without a gap.

Further settings are environment variables; docs/settings.md lists them.
"""
_SCORE_EXAMPLES: Final = """\
examples:
  albert-serve score --task text-classification reviews.jsonl scored.jsonl
  albert-serve score --task question-answering --parameters '{"top_k": 3}' in.jsonl.gz out.jsonl.gz

A row of the input is {"inputs": ..., "parameters": ...} as the endpoint takes it, or the fields of
one item: {"text"}, {"text", "text_pair"}, {"question", "context"} or {"sentences"}. A row of the
output is {"id", "output"}, or {"id", "error", "error_type"}, with the "id" of the input: a bad row
never stops the job. If every row is in error, the exit status is 1. Files ending in .gz or .xz are
compressed. The output appears when it is whole; /dev/stdout, a pipe or a device is written to at
once.
"""
_INFO_EXAMPLES: Final = """\
examples:
  albert-serve info models/base
  albert-serve info models/base --json | jq .sharing
"""
_DOCTOR_EXAMPLES: Final = """\
examples:
  albert-serve doctor
  albert-serve doctor models/base --workers 4 --prepack cache
  albert-serve doctor models/base --threads 1 --json | jq .speeds

It runs the bundle as the service would with the same settings, of which the options are some. It
takes seconds, and a minute or two for the largest models. Others who use the machine spoil times.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (AlbertServeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status


def _serve(options: argparse.Namespace) -> int:
    settings = Settings.from_environment(_chosen(options))
    catalogue = read_catalogue(settings)
    bundles, errors = catalogue.open_bundles()
    catalogue.check_any(errors)  # the service logs the others
    host = "127.0.0.1" if options.host == "localhost" else options.host
    _check_address(host, options.port)
    _check_home()
    command = [sys.executable, "-m", "bentoml", "serve", _SERVICE]
    command += ["--timeout-keep-alive", str(_KEEP_ALIVE_S)]
    if settings.log_format == "text":
        asks = settings.needs_key
        default = catalogue.default_among(bundles)
        text = greeting(bundles, default, host, options.port, needs_key=asks)
        print(text, flush=True)
    # In this process's place, so that signals reach the server and its status is ours.
    os.execvpe(
        sys.executable,
        [*command, "--host", host, "--port", str(options.port)],
        settings.environment(),
    )


def _check_address(host: str, port: int) -> None:
    """See that the service can listen there: BentoML fails with a traceback, after the greeting."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on port {port} of {host}: {error.strerror}; choose others with --port "
            "and --host"
        ) from error


def _check_home() -> None:
    """See that BentoML can write to its folder; it fails with a traceback if not."""
    named = os.environ.get("BENTOML_HOME", "~/bentoml")
    home = Path(os.path.expandvars(named)).expanduser()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise ConfigError(
            f"BentoML cannot write to its folder {home}: {error.strerror}; set BENTOML_HOME to a "
            "folder that can be written to"
        ) from error


def _score(options: argparse.Namespace) -> int:
    settings = Settings.from_environment(_chosen(options))
    bundle = _one_bundle(settings)
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


def _info(options: argparse.Namespace) -> int:
    described = describe_bundle(Bundle.open(options.bundle))
    print(_as_json(asdict(described)) if options.json else description_text(described))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    settings = Settings.from_environment(_chosen(options))
    diagnosis = diagnose(_one_bundle(settings), settings.runtime, settings.num_workers)
    advice = advise(diagnosis)
    if options.json:
        print(_as_json({**asdict(diagnosis), "advice": advice}))
    else:
        print(findings_text(diagnosis, advice))
    return 0


def _one_bundle(settings: Settings) -> Bundle:
    if settings.bundle is None:
        raise ConfigError(f"{MODELS_VARIABLE} names several models; name one bundle")
    return Bundle.open(settings.bundle)


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False)


def _chosen(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings from the command line, by variable."""
    models = getattr(options, "models", None)
    # An option replaces both variables.
    sources = (
        {BUNDLE_VARIABLE: options.bundle or "", MODELS_VARIABLE: models or ""}
        if options.bundle or models
        else {}
    )
    values = {
        **sources,
        "ALBERT_SERVE_THREADS": options.threads,
        "ALBERT_SERVE_DEVICE": options.device,
        "ALBERT_SERVE_PREPACK": options.prepack,
        "ALBERT_SERVE_WORKERS": getattr(options, "workers", None),
        "ALBERT_SERVE_DEADLINE_S": getattr(options, "deadline_s", None),
        "ALBERT_SERVE_MAX_BATCH_TOKENS": getattr(options, "max_batch_tokens", None),
    }
    return {variable: str(value) for variable, value in values.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="albert-serve", description="Serve ALBERT, score files with it, look into a bundle."
    )
    parser.add_argument("--version", action="version", version=f"albert-serve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="serve | score | info | doctor")
    _add_serve(commands)
    _add_score(commands)
    _add_info(commands)
    _add_doctor(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = _add(commands, "serve", "answer requests over HTTP", _SERVE_EXAMPLES)
    _add_model_options(serve)
    serve.add_argument(
        "--models", type=Path, metavar="PATH", help="several: a folder of bundles, or a YAML file"
    )
    _add_workers(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=_port, default=3000, help="port to listen on (%(default)s)")
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


def _add_doctor(commands: Any) -> None:
    doctor = _add(commands, "doctor", "measure a bundle on this machine", _DOCTOR_EXAMPLES)
    doctor.add_argument(
        "bundle",
        type=Path,
        nargs="?",
        metavar="BUNDLE",
        help="the bundle (the one that is served by default)",
    )
    _add_runtime_options(doctor)
    _add_workers(doctor)
    doctor.add_argument("--json", action="store_true", help="for programs instead of people")
    doctor.set_defaults(run=_doctor)


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
    _add_runtime_options(parser)


def _add_runtime_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", metavar="N", help="threads of one run (the usable CPUs, shared among workers)"
    )
    parser.add_argument("--device", choices=get_args(Device), help="the device to run on (auto)")
    parser.add_argument(
        "--prepack",
        choices=("auto", *get_args(Prepack)),
        help="the location of pre-packed weights (auto)",
    )


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else 0
    if not 1 <= port <= _MAX_PORT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no port; it must be a whole number from 1 to {_MAX_PORT}"
        )
    return port


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", metavar="N", help="worker processes (1)")
