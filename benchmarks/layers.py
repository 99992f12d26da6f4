"""Distance and angle of each layer's input and output, as in Figure 1 of the paper.

Draws any encoders that `transformers` reads over each other, ALBERT or BERT, by the mean over the
tokens of some texts. `albert-serve plot --layers` draws the same of a run as it trains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.harness.page import table
from benchmarks.harness.process import BenchmarkError
from benchmarks.harness.texts import WIKI
from training.data.corpus import find_files, read_documents
from training.errors import report_errors
from training.model.similarity import LayerSimilarity, compare_layers
from training.run.options import parse_count
from training.system.command_line import make_parser

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure

_SIZE_INCHES: Final = (10.0, 3.8)
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.layers "albert-small-en=models/albert-small-en" \
      "BERT=runs/bert/runs/128x4/128x4-share-none-e128-sop-800-steps-seed0/checkpoint"
"""


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
