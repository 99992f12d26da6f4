"""`bentoml serve` where it cannot listen: one line, before anything starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

from albert_serve.errors import ConfigError
from albert_serve.server.bentoml.start import check_command_line
from tests.albert_serve.support import ROOT, service_environment


def test_the_port_of_bentomls_command_line_is_checked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with click.Context(click.Command("serve")) as context:
            context.params = {"host": "127.0.0.1", "port": port}
            with pytest.raises(ConfigError, match=f"cannot listen on port {port} of 127.0.0.1: "):
                check_command_line()
            context.params["port"] = 99_999
            with pytest.raises(ConfigError, match="99999 is no port; it must be"):
                check_command_line()
            context.params = {"host": "localhost", "port": port}
            with pytest.raises(ConfigError, match="the host is 'localhost'; BentoML listens on an"):
                check_command_line()
    with click.Context(click.Command("serve")) as context:
        context.params = {"host": "127.0.0.1", "port": 0}  # any free one
        check_command_line()
    check_command_line()


def test_bentoml_serve_with_a_port_in_use_is_one_line(bundle_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        options = ["albert_serve.service:AlbertServe", "--host", "127.0.0.1", "--port", str(port)]
        done = subprocess.run(
            [sys.executable, "-m", "bentoml", "serve", *options],
            cwd=ROOT,
            env=service_environment(bundle_dir, tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: cannot listen on port {port} of 127.0.0.1: ")
