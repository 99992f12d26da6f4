"""Options that several training commands share, and the option for a device."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import torch

from training.errors import RunError
from training.optim.optimizers import OptimizerName, ScheduleName
from training.options.flags import Options, flag
from training.options.values import Count, Duration, Fraction, Parsed, Positive, Seed
from training.system.precision import PrecisionName

DEVICE_HELP: Final = "device: auto, cpu, cuda, cuda:1, ...; auto uses the GPU if there is one"
COMPILE_HELP: Final = "compile the model: faster steps after some minutes at the start"


def parse_device(text: str) -> torch.device:
    """Parse the name of a device that torch can use here. `auto` is the GPU, or else the CPU."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # torch may lack the device
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used: {reason}. Use auto, cpu, cuda, cuda:1, ..."
        ) from error
    return device


Device: TypeAlias = Annotated[torch.device, Parsed(parse_device)]


def add_device(group: argparse._ActionsContainer) -> None:
    """Add the option of a device, which is parsed into a `torch.device`."""
    help_ = f"{DEVICE_HELP} (default: %(default)s)"
    group.add_argument("--device", type=parse_device, default="auto", help=help_)


def should_compile(requested: bool | None, device: torch.device) -> bool:
    """Return whether to compile: as requested by `--compile`, or by default if it is possible."""
    # To compile for a CPU, torch's inductor starts this C++ compiler.
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    is_possible = device.type != "cpu" or shutil.which(name) is not None
    if is_possible or requested is False:
        return requested is not False
    if requested:
        raise RunError(f"--compile requires a C++ compiler on a CPU. Install {name}, or set CXX.")
    print(f"Training is not compiled, and slower. Install the C++ compiler {name}, or set CXX.")
    return False


@dataclass(frozen=True, kw_only=True)
class StoppingCriteria(Options, title="end of the run (whichever is reached first)"):
    """The end of a run.

    Attributes:
        budget: seconds of training, given as a duration such as 25m on the command line.
    """

    steps: Count | None = flag("maximum number of steps")
    budget: Duration | None = flag("maximum training time, such as 25m or 2h")

    @property
    def has_end(self) -> bool:
        """Whether the run has an end."""
        return self.steps is not None or self.budget is not None


@dataclass(frozen=True, kw_only=True)
class RunFolder(Options, title="device and output"):
    """A run's folder, device, checkpoints and reports, which change at most last digits of results.

    Attributes:
        save_every: seconds between checkpoints.
    """

    output: Path = flag("folder of the run", MISSING)
    device: Device = flag(DEVICE_HELP, "auto")
    precision: PrecisionName = flag(
        "precision of matrix products; auto measures which is faster, and a resumed run keeps it",
        "auto",
    )
    threads: Count | None = flag("number of threads on a CPU (default: torch's number)")
    save_every: Duration = flag("time between checkpoints, such as 5m (default: 5m)", 300.0)
    keep: Count = flag("number of checkpoints to keep", 2)
    report_every: Count = flag("steps per line of metrics", 50)


@dataclass(frozen=True, kw_only=True)
class Optimization(Options, title="optimization"):
    """The optimizers and their learning rates, by default those of the recipe."""

    optimizer: OptimizerName | None = flag(
        "optimizer; muon trains the layers' matrices, and AdamW the other weights"
    )
    lr: Positive | None = flag("peak learning rate; with muon, of the layers' matrices")
    adamw_lr: Positive | None = flag("peak learning rate of the other weights, with muon")
    weight_decay: Fraction | None = flag("weight decay of matrices, 0 to 1")
    schedule: ScheduleName | None = flag("learning-rate schedule")
    warmup: Fraction | None = flag("warm-up as a fraction of the run, 0 to 1")
    decay: Fraction | None = flag("decay as a fraction of the run, 0 to 1, with wsd")
    sentence_weight: Fraction | None = flag(
        "weight of the sentence task's loss, 0 to 1; the paper uses 1, with 4096 sequences per step"
    )
    clip_norm: Positive | None = flag("maximum gradient norm")
    seed: Seed | None = flag("seed of data order, masks and dropout")


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(Options, title="masked tokens and sentence order"):
    """Options for masked tokens and sentence order."""

    mask_rate: Fraction | None = flag("fraction of the tokens that is predicted, 0 to 1")
    order_share: Fraction | None = flag(
        "fraction of the pretraining steps that learn only sentence order, from both orders of "
        "pairs without masks, 0 to below 1 (default: 0)"
    )
    order_length: Count | None = flag("maximum tokens of a pair of --order-share (default: 512)")
    order_sentences: Count | None = flag("minimum sentences in each segment of a pair (default: 2)")

    def __post_init__(self) -> None:
        """Check the fraction of steps that train only sentence order."""
        super().__post_init__()
        if self.order_share == 1:
            raise RunError("--order-share 1 leaves no step for masked tokens. Use a lower value.")
