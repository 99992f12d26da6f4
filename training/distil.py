"""Distil an encoder of `transformers` (BERT, RoBERTa, MiniLM, ELECTRA) into an ALBERT.

The student learns masked tokens as in pretraining, and at each word the states of the teacher,
which reads the text unmasked: hidden states of chosen layers, or the relations of its last layer's
queries, keys and values (MiniLMv2, arXiv 2012.15828), for which hidden sizes may differ. Different
tokenizers are aligned by the characters of words. With `--start teacher` the student starts from
the teacher's embeddings and one of its layers. Writes the files of training.pretrain; the same
command resumes a run that was stopped.

With --text-classification a finetuned teacher's logits label the texts, and the student's
classifier learns them. The options are then those of training.finetune.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from albert_serve.config import AlbertConfig
from albert_serve.tokenizer import AlbertTokenizer
from training import finetune
from training.distillation.job import Distillation, LossWeights, check_objectives
from training.distillation.losses import Objectives
from training.distillation.start import check_start, default_layers, sizes_of
from training.distillation.teacher import Teacher, TeacherError, describe_model, load_teacher
from training.errors import report_errors
from training.loop.distributed import join_world
from training.loop.progress import is_known_run
from training.loop.reproducibility import run_precision
from training.run.options import (
    add_end,
    add_reports,
    check_end,
    parse_count,
    parse_weight,
)
from training.run.pretraining import corpus_record, make_job, train_job
from training.run.pretraining_options import (
    add_data,
    add_machine,
    add_recipe,
    add_sizes,
    changed_recipe,
    make_config,
    open_start,
)
from training.run.recipes import DISTILLATION, Recipe
from training.system.command_line import make_parser

_EXAMPLES: Final = r"""examples:
  python -m training.distil --teacher sentence-transformers/all-MiniLM-L6-v2 \
      --corpus wiki/*.jsonl.xz --tokenizer vocab/ --output runs/student \
      --embedding-size 256 --budget 2h --validation held-out.jsonl
  python -m training.distil --teacher bert-base-uncased --hidden-weight 0 --relation-weight 1 \
      --start local --preset small --shards wiki-shards/ --tokenizer vocab/ \
      --output runs/small --budget 8h
  python -m training.distil --teacher roberta-base --initialize-from runs/base/checkpoint \
      --shards wiki-shards/ --tokenizer vocab/ --output runs/taught --budget 8h
  python -m training.distil --teacher textattack/bert-base-uncased-SST-2 \
      --initialize-from runs/student/checkpoint --text-classification reviews.txt \
      --output runs/sentiment --budget 30m
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if any(word.partition("=")[0] == "--text-classification" for word in words):
        return finetune.main(words)
    options = build_parser().parse_args(words)
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    check_end(options)
    with open_start(options) as local:
        return _train(local)


def _train(options: argparse.Namespace) -> int:
    tokenizer = AlbertTokenizer.from_file(options.tokenizer / "tokenizer.json")
    recipe = changed_recipe(DISTILLATION, options)
    teacher = load_teacher(options.teacher, options.device)
    config = _config(options, recipe, teacher, tokenizer.vocab_size)
    objectives = _objectives(options, config, teacher)
    check_objectives(objectives, config, teacher)
    start_layers = _start_layers(options, recipe, config, teacher)
    weights = LossWeights(
        masked=options.masked_weight,
        hidden=options.hidden_weight,
        relations=options.relation_weight,
    )
    record: dict[str, Any] = {
        "settings": {
            **asdict(recipe),
            "num_steps": options.steps,
            "budget_s": options.budget,
            **describe_model(teacher.name, teacher.model),
            "start_layers": list(start_layers),
            "hidden_layers": [list(pair) for pair in objectives.layers],
            "relation_heads": objectives.num_relation_heads,
            "loss_weights": asdict(weights),
        },
        "config": config.to_hf(),
        "corpus": corpus_record(options),
    }
    is_known_run(options.output, record)
    with join_world(options.device) as world:
        record["precision"] = run_precision(options.precision, options.output, world)
        teacher.model.to(world.device)
        job = make_job(options, config, recipe, world, record["precision"], num_steps=options.steps)
        distillation = Distillation(
            teacher=teacher, objectives=objectives, weights=weights, start_layers=start_layers
        )
        return train_job(options, job, distillation.build(job), record, program="training.distil")


def _config(
    options: argparse.Namespace, recipe: Recipe, teacher: Teacher, vocab_size: int
) -> AlbertConfig:
    """Return the student's config: sizes of the options, otherwise the preset's or teacher's."""
    defaults: dict[str, Any] = {}
    if options.initialize_from is None:
        if options.preset is None:
            defaults = sizes_of(teacher)
        elif recipe.start == "teacher":
            defaults = {"activation": sizes_of(teacher)["activation"]}
    return make_config(options, recipe, vocab_size, defaults)


def _objectives(options: argparse.Namespace, config: AlbertConfig, teacher: Teacher) -> Objectives:
    """Return the objectives with a weight above 0.

    Raises:
        TeacherError: all weights are 0.
    """
    if not (options.hidden_weight or options.relation_weight):
        raise TeacherError(
            "--hidden-weight and --relation-weight are both 0, so that nothing is learnt from the "
            "teacher; without one, train with training.pretrain"
        )
    pairs = options.hidden_layers or _default_pairs(config, teacher)
    heads = options.relation_heads or teacher.model.config.num_attention_heads
    return Objectives(
        layers=tuple(pairs) if options.hidden_weight else (),
        num_relation_heads=heads if options.relation_weight else 0,
    )


def _default_pairs(config: AlbertConfig, teacher: Teacher) -> list[tuple[int, int]]:
    """Return pairs of layers at each third of both depths."""
    ours, theirs = config.num_layers * config.num_inner_layers, teacher.num_layers
    thirds = ((max(1, round(ours * k / 3)), max(1, round(theirs * k / 3))) for k in (1, 2, 3))
    return sorted(set(thirds))


def _start_layers(
    options: argparse.Namespace, recipe: Recipe, config: AlbertConfig, teacher: Teacher
) -> tuple[int, ...]:
    """Return the teacher's layers that initialise the student's; empty without such a start."""
    if recipe.start != "teacher" or options.initialize_from is not None:
        if options.start_layers:
            raise TeacherError("--start-layers goes with --start teacher and new weights")
        return ()
    layers = tuple(
        options.start_layers or default_layers(config.num_attentions, teacher.num_layers)
    )
    check_start(config, teacher, layers)
    return layers


def _parse_pair(text: str) -> tuple[int, int]:
    """Parse a student's and a teacher's layer, such as `2:4`.

    Raises:
        argparse.ArgumentTypeError: the format is invalid.
    """
    ours, colon, theirs = text.partition(":")
    if not (colon and ours.isdecimal() and theirs.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of layers; write 2:4")
    return int(ours), int(theirs)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of this command."""
    parser = make_parser("training.distil", __doc__, _EXAMPLES)
    _add_teacher(parser)
    add_data(parser)
    add_sizes(parser)
    add_end(parser)
    how = parser.add_argument_group("training")
    add_recipe(how)
    add_reports(parser)
    add_machine(parser)
    return parser


def _add_teacher(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("teacher")
    add = group.add_argument
    add("--teacher", required=True, help="a model's folder, or its name on the Hugging Face hub")
    add(
        "--start",
        choices=("teacher", "local", "random"),
        help="the student's initialization: the teacher's embeddings and one of its layers "
        "(teacher), attention to neighbours, or random weights",
    )
    add(
        "--start-layers",
        nargs="+",
        type=parse_count,
        help="the teacher's layers that initialise the student's (the one at two thirds)",
    )
    add(
        "--hidden-layers",
        nargs="+",
        type=_parse_pair,
        metavar="STUDENT:TEACHER",
        help="layers whose hidden states are matched (those at each third of the depth)",
    )
    add(
        "--relation-heads",
        type=parse_count,
        help="number of relation heads (the teacher's number of attention heads)",
    )
    add("--hidden-weight", type=parse_weight, default=3.0, help="hidden-state loss (%(default)s)")
    add("--relation-weight", type=parse_weight, default=0.0, help="relation loss (%(default)s)")
    add("--masked-weight", type=parse_weight, default=1.0, help="masked-token loss (%(default)s)")


if __name__ == "__main__":
    sys.exit(main())
