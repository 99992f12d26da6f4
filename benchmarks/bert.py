"""ALBERT beside BERT of the same shape: what factorised embeddings and sharing save and cost.

BERT's shape has embeddings as wide as its hidden states, and layers that share nothing. Measures
training and serving of both with this package, and of BERT with `transformers`, in turns. A shape
with steps (`128x4@1000`) is also pretrained, both for as many steps and ALBERT for as much CPU
time as BERT took. Writes `runs/` and `bert.md` into the output folder; the same
command goes on after the last model that was finished.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from albert_serve.config import AlbertConfig
from albert_serve.files import write_atomically
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.ablations import HEADINGS, Variant, cells, make_run, read_figures, settings_of
from benchmarks.engine.contestants import CONTESTANTS, ModelJob
from benchmarks.engine.models import TOKENIZER_FILE, FormPlan, make_form, size_on_disk
from benchmarks.harness.checkpoint import make_checkpoint
from benchmarks.harness.page import bullets, describe_machine, table
from benchmarks.harness.process import BenchmarkError, Worker
from benchmarks.harness.trainers import (
    HfSettings,
    TrainerJob,
    add_trainer_options,
    measure_in_turns,
)
from benchmarks.pretrain import PretrainingCase, make_examples
from training.data.shards import Shards
from training.errors import report_errors
from training.loop.progress import is_known_run, record_run
from training.options.values import parse_count
from training.system.command_line import make_parser

_ALBERT: Final = "ALBERT"
_BERT: Final = "BERT's shape"
_HF_BERT: Final = "BERT of transformers"
# The paper's embedding size of all models, but at most half of the hidden size.
_EMBEDDING_SIZE: Final = 128
_HEAD_SIZE: Final = 64
# Sentence order is not learnt in so few steps.
_SENTENCE_WEIGHT: Final = 0.1
_CLASSIFICATION: Final = "text-classification"
_NUM_EXAMPLES: Final = 256
_NUM_POOLED: Final = 4096
_SHAPE: Final = re.compile(r"(\d+)x(\d+)(?:@(\d+))?")
_COSTS: Final = (
    *("parameters", "on disk", "training: tokens/CPU s", "training: memory"),
    *("one text of {length} tokens", "serving: memory"),
)
_QUALITY: Final = slice(1, 4)  # of the columns of ablations
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.bert --shards wiki-shards/ --validation held-out-shards/ \
      --models 64x4@1500 128x4@1000 256x6@350 768x12 --no-compile --threads 1
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _BertCase(PretrainingCase):
    """BERT of `transformers`, with its own sentence task's head."""

    def make_hf_model(self, attention: str) -> Any:
        """Return the model of `transformers`, at its first weights."""
        import transformers

        torch.manual_seed(0)
        config = _hf_config(self.config)
        config._attn_implementation = attention
        return transformers.BertForPreTraining(config)

    def hf_rows(self) -> Sequence[dict[str, Any]]:
        """Return the examples with BERT's name of the sentence task."""
        order = "sentence_order_label"
        return [
            {name if name != order else "next_sentence_label": row[name] for name in row}
            for row in self.examples
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """A shape to compare, and the steps of its pretraining; none for its costs alone."""

    hidden_size: int
    num_layers: int
    num_steps: int

    @classmethod
    def parse(cls, text: str) -> _Model:
        """Read `HIDDENxLAYERS@STEPS`."""
        match = _SHAPE.fullmatch(text)
        sizes = [int(each or 0) for each in match.groups()] if match else [0, 0, 0]
        if not sizes[1] or not sizes[0] or sizes[0] % _HEAD_SIZE:
            raise BenchmarkError(
                f"--models {text}: write HIDDENxLAYERS or HIDDENxLAYERS@STEPS, such as "
                f"128x4@1000; the hidden size is a multiple of {_HEAD_SIZE}"
            )
        return cls(hidden_size=sizes[0], num_layers=sizes[1], num_steps=sizes[2])

    @property
    def name(self) -> str:
        """The shape."""
        return f"{self.hidden_size}x{self.num_layers}"

    @property
    def embedding_size(self) -> int:
        """ALBERT's."""
        return min(_EMBEDDING_SIZE, self.hidden_size // 2)

    def configs(self, vocab_size: int, length: int) -> dict[str, AlbertConfig]:
        """Return ALBERT's sizes, and BERT's."""
        albert = AlbertConfig(
            vocab_size=vocab_size,
            embedding_size=self.embedding_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.hidden_size // _HEAD_SIZE,
            ffn_size=4 * self.hidden_size,
            max_positions=length,
        )
        bert = replace(albert, embedding_size=self.hidden_size, sharing="none")
        return {_ALBERT: albert, _BERT: bert, _HF_BERT: bert}


def _hf_config(config: AlbertConfig) -> Any:
    import transformers

    hf = config.to_hf()
    shared = transformers.BertConfig().to_dict().keys() & hf.keys() - {"model_type"}
    return transformers.BertConfig(**{key: hf[key] for key in shared}, dtype="float32")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    return report_errors(lambda: _run(options))


def _run(options: Namespace) -> int:
    models = [_Model.parse(text) for text in options.models]
    torch.set_num_threads(options.threads)
    names = ("length", "batch_size", "sentence_weight", "held_out_tokens", "threads")
    if not is_known_run(options.output, {"bert": (settings := settings_of(options, names))}):
        record_run(options.output, {"bert": settings})
    text = bullets(describe_machine(options.threads))
    for model in models:
        costs = _costs_table(_read_costs(model, options), options.length)
        text = f"{text}\n\n## {model.name}\n\n{costs}"
        if model.num_steps:
            text += f"\n\n{_quality_table(_pretrain(model, options))}"
        write_atomically(options.output / "bert.md", f"{text}\n".encode())
    print(text)
    return 0


def _read_costs(model: _Model, options: Namespace) -> dict[str, dict[str, float]]:
    """Return the costs of each of a shape's models; they are measured where they were not yet."""
    folder = options.output / "runs" / model.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "costs.json"
    if not file.is_file():
        sized = Namespace(**{**vars(options), "output": folder.resolve()})
        trained, served = _measure_training(model, sized), _measure_serving(model, sized)
        costs = {label: trained[label] | served[label] for label in trained}
        write_atomically(file, json.dumps(costs, indent=1).encode())
    read: dict[str, dict[str, float]] = json.loads(file.read_bytes())
    return read


def _configs(model: _Model, options: Namespace) -> dict[str, AlbertConfig]:
    tokenizer = AlbertTokenizer.from_file(options.tokenizer / TOKENIZER_FILE)
    return model.configs(tokenizer.vocab_size, options.length)


def _measure_training(model: _Model, options: Namespace) -> dict[str, dict[str, float]]:
    """Train the models in turns with AdamW."""
    length, tokenizer = options.length, options.tokenizer.resolve()
    shards = Shards.open(options.shards, tokenizer / TOKENIZER_FILE)
    examples = make_examples(shards, tokenizer, length=length, num_examples=_NUM_EXAMPLES)
    peer = HfSettings(num_rows=options.batch_size, keeps_memory=True)
    configs = _configs(model, options)
    jobs = [
        TrainerJob(
            title=label,
            case=_BertCase(
                config=config,
                length=length,
                num_rows=options.batch_size,
                shards=options.shards.resolve(),
                examples=examples,
                tokenizer=tokenizer,
            ),
            hf=peer if label == _HF_BERT else None,
            device=options.device.type,
            num_threads=options.threads,
            compiles=options.compile,
        )
        for label, config in configs.items()
    ]
    bar: tqdm[Any]
    with tqdm(total=len(jobs) * (options.rounds + 1), disable=None, unit="turn") as bar:
        results = measure_in_turns(jobs, options, bar)
    for result in results:
        if result.failure:
            raise BenchmarkError(result.failure)
    return {
        result.job.title: {
            "training_tokens_per_cpu_s": statistics.median(
                turn.tokens_per_cpu_s for turn in result.turns
            ),
            "training_bytes": max(turn.peak_bytes for turn in result.turns),
        }
        for result in results
    }


def _measure_serving(model: _Model, options: Namespace) -> dict[str, dict[str, float]]:
    """Classify one text of the full length in turns: bundles in fp32, and `transformers`."""
    pool = Shards.open(options.shards, options.tokenizer / TOKENIZER_FILE).parts[0].tokens
    costs: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        workers = {}
        for label, config in _configs(model, options).items():
            folder = options.output / label.replace(" ", "-")
            costs[label] = _make_served(label, config, folder, options.tokenizer)
            job = ModelJob(
                contestant=CONTESTANTS["transformers-fp32" if label == _HF_BERT else "ours-fp32"],
                model=folder / ("checkpoint" if label == _HF_BERT else "bundle"),
                tokenizer=options.tokenizer.resolve() / TOKENIZER_FILE,
                num_threads=options.threads,
                max_tokens=options.length,
                pool=pool[:_NUM_POOLED].tolist(),
                shape_s=options.turn / 4,
            )
            environment, log = job.environment, folder / "serving.log"
            worker = Worker(
                label, "benchmarks.engine.player", job, environment=environment, log=log
            )
            workers[label] = stack.enter_context(worker)
            workers[label].receive()
        shape = f"1x{options.length}"
        rounds = [
            {label: worker.ask(shape) for label, worker in workers.items()}
            for _ in range(options.rounds + 1)
        ]
    for label, cost in costs.items():
        turns = [each[label] for each in rounds[1:]]
        cost["serving_ms"] = 1e3 * statistics.median(turn.seconds for turn in turns)
        cost["serving_bytes"] = max(turn.rss_bytes for turn in turns)
    return costs


def _make_served(
    label: str, config: AlbertConfig, folder: Path, tokenizer: Path
) -> dict[str, float]:
    """Write the checkpoint, or also the bundle, into a folder; return parameters and bytes."""
    checkpoint = folder / "checkpoint"
    if label == _HF_BERT:
        import transformers

        model = transformers.BertForSequenceClassification(_hf_config(config))
        model.save_pretrained(checkpoint)
        return {"parameters": model.bert.num_parameters(), "bytes": size_on_disk(checkpoint)}
    make_checkpoint(config, checkpoint, _CLASSIFICATION, tokenizer=tokenizer)
    plan = FormPlan(
        form="bundle-fp32",
        checkpoint=checkpoint,
        target=folder / "bundle",
        max_tokens=config.max_positions,
        calibration=(),
    )
    return {"parameters": config.num_backbone_params, "bytes": make_form(plan)}


def _pretrain(model: _Model, options: Namespace) -> dict[str, dict[str, Any]]:
    """Return the figures of both models after as many steps, and of ALBERT after as much time."""
    albert = Variant(
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.hidden_size // _HEAD_SIZE,
        sharing="all",
        embedding_size=model.embedding_size,
        sentence_task="sop",
        num_steps=model.num_steps,
        seed=options.seed,
    )
    bert = replace(albert, sharing="none", embedding_size=model.hidden_size)
    figures = {
        _ALBERT: _train(model, albert, options),
        _BERT: _train(model, bert, options),
    }
    ratio = figures[_BERT]["cpu_s"] / figures[_ALBERT]["cpu_s"]
    longer = replace(albert, num_steps=round(model.num_steps * ratio))
    return {**figures, f"{_ALBERT}, as long": _train(model, longer, options)}


def _train(model: _Model, variant: Variant, options: Namespace) -> dict[str, Any]:
    """Return the figures of a model; one that was stopped begins anew, since its time counts."""
    folder = options.output / "runs" / model.name / variant.name
    if read_figures(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)
        if status := make_run(variant, folder, options):
            raise BenchmarkError(f"the run in {folder} ended with status {status}")
    figures = read_figures(folder)
    assert figures is not None
    return figures


def _costs_table(costs: Mapping[str, Mapping[str, float]], length: int) -> str:
    rows = [
        [
            label,
            f"{cost['parameters'] / 1e6:.2f}M",
            f"{cost['bytes'] / 1e6:.1f} MB",
            f"{cost['training_tokens_per_cpu_s']:,.0f}",
            f"{cost['training_bytes'] / 1e6:,.0f} MB",
            f"{cost['serving_ms']:.1f} ms",
            f"{cost['serving_bytes'] / 1e6:,.0f} MB",
        ]
        for label, cost in costs.items()
    ]
    return table(["", *(heading.format(length=length) for heading in _COSTS)], rows)


def _quality_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [
            label,
            f"{each['variant']['num_steps']:,}",
            f"{each['cpu_s']:.0f}",
            *list(cells([each]))[_QUALITY],
        ]
        for label, each in figures.items()
    ]
    return table(["", "steps", "CPU s", *HEADINGS[_QUALITY]], rows)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("python -m benchmarks.bert", __doc__, _EXAMPLES)
    add = parser.add_argument
    add("--shards", type=Path, required=True, help="folder that albert-serve prepare wrote")
    add("--validation", type=Path, required=True, help="the same of held-out text")
    shapes = "sizes, and the steps of the pretraining that compares quality"
    add("--models", nargs="+", required=True, metavar="HIDDENxLAYERS[@STEPS]", help=shapes)
    add("--seed", type=int, default=0, help="of each run (0)")
    add("--length", type=parse_count, default=128, help="tokens a row (%(default)s)")
    add("--batch-size", type=parse_count, default=16, help="rows a step (%(default)s)")
    measured = "held-out text to measure on, in rows of --length tokens (%(default)s)"
    add("--held-out-tokens", type=parse_count, default=1 << 18, help=measured)
    add_trainer_options(parser, "runs/benchmark-bert", 3)
    parser.set_defaults(sentence_weight=_SENTENCE_WEIGHT, initialize_from=None)
    return parser


if __name__ == "__main__":
    # Imported by its name, because processes unpickle the jobs by it.
    from benchmarks.bert import main as run

    sys.exit(run())
