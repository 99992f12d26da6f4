"""Whether the service can listen: BentoML fails with a traceback, after it has begun."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

import click

from albert_serve.errors import ConfigError

_MAX_PORT: Final = 65535


def check_command_line() -> None:
    """See that the service can listen where the command line of `bentoml serve` has it listen.

    Raises:
        ConfigError: it cannot.
    """
    host, port = _option("host"), _option("port")
    if isinstance(host, str) and isinstance(port, int) and port:
        check_address(host, port)


def listens_on_loopback() -> bool:
    """Whether, by the command line, only this machine reaches the service."""
    host = _option("host")
    return isinstance(host, str) and ipaddress.ip_address(host).is_loopback


def _option(name: str) -> object:
    """Return an option of the command line of `bentoml serve`, whose hooks are told none.

    It is None where Python code starts the service.
    """
    context = click.get_current_context(silent=True)
    return context.params.get(name) if context is not None else None


def port_number(text: str) -> int:
    """Return the port that a text names.

    Raises:
        ConfigError: it names none.
    """
    port = int(text) if text.isdecimal() else 0
    if not 1 <= port <= _MAX_PORT:
        raise ConfigError(f"{text} is not a port. Use a whole number from 1 to {_MAX_PORT}.")
    return port


def check_address(host: str, port: int) -> None:
    """See that the service can listen there.

    Args:
        host: an IP address; BentoML takes no name.

    Raises:
        ConfigError: it cannot.
    """
    port_number(str(port))
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(
            f"{host!r} is not an IP address. Use an address such as 127.0.0.1 or 0.0.0.0."
        ) from error
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on port {port} of {host}: {error.strerror}. Choose others with "
            "--port and --host."
        ) from error
