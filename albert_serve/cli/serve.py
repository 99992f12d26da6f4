"""`albert-serve serve`: check the bundles and the address, and start BentoML."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final

from albert_serve.bundle.catalog import read_catalogue
from albert_serve.cli.options import (
    add_model_options,
    check_home,
    chosen,
    serving_parser,
)
from albert_serve.errors import ConfigError
from albert_serve.settings import Settings

_PORT: Final = 3000
_SERVICE: Final = "albert_serve.service:AlbertServe"
# This is longer than proxies and clients keep an idle connection (usually 60 s). If the server
# closed it first, a request sent at that moment would be lost.
_KEEP_ALIVE_S: Final = 75
_SERVE_EXAMPLES: Final = """\
examples:
  albert-serve serve
  albert-serve serve --bundle bundles/qa --port 8080 --host 0.0.0.0
  albert-serve serve --bundle bentoml:albert-small-en:latest
  albert-serve serve --bundle my-team/reviews-int8@v2
  albert-serve serve --bundle albert/albert-base-v2 --precision int8
  albert-serve serve --threads 4 --deadline-s 10
  albert-serve serve --models bundles/ --workers 2

docs/operate.md lists the other settings, which are environment variables.
"""


def serve_parser(purpose: str) -> argparse.ArgumentParser:
    """Return the parser of the command."""
    serve = serving_parser("serve", purpose, _SERVE_EXAMPLES)
    add_model_options(serve)
    serve.add_argument(
        "--models", type=Path, metavar="PATH", help="folder of bundles, to serve several models"
    )
    serve.add_argument("--workers", metavar="N", help="number of worker processes (default: 1)")
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    serve.add_argument(
        "--port", type=int, default=_PORT, help="port to listen on (default: %(default)s)"
    )
    serve.add_argument(
        "--deadline-s",
        metavar="SECONDS",
        help="seconds until a request fails with 504 (default: 30)",
    )
    serve.add_argument(
        "--max-batch-tokens",
        metavar="N",
        help="maximum tokens per batch, including padding "
        "(default: 512; xlarge 256, xxlarge 128; 16384 "
        "on CUDA)",
    )
    serve.set_defaults(run=_serve)
    return serve


def _serve(options: argparse.Namespace) -> int:
    settings = Settings.from_environment(chosen(options))
    catalogue = read_catalogue(settings)
    catalogue.check_any(catalogue.open_bundles()[1])  # the service logs single failures
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((options.host, options.port))
            host, port, *_ = probe.getsockname()  # BentoML does not accept a host name
    except (OSError, OverflowError) as error:  # BentoML would print a traceback
        reason = str(error).removesuffix(".")
        raise ConfigError(
            f"Cannot listen on port {options.port} of {options.host}: {reason}. Choose another "
            "port or address with --port and --host."
        ) from error
    if os.path.expanduser("~") == "~" and "BENTOML_HOME" not in os.environ:
        # This user has no home folder. BentoML would create a folder named `~`.
        os.environ["BENTOML_HOME"] = tempfile.mkdtemp(prefix="bentoml-")
    check_home()
    command = [sys.executable, "-m", "bentoml", "serve", _SERVICE]
    command += ["--timeout-keep-alive", str(_KEEP_ALIVE_S)]
    # The server replaces this process, so signals reach it and its status is returned.
    os.execvpe(
        sys.executable,
        [*command, "--host", host, "--port", str(port)],
        settings.environment(),
    )
