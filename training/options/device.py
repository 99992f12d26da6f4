"""The option of a device, and whether training is compiled there.

Apart from `options.values`, so that commands without a device do not import torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import Annotated, Final, TypeAlias

import torch

from training.errors import RunError
from training.options.values import Parsed


def parse_device(text: str) -> torch.device:
    """Parse the name of a device that torch can use here; `auto` is the GPU, or else the CPU."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # torch may be built without it
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used: {reason}; give auto, cpu, cuda, cuda:1, ..."
        ) from error
    return device


Device: TypeAlias = Annotated[torch.device, Parsed(parse_device)]

DEVICE_HELP: Final = "auto, cpu, cuda, cuda:1, ...; auto takes the GPU if there is one"


def add_device(group: argparse._ActionsContainer) -> None:
    """Add the option of the device, which is read as a `torch.device`."""
    help_ = f"{DEVICE_HELP} (%(default)s)"
    group.add_argument("--device", type=parse_device, default="auto", help=help_)


def should_compile(wanted: bool | None, device: torch.device) -> bool:
    """Whether to compile: as `--compile` says, otherwise if it is possible.

    Raises:
        RunError: `--compile` is given on a CPU without a C++ compiler.
    """
    # The compiler that torch's inductor starts on a CPU.
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    is_possible = device.type != "cpu" or shutil.which(name) is not None
    if is_possible or wanted is False:
        return wanted is not False
    if wanted:
        raise RunError(f"--compile needs a C++ compiler on a CPU, and there is no {name}")
    print(f"training is not compiled, and slower: there is no C++ compiler {name}")
    return False
