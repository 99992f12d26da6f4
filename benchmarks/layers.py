"""Distance and angle of each layer's input and output, as in Figure 1 of the paper.

Draws any encoders that `transformers` reads over each other, ALBERT or BERT, by the mean over the
tokens of some texts.

Shape legend: S positions, H hidden size, R tokens, L layers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness.page import table
from benchmarks.harness.process import BenchmarkError
from benchmarks.harness.texts import WIKI
from training.data.corpus import find_files, read_documents
from training.errors import report_errors
from training.options.values import parse_count
from training.system.command_line import make_parser

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure

_SIZE_INCHES: Final = (10.0, 3.8)
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.layers "albert-small-en=models/albert-small-en" \
      "BERT=runs/bert/runs/128x4/128x4-share-none-e128-sop-800-steps-seed0/checkpoint"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSimilarity:
    """Comparison of each layer's input and output, as in Figure 1 of the paper (section 3.1).

    There is one value for each entry of the config's `layer_plan`, that is for each application
    of a layer.

    Attributes:
        distance: mean L2 distance of a token's input and output embedding.
        angle_degrees: mean angle between both, from 0 to 180; the figure's "cosine similarity (in
            terms of degree)".
    """

    distance: tuple[float, ...]
    angle_degrees: tuple[float, ...]


def compare_layers(states: Iterable[Iterable[Tensor]]) -> LayerSimilarity:
    """Compare the inputs and outputs of layers.

    Args:
        states: of each batch the hidden states (R, H) before the first layer and after each.

    Raises:
        BenchmarkError: there is no token.
    """
    sums: list[Tensor] = []
    num_tokens = 0
    for rows in states:
        moves = [
            torch.stack([(after_RH - before_RH).norm(dim=-1), _angle_degrees(before_RH, after_RH)])
            for before_RH, after_RH in pairwise(rows)
        ]
        num_tokens += moves[0].shape[-1]
        sums.append(torch.stack(moves).double().sum(-1))
    if not num_tokens:
        raise BenchmarkError("there is no token to compare layers at; give a batch that has some")
    means_L2 = torch.stack(sums).sum(0) / num_tokens
    distance, angle = means_L2.T.tolist()
    return LayerSimilarity(distance=tuple(distance), angle_degrees=tuple(angle))


def _angle_degrees(x_RH: Tensor, y_RH: Tensor) -> Tensor:
    """Return the angles (R,) of rows; the arc cosine would round small ones away."""
    x_RH, y_RH = F.normalize(x_RH, dim=-1), F.normalize(y_RH, dim=-1)
    difference_R, sum_R = (x_RH - y_RH).norm(dim=-1), (x_RH + y_RH).norm(dim=-1)
    return 2 * torch.atan2(difference_R, sum_R) * (180 / math.pi)


def measure_layers(folder: Path, texts: Sequence[str], length: int) -> LayerSimilarity:
    """Run an encoder over texts, each cut to `length` tokens, and compare at all of them.

    Raises:
        BenchmarkError: `transformers` cannot read the folder.
    """
    import transformers

    quiet: Any = transformers.logging.set_verbosity_error
    quiet()  # else it lists the heads, which are not read
    try:
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise BenchmarkError(f"{folder} is no encoder that transformers reads: {reason}") from error

    def states(text: str) -> list[torch.Tensor]:
        ids = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**ids, output_hidden_states=True).hidden_states
        return [state_1SH[0].float() for state_1SH in hidden]

    return compare_layers(map(states, texts))


def draw(measured: Mapping[str, LayerSimilarity]) -> Figure:
    """Draw both figures of each encoder by layer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    titles = {
        "distance": "L2 distance of input and output",
        "angle_degrees": "angle of input and output (degrees)",
    }
    for number, (field, title) in enumerate(titles.items(), start=1):
        ax = figure.add_subplot(1, 2, number)
        for label, layers in measured.items():
            values = getattr(layers, field)
            ax.plot(range(1, len(values) + 1), values, marker=".", label=label)
        ax.set_title(title)
        ax.set_xlabel("layer")
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(visible=True, color="#dddddd", linewidth=0.6)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _run(options: argparse.Namespace) -> int:
    documents = read_documents(find_files(options.texts))
    texts = list(islice(documents, options.num_texts))
    measured = {}
    for name in options.encoders:
        label, _, folder = name.rpartition("=")
        measured[label or folder] = measure_layers(Path(folder), texts, options.length)
    try:
        draw(measured).savefig(options.output, dpi=100)
    except ValueError as error:
        raise BenchmarkError(f"--output {options.output}: {error}") from error
    for field in ("distance", "angle_degrees"):
        rows = [
            [label, *(f"{value:.1f}" for value in getattr(layers, field))]
            for label, layers in measured.items()
        ]
        width = max(len(row) for row in rows)
        padded = [row + [""] * (width - len(row)) for row in rows]
        print(table([field, *map(str, range(1, width))], padded))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("python -m benchmarks.layers", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("encoders", nargs="+", metavar="[LABEL=]FOLDER", help="checkpoints")
    add("--texts", nargs="+", type=Path, default=[WIKI], help="text or JSONL (a few articles)")
    add("--num-texts", type=parse_count, default=32, help="documents to run (%(default)s)")
    add("--length", type=parse_count, default=128, help="tokens of each at most (%(default)s)")
    add("--output", type=Path, default=Path("layers.png"), help="picture (%(default)s)")
    options = parser.parse_args(arguments)
    return report_errors(lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
