"""Speed of finetuning with this package, against the `Trainer` of `transformers`.

Trains the same model on the same tokenised examples, with the same number of examples a step, in
bf16 (fp32 on a CPU without it) and with AdamW, in turns, and prints examples a second, memory and
how many times faster ours is, as the median over rounds. Writes `results.json` and `tables.md` into
the output folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch

from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.page import describe_machine, write_between
from benchmarks.harness.process import REPOSITORY, BenchmarkError
from benchmarks.harness.trainers import (
    HfSettings,
    TrainerJob,
    TrainerResult,
    add_trainer_options,
    compare_trainers,
    sized_config,
    trainer_table,
)
from training.data.batch import TokenisedExample
from training.data.labelled.columns import COMMON_COLUMNS
from training.data.labelled.texts import read_labelled
from training.data.questions import locate_answers, read_squad, span_examples
from training.data.streams import Division, example_stream, labelled_examples
from training.errors import report_errors
from training.loop.distributed import World
from training.loop.driver import build_run
from training.loop.progress import Progress
from training.loop.step import Mixture, Run
from training.losses import LOSS_OF, compiled_losses
from training.model.heads import AlbertForTasks
from training.optim.hyperparameters import Hyperparameters
from training.options.values import parse_count
from training.system.command_line import make_parser
from training.system.precision import PrecisionName, product_dtype

FinetuningTask = Literal["text-classification", "question-answering"]
_PAGE: Final = REPOSITORY / "docs" / "measurements.md"
_BEGIN: Final = "<!-- written by make bench-finetune: begin -->"
_END: Final = "<!-- written by make bench-finetune: end -->"
_DATA: Final = REPOSITORY / "tests" / "data"
_LENGTHS: Final = {"text-classification": 128, "question-answering": 384}
_BATCH_SIZES: Final = {"text-classification": 32, "question-answering": 16}
_BATCHES_OF_EXAMPLES: Final = 64
# At this rate neither side's loss diverges.
_LR: Final = 1e-5
_HYPERPARAMETERS: Final = Hyperparameters(
    optimizer="adamw",
    lr=_LR,
    adamw_lr=_LR,
    pooled_factor=1.0,
    weight_decay=0.01,
    schedule="wsd",
    warmup=0.05,
    decay=0.1,
    sentence_weight=1.0,
    clip_norm=1.0,
)
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.finetune
  python -m benchmarks.finetune --texts sst2/train.tsv --questions squad/train-v1.1.json --write
  python -m benchmarks.finetune --tasks text-classification --shapes base --rounds 3
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuningCase:
    """One model on one task, with two labels or spans.

    Attributes:
        length: the most tokens of an example.
        batch_size: examples a step, of both sides.
    """

    task: FinetuningTask
    config: AlbertConfig
    length: int
    batch_size: int
    examples: Sequence[TokenisedExample]

    @property
    def lr(self) -> float:
        """The learning rate."""
        return _LR

    def build_ours(self, job: TrainerJob) -> Run:
        """Return the run of `albert-serve finetune`."""
        device = torch.device(job.device)
        name: PrecisionName = "bf16" if product_dtype(device) == torch.bfloat16 else "fp32"
        torch.manual_seed(0)
        stream = example_stream(
            self.task,
            self.examples,
            self.config,
            batch_size=self.batch_size,
            seed=0,
            division=Division(by_length=device.type == "cpu"),
        )
        return build_run(
            AlbertForTasks(self.config, {self.task: 2}),
            Mixture(streams=[stream], weights=[1.0], loss_weights={}),
            compiled_losses() if job.compiles else LOSS_OF,
            _HYPERPARAMETERS,
            progress=Progress(num_steps=sys.maxsize, budget_s=None),
            world=World(device=device),
            precision=name,
        )

    def make_hf_model(self, attention: str) -> Any:
        """Return the model of `transformers`, at its first weights."""
        import transformers

        classes = {
            "text-classification": transformers.AlbertForSequenceClassification,
            "question-answering": transformers.AlbertForQuestionAnswering,
        }
        config = transformers.AlbertConfig.from_dict({**self.config.to_hf(), "num_labels": 2})
        config._attn_implementation = attention
        torch.manual_seed(0)
        return classes[self.task](config)

    def hf_rows(self) -> list[dict[str, Any]]:
        """Return the examples under the names of `transformers`."""
        rows = []
        for example in self.examples:
            row = {"input_ids": example.ids, "token_type_ids": example.types}
            if self.task == "text-classification":
                rows.append({**row, "labels": example.target})
            else:
                start, end = example.target
                rows.append({**row, "start_positions": start, "end_positions": end})
        return rows


def read_examples(
    task: FinetuningTask,
    files: Sequence[Path],
    tokenizer: AlbertTokenizer,
    *,
    length: int,
    num_examples: int,
) -> list[TokenisedExample]:
    """Return the first examples of files, as `albert-serve finetune` makes them.

    Raises:
        BenchmarkError: there are none.
        CorpusError: the files cannot be read.
    """
    make = _texts if task == "text-classification" else _spans
    examples = list(islice(make(files, tokenizer, length, num_examples), num_examples))
    if not examples:
        raise BenchmarkError(f"{', '.join(map(str, files))}: no examples")
    return examples


def _texts(
    files: Sequence[Path], tokenizer: AlbertTokenizer, length: int, num_examples: int
) -> Iterator[TokenisedExample]:
    """Yield texts; of more than two labels the even ones count as one, as do the odd ones."""
    texts, _ = read_labelled(files, None, COMMON_COLUMNS, "single_label_classification")
    examples, _ = labelled_examples(texts[:num_examples], tokenizer, length=length, truncation=True)
    for example in examples:
        yield replace(example, target=int(example.target) % 2)


def _spans(
    files: Sequence[Path], tokenizer: AlbertTokenizer, length: int, num_examples: int
) -> Iterator[TokenisedExample]:
    questions, _ = locate_answers(read_squad(files)[:num_examples])
    for question in questions:
        yield from span_examples(question, tokenizer, length=length)


def _markdown(results: Sequence[TrainerResult]) -> str:
    """Return the table of a case, with its title.

    Turns see short and long examples in different parts, so that examples a second are tokens a
    second over the mean length.
    """
    case = results[0].job.case
    assert isinstance(case, FinetuningCase)
    mean_tokens = sum(len(example.ids) for example in case.examples) / len(case.examples)
    rates = [
        ("examples/s", lambda result: f"{result.tokens_per_s / mean_tokens:,.1f}"),
        ("tokens/s", lambda result: f"{result.tokens_per_s:,.0f}"),
    ]
    title = f"{results[0].job.title}; {mean_tokens:.0f} tokens on average"
    return f"{title}\n\n{trainer_table(results, rates)}"


def _jobs(task: FinetuningTask, shape: str, options: argparse.Namespace) -> list[TrainerJob]:
    """Return the jobs of a case, ours first.

    On a CPU `transformers` has the settings that were its fastest among all tried, in all cases of
    docs/measurements.md: batches of like lengths, eager attention, not compiled, memory kept. On a
    GPU it has SDPA, compiled and not.
    """
    length, batch_size = _LENGTHS[task], options.batch_size or _BATCH_SIZES[task]
    examples = read_examples(
        task,
        options.texts if task == "text-classification" else options.questions,
        AlbertTokenizer.from_file(options.tokenizer / "tokenizer.json"),
        length=length,
        num_examples=_BATCHES_OF_EXAMPLES * batch_size,
    )
    case = FinetuningCase(
        task=task,
        config=sized_config(shape, length),
        length=length,
        batch_size=batch_size,
        examples=examples,
    )
    ours = TrainerJob(
        title=f"{task}, {shape}, {batch_size} examples a step of at most {length} tokens",
        case=case,
        hf=None,
        device=options.device.type,
        num_threads=options.threads,
        compiles=False,
    )
    compiled = [replace(ours, compiles=True)] if options.compile else []
    peer = HfSettings(num_rows=batch_size, padding="grouped")
    if ours.device == "cuda":
        return [*compiled, ours, *(replace(job, hf=peer) for job in [*compiled, ours])]
    eager = replace(peer, attention="eager")
    peers = [replace(ours, hf=replace(eager, keeps_memory=keeps)) for keeps in (True, False)]
    return [*compiled, ours, *peers]


def _run(options: argparse.Namespace) -> int:
    jobs = [_jobs(task, shape, options) for task in options.tasks for shape in options.shapes]
    text = compare_trainers(jobs, options, list(describe_machine(options.threads)), _markdown)
    if options.write is not None:
        write_between(options.write, _BEGIN, _END, f"{text}\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    if options.quick:
        options.shapes, options.rounds, options.turn = ["small"], 1, 4.0
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.finetune", __doc__, _EXAMPLES)
    add = parser.add_argument
    tasks, shapes = list(get_args(FinetuningTask)), ["small", "base"]
    add("--tasks", nargs="+", choices=tasks, default=tasks, help="(both)")
    add("--shapes", nargs="+", choices=list(PRESETS), default=shapes, help="(small base)")
    texts, questions = [_DATA / "banking77" / "train.csv"], [_DATA / "squad.json"]
    texts_help = "labelled texts, such as SST-2's (questions of bank customers)"
    add("--texts", nargs="+", type=Path, metavar="FILE", default=texts, help=texts_help)
    questions_help = "SQuAD files (an excerpt)"
    add("--questions", nargs="+", type=Path, metavar="FILE", default=questions, help=questions_help)
    add("--batch-size", type=parse_count, help="examples a step (32 texts, 16 questions)")
    add("--quick", action="store_true", help="the small model, 1 turn of 4s: a first look")
    write = "put the tables into a page between its marks (docs/measurements.md)"
    add("--write", nargs="?", type=Path, const=_PAGE, metavar="PAGE", help=write)
    add_trainer_options(parser, "runs/benchmark-finetune", 3)
    return parser


if __name__ == "__main__":
    # Imported by its name, because processes unpickle the jobs by it.
    from benchmarks.finetune import main as run

    sys.exit(run())
