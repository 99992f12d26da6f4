"""Average the weights of checkpoints that have a common beginning, such as a run and its sequel.

The mean of several finetuned models is often better than each (model soups, Wortsman et al. 2022a).
With the model that they were finetuned from, it keeps more of what that model knew (Wortsman et al.
2022b): what the others' heads lack in it is the mean of those that have it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Final

import torch

from albert_serve.bundle.sentence_vectors import read_sentence_vectors
from training.conversion.source import REFERENCE_HELP, open_checkpoint
from training.errors import report_errors
from training.model.checkpoint import CheckpointError, load_checkpoint, read_config, save_checkpoint
from training.model.heads import AlbertForTasks, is_classifier
from training.model.hf_names import parameters
from training.model.labels import head_config, head_record
from training.model.provenance import read_stages, record_stage
from training.options.flags import Options, add_flags, flag, read_flags
from training.options.values import Positive
from training.system.command_line import make_parser
from training.system.partial_folder import new_folder

_EXAMPLES: Final = r"""examples:
  python -m recipes.albert_small_en.average runs/first/checkpoint runs/second/checkpoint \
      --output runs/mean
  python -m recipes.albert_small_en.average runs/seed-*/best --output runs/soup
  python -m recipes.albert_small_en.average runs/tasks/checkpoint runs/pretrained/checkpoint \
      --weights 3 1 --output runs/mean
"""


def average(references: Sequence[str | Path], weights: Sequence[float], target: Path) -> None:
    """Write the weighted mean of checkpoints into a new folder, which appears whole or not at all.

    Heads, labels, tokenizer, the form of sentences' vectors and history are those of the first; the
    history names the stages that only the others have. A head that some of the others lack is the
    mean of those that have it.

    Args:
        weights: of each checkpoint, above 0; their sum is not important.

    Raises:
        CheckpointError: there are fewer than two, one cannot be read, their sizes, heads or labels
            do not fit, or a weight is not finite.
        OSError: the target is there already, or cannot be written.
    """
    if len(references) < 2 or len(weights) != len(references):
        raise CheckpointError(
            f"{len(references)} checkpoints and {len(weights)} weights: give two checkpoints or "
            "more, and a weight for each or none"
        )
    with new_folder(target) as folder, ExitStack() as stack:
        sources = [stack.enter_context(open_checkpoint(reference)) for reference in references]
        folders = [source.folder for source in sources]
        model = _mean(folders, weights)
        save_checkpoint(
            model,
            folder,
            tokenizer_from=folders[0],
            extra_config=head_config(read_config(folders[0]), model.tasks),
            sentence_vectors=read_sentence_vectors(folders[0]),
        )
        first, *others = (read_stages(each) for each in folders)
        averaged = [{"stages": [stage for stage in each if stage not in first]} for each in others]
        record = {"weights": list(weights), "averaged": averaged}
        record_stage(folder, "recipes.albert_small_en.average", record, earlier=first)


def _mean(folders: Sequence[Path], weights: Sequence[float]) -> AlbertForTasks:
    """Return the first model with the mean of all weights, in fp32 from sums in fp64."""
    model = load_checkpoint(folders[0])
    tensors = parameters(model)
    sums = {name: weights[0] * tensor.detach().double() for name, tensor in tensors.items()}
    totals = dict.fromkeys(tensors, weights[0])
    for folder, weight in zip(folders[1:], weights[1:], strict=True):
        other = load_checkpoint(folder)
        _check_fit(model, other, folders[0], folder)
        for name, tensor in parameters(other).items():
            sums[name] += weight * tensor.detach().double()
            totals[name] += weight
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(sums[name] / totals[name])
    return model


def _check_fit(model: AlbertForTasks, other: AlbertForTasks, first: Path, second: Path) -> None:
    if model.config != other.config or not other.tasks.items() <= model.tasks.items():
        raise CheckpointError(f"{second} has other sizes than {first}, or heads that it lacks")
    configs = [read_config(folder) for folder in (first, second)]
    for head in other.tasks:
        labels = [head_record(config, head).get("id2label") for config in configs]
        if is_classifier(head) and labels[0] != labels[1]:
            raise CheckpointError(f"{first} and {second} differ in their labels (id2label)")


@dataclass(frozen=True, kw_only=True)
class _AverageConfig(Options, title="average"):
    """The checkpoints, their weights and the folder to write."""

    checkpoints: Sequence[str]
    weights: tuple[Positive, ...] = flag("of each (1)", (), metavar="NUMBER")
    output: Path = flag("the folder to write", MISSING, metavar="FOLDER")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser("python -m recipes.albert_small_en.average", __doc__, _EXAMPLES)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=REFERENCE_HELP)
    add_flags(parser, _AverageConfig)
    values = parser.parse_args(arguments)
    checkpoints = values.checkpoints
    return report_errors(lambda: _run(read_flags(_AverageConfig, values, checkpoints=checkpoints)))


def _run(config: _AverageConfig) -> int:
    weights = config.weights or [1.0] * len(config.checkpoints)
    average(config.checkpoints, weights, config.output)
    print(f"the mean of {len(config.checkpoints)} checkpoints is in {config.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
