"""Speed of finetuning with this package, against the `Trainer` of `transformers`.

Trains the same model on the same tokenised examples, with the same number of examples a step, in
bf16 (fp32 on a CPU without it) and with AdamW, in turns, and prints examples a second, memory and
how many times faster ours is, as the median over rounds. Padding (batches of like lengths, or all
to the full length) and compilation of `transformers` are those that are fastest in a turn of each.
Writes `results.json` into the output folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.harness.page import bullets, describe_machine, write_between
from benchmarks.harness.process import REPOSITORY, BenchmarkError, Channel
from benchmarks.harness.trainers import (
    HfSettings,
    TrainerContest,
    TrainerJob,
    TrainerResult,
    sized_config,
    train_in_turns,
    trainer_table,
)
from training.data.feeds import Division, example_feed, labelled_examples
from training.data.labelled.columns import COMMON_COLUMNS
from training.data.labelled.texts import read_labelled
from training.data.questions import locate_answers, read_squad, span_examples
from training.errors import report_errors
from training.loop.distributed import World
from training.loop.progress import Progress
from training.loop.step import Run
from training.losses import LOSS_OF, Objective, compiled_losses
from training.model.heads import AlbertForTasks
from training.optim.optimizers import OptimizerSettings, Schedule, build_optimizers
from training.run.options import add_device, parse_count, parse_duration
from training.system.command_line import make_parser
from training.system.precision import PrecisionName, product_dtype

FinetuningTask = Literal["text-classification", "question-answering"]
_PAGE: Final = REPOSITORY / "docs" / "benchmarks.md"
_BEGIN: Final = "<!-- written by make bench-finetune: begin -->"
_END: Final = "<!-- written by make bench-finetune: end -->"
_DATA: Final = REPOSITORY / "tests" / "data"
_LENGTHS: Final = {"text-classification": 128, "question-answering": 384}
_BATCH_SIZES: Final = {"text-classification": 32, "question-answering": 16}
_BATCHES_OF_EXAMPLES: Final = 64
# At which neither side's loss diverges.
_LR: Final = 1e-5
_ROUNDING: Final = 8
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.finetune
  python -m benchmarks.finetune --texts sst2/train.tsv --questions squad/train-v1.1.json --write
  python -m benchmarks.finetune --tasks text-classification --shapes base --rounds 3
"""


@dataclass(frozen=True, slots=True)
class TokenisedExample:
    """A tokenised example.

    Attributes:
        target: a label of two, or the first and last position of an answer.
    """

    ids: list[int]
    types: list[int]
    target: Any


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


