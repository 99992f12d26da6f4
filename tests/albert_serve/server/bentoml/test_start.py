"""`bentoml serve` that cannot start: one line, before anything does."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

from albert_serve.errors import ConfigError
from albert_serve.server.bentoml.start import check_command_line
from tests.albert_serve.support import ROOT, SERVICE, free_port, service_environment


def test_the_port_of_bentomls_command_line_is_checked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with click.Context(click.Command("serve")) as context:
            context.params = {"host": "127.0.0.1", "port": port}
            with pytest.raises(ConfigError, match=f"cannot listen on port {port} of 127.0.0.1: "):
                check_command_line()
            context.params["port"] = 99_999
            with pytest.raises(ConfigError, match="99999 is not a port"):
                check_command_line()
            context.params = {"host": "localhost", "port": port}
            with pytest.raises(ConfigError, match="'localhost' is not an IP address"):
                check_command_line()
    with click.Context(click.Command("serve")) as context:
        context.params = {"host": "127.0.0.1", "port": 0}  # any free one
        check_command_line()
    check_command_line()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        # Before a worker starts: it would be started again and again.
        ({"ALBERT_SERVE_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}, "CUDA is asked for and"),
        ({"ALBERT_SERVE_API_KEYS": "secret"}, "ALBERT_SERVE_API_KEYS: key 1 has 6 characters"),
        ({"ALBERT_SERVER_API_KEYS": "k" * 16}, "ALBERT_SERVER_API_KEYS is set, but there is no"),
        ({}, "cannot listen on port "),
    ],
)
def test_what_cannot_be_served_is_one_line(
    variables: dict[str, str], message: str, bundle_dir: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = free_port() if variables else server.getsockname()[1]
        options = [SERVICE, "--host", "127.0.0.1", "--port", str(port)]
        done = subprocess.run(
            [sys.executable, "-m", "bentoml", "serve", *options],
            cwd=ROOT,
            env=service_environment(bundle_dir, tmp_path) | variables,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in done.stderr
    assert "Starting production" not in done.stderr
