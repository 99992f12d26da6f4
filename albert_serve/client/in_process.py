"""The transport to a model in this process, for `local` of both clients.

The serving stack is imported when the first is opened, so that the client itself needs none of it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from albert_serve.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from albert_serve.local import LocalTransport
    from albert_serve.settings import Device

LOCAL_URL: Final = "http://local"
# A day: lists of any length are one call, and nobody else waits.
LOCAL_TIMEOUT_S: Final = 86_400.0


def open_transport(
    bundle: str | os.PathLike[str] | None, num_threads: int | None, device: Device
) -> LocalTransport:
    """Open a bundle for a client.

    Raises:
        ConfigError: the serving stack is not installed, an option is invalid, or no bundle is named
            and there is no default.
        BundleError: the bundle cannot be opened.
        EngineError: it cannot be run here, or not on that device.
    """
    try:
        from albert_serve.local import LocalTransport
        from albert_serve.settings import RuntimeOptions
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, which a local model needs: {how_to_install('serve')}"
        ) from error
    return LocalTransport(bundle, RuntimeOptions(device=device, num_threads=num_threads))
