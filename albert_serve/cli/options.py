"""The options that several commands share, and the settings that they define."""

from __future__ import annotations

import argparse
import errno
import os
import tempfile
from pathlib import Path
from typing import get_args

from albert_serve.bundle.checkpoint import find_bundle
from albert_serve.bundle.manifest import Bundle
from albert_serve.bundle.store import locate
from albert_serve.config import Precision
from albert_serve.errors import ConfigError
from albert_serve.settings import BUNDLE_VARIABLE, MODELS_VARIABLE, Device, Settings
from albert_serve.terminal import CommandParser, make_parser


def serving_parser(name: str, purpose: str, examples: str) -> CommandParser:
    """Return the parser of a command, whose help ends with examples."""
    return make_parser(f"albert-serve {name}", f"{purpose[0].upper()}{purpose[1:]}.", examples)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the bundle and the options of its runtime."""
    parser.add_argument(
        "--bundle",
        metavar="BUNDLE",
        help="bundle or checkpoint: a folder, bentoml:NAME[:VERSION], or OWNER/NAME[@REVISION] "
        "on the Hugging Face Hub (default: the default model)",
    )
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        help="precision in which to export a checkpoint (default: fp32)",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        help="threads per batch (default: the usable CPUs, divided among the workers)",
    )
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        help="device; auto uses a GPU if a test call succeeds (default: auto)",
    )


def chosen(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings from the command line, by variable."""
    models = getattr(options, "models", None)
    precision = getattr(options, "precision", None)
    if precision is not None and not options.bundle:
        raise ConfigError("--precision requires a checkpoint. Pass it with --bundle.")
    # Either option replaces both variables.
    sources = (
        {
            BUNDLE_VARIABLE: find_bundle(options.bundle, precision) if options.bundle else "",
            MODELS_VARIABLE: models or "",
        }
        if options.bundle or models
        else {}
    )
    values = {
        **sources,
        "ALBERT_SERVE_THREADS": options.threads,
        "ALBERT_SERVE_DEVICE": options.device,
        "ALBERT_SERVE_WORKERS": getattr(options, "workers", None),
        "ALBERT_SERVE_DEADLINE_S": getattr(options, "deadline_s", None),
        "ALBERT_SERVE_MAX_BATCH_TOKENS": getattr(options, "max_batch_tokens", None),
    }
    return {variable: str(value) for variable, value in values.items() if value is not None}


def one_bundle(settings: Settings) -> Bundle:
    """Open the one bundle that the settings name."""
    if settings.bundle is None:
        raise ConfigError(f"{MODELS_VARIABLE} has several models. Pass one bundle with --bundle.")
    return Bundle.open(locate(settings.bundle))


def check_home() -> None:
    """Check that BentoML can write to its folder, because it would fail with a traceback."""
    value = os.environ.get("BENTOML_HOME", "~/bentoml")
    home = Path(os.path.expanduser(os.path.expandvars(value)))
    try:
        if home.parts[0] == "~":
            raise FileNotFoundError(errno.ENOENT, "this user has no home folder")
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise ConfigError(
            f"BentoML cannot write to its folder {home}: {error.strerror}. Set BENTOML_HOME to a "
            "writable folder."
        ) from error