def read_examples(
    task: FinetuningTask,
    files: Sequence[Path],
    tokenizer: AlbertTokenizer,
    *,
    length: int,
    num_examples: int,
) -> list[TokenisedExample]:
    """Return the first examples of files, as `training.finetune` makes them.

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
        assert not isinstance(example.label, tuple)
        yield TokenisedExample(example.ids, example.types, int(example.label) % 2)


def _spans(
    files: Sequence[Path], tokenizer: AlbertTokenizer, length: int, num_examples: int
) -> Iterator[TokenisedExample]:
    questions, _ = locate_answers(read_squad(files)[:num_examples])
    for question in questions:
        for window in span_examples(question, tokenizer, length=length):
            yield TokenisedExample(window.ids, window.types, list(window.target))


def build_ours(job: TrainerJob) -> Run:
    """Return the run of `training.finetune`, with AdamW as `transformers` has it."""
    case: FinetuningCase = job.data
    device = torch.device(job.device)
    name: PrecisionName = "bf16" if product_dtype(device) == torch.bfloat16 else "fp32"
    torch.manual_seed(0)
    model = AlbertForTasks(case.config, {case.task: 2}).to(device)
    settings = OptimizerSettings(
        name="adamw", lr=_LR, adamw_lr=_LR, pooled_factor=1.0, weight_decay=0.01
    )
    feed = example_feed(
        case.task,
        case.examples,
        case.config,
        batch_size=case.batch_size,
        seed=0,
        division=Division(by_length=device.type == "cpu"),
    )
    losses = compiled_losses() if job.compiles else LOSS_OF
    return Run(
        model=model,
        objective=Objective(model, device, losses),
        optimizers=build_optimizers(model, settings, name),
        schedule=Schedule(kind="wsd", warmup=0.05, decay=0.1),
        feeds=[feed],
        weights=[1.0],
        loss_weights={},
        clip_norm=1.0,
        seed=0,
        world=World(device=device),
        progress=Progress(num_steps=sys.maxsize, budget_s=None),
        precision=name,
    )


class ExampleRows(Dataset[TokenisedExample]):
    """The examples under the names by which `transformers` groups them by length."""

    def __init__(self, examples: Sequence[TokenisedExample]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        example = self._examples[index]
        return {"input_ids": example.ids, "types": example.types, "target": example.target}


@dataclass(frozen=True, slots=True)
class PadRows:
    """Pads the examples of a batch to `length`, or to the longest rounded up if that is less."""

    task: FinetuningTask
    length: int
    is_full: bool

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """The batch, with the targets as the model takes them."""
        longest = max(len(row["input_ids"]) for row in rows)
        rounded = -(-longest // _ROUNDING) * _ROUNDING
        size = self.length if self.is_full else min(self.length, rounded)
        ids = torch.zeros(len(rows), size, dtype=torch.long)
        types, mask = ids.clone(), ids.clone()
        for number, row in enumerate(rows):
            end = len(row["input_ids"])
            ids[number, :end] = torch.tensor(row["input_ids"])
            types[number, :end] = torch.tensor(row["types"])
            mask[number, :end] = 1
        targets = torch.tensor([row["target"] for row in rows])
        batch = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
        if self.task == "text-classification":
            return {**batch, "labels": targets}
        return {**batch, "start_positions": targets[:, 0], "end_positions": targets[:, 1]}


def make_hf_model(case: FinetuningCase, attention: str) -> Any:
    """Return the model of `transformers`, at its first weights."""
    import transformers

    classes = {
        "text-classification": transformers.AlbertForSequenceClassification,
        "question-answering": transformers.AlbertForQuestionAnswering,
    }
    config = transformers.AlbertConfig.from_dict({**case.config.to_hf(), "num_labels": 2})
    config._attn_implementation = attention
    torch.manual_seed(0)
    return classes[case.task](config)


def serve(channel: Channel, job: TrainerJob) -> None:
    """Be the process of a job."""
    torch.set_num_threads(job.num_threads)
    if job.hf is None:
        train_in_turns(build_ours(job), channel)
        return
    from benchmarks.harness.hf_trainer import train_hf_in_turns

    case: FinetuningCase = job.data
    model = make_hf_model(case, job.hf.attention)
    collate = PadRows(case.task, case.length, job.hf.padding == "full")
    train_hf_in_turns(channel, job, model, ExampleRows(case.examples), collate, _LR)


def _markdown(results: Sequence[TrainerResult]) -> str:
    """Return the table of a case, with its title.

    Turns see short and long examples in different parts, so that examples a second are tokens a
    second over the mean length.
    """
    examples = results[0].job.data.examples
    mean_tokens = sum(len(example.ids) for example in examples) / len(examples)
    rates = [
        ("examples/s", lambda result: f"{result.tokens_per_s / mean_tokens:,.1f}"),
        ("tokens/s", lambda result: f"{result.tokens_per_s:,.0f}"),
    ]
    title = f"{results[0].job.title}; {mean_tokens:.0f} tokens on average"
    return f"{title}\n\n{trainer_table(results, rates)}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuningJob(TrainerJob):
    """A job whose name says whether it is compiled."""

    @property
    def name(self) -> str:
        """The contestant and its settings."""
        compiled = "compiled" if self.compiles else "not compiled"
        if self.hf is None:
            return f"ours ({compiled})"
        return f"transformers ({self.hf}, {compiled})"


def _measure(
    task: FinetuningTask, shape: str, options: argparse.Namespace, contest: TrainerContest
) -> list[TrainerResult]:
    length, batch_size = _LENGTHS[task], options.batch_size or _BATCH_SIZES[task]
    examples = read_examples(
        task,
        options.texts if task == "text-classification" else options.questions,
        AlbertTokenizer.from_file(options.tokenizer / "tokenizer.json"),
        length=length,
        num_examples=_BATCHES_OF_EXAMPLES * batch_size,
    )
    ours = FinetuningJob(
        module="benchmarks.finetune",
        title=f"{task}, {shape}, {batch_size} examples a step of at most {length} tokens",
        data=FinetuningCase(
            task=task,
            config=sized_config(shape, length),
            length=length,
            batch_size=batch_size,
            examples=examples,
        ),
        hf=None,
        device=options.device.type,
        num_threads=options.threads,
        compiles=options.compile,
    )
    candidates = [
        replace(ours, hf=settings, compiles=compiles)
        for settings, compiles in _candidates(batch_size, options)
    ]
    best = contest.fastest(candidates)
    assert best.hf is not None
    jobs = [ours, best, replace(best, hf=replace(best.hf, keeps_memory=False))]
    if options.compile:
        jobs.insert(1, replace(ours, compiles=False))
    return contest.measure(jobs)


def _candidates(batch_size: int, options: argparse.Namespace) -> list[tuple[HfSettings, bool]]:
    """Return settings of `transformers`, each compiled or not, of which the fastest is taken."""
    grouped = HfSettings(num_rows=batch_size, padding="grouped", keeps_memory=True)
    plain = [(grouped, False), (replace(grouped, attention="eager"), False)]
    if not options.compile:
        return plain
    full = replace(grouped, padding="full")
    return [*plain, (grouped, True), (full, True)]


def _run(options: argparse.Namespace) -> int:
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    machine = list(describe_machine(options.threads))
    cases = [(task, shape) for task in options.tasks for shape in options.shapes]
    num_units = 3 * len(_candidates(1, options)) + (3 + options.compile) * (options.rounds + 2)
    tables, records = [], []
    bar: tqdm[Any]
    with tqdm(total=len(cases) * num_units, disable=None, unit="turn") as bar:
        contest = TrainerContest(rounds=options.rounds, turn_s=options.turn, logs=output, bar=bar)
        for task, shape in cases:
            results = _measure(task, shape, options, contest)
            tables.append(_markdown(results))
            records.append({"case": results[0].job.title, "results": [*map(_record, results)]})
            content = {"machine": machine, "cases": records}
            (output / "results.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
            with bar.external_write_mode():
                print(f"\n{tables[-1]}")
    if options.write is not None:
        write_between(options.write, _BEGIN, _END, "\n".join([bullets(machine), "", *tables]))
    print(f"{output / 'results.json'} has every turn")
    return 0


def _record(result: TrainerResult) -> dict[str, Any]:
    turns = [asdict(turn) for turn in result.turns]
    return {"name": result.job.name, "turns": turns, "failure": result.failure}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.finetune", __doc__, _EXAMPLES)
    add = parser.add_argument
    tasks, shapes = list(get_args(FinetuningTask)), ["small", "base"]
    add("--tasks", nargs="+", choices=tasks, default=tasks, help="(both)")
    add("--shapes", nargs="+", choices=list(PRESETS), default=shapes, help="(small base)")
    texts, questions = [_DATA / "banking77" / "train.csv"], [_DATA / "squad.json"]
    texts_help = "labelled texts, such as SST-2's (questions of bank customers)"
    add("--texts", nargs="+", type=Path, metavar="FILE", default=texts, help=texts_help)
    questions_help = "SQuAD files (an excerpt)"
    add("--questions", nargs="+", type=Path, metavar="FILE", default=questions, help=questions_help)
    shipped = REPOSITORY / "models" / "albert-small-en"
    add("--tokenizer", type=Path, default=shipped, help="folder (the shipped model's)")
    add("--batch-size", type=parse_count, help="examples a step (32 texts, 16 questions)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="(yes)")
    add("--output", type=Path, default=Path("runs/benchmark-finetune"), help="(%(default)s)")
    add("--rounds", type=parse_count, default=3, help="turns that count (%(default)s)")
    add("--turn", type=parse_duration, metavar="8s", default=8.0, help="length of a turn (8s)")
    add("--threads", type=parse_count, default=torch.get_num_threads(), help="(%(default)s)")
    write = "put the tables into a page between its marks (docs/benchmarks.md)"
    add("--write", nargs="?", type=Path, const=_PAGE, metavar="PAGE", help=write)
    add_device(parser)
    return parser


if __name__ == "__main__":
    # Under its own name, by which the processes find what is sent to them.
    from benchmarks.finetune import main as run

    sys.exit(run())
