"""Speed of inference with this package, against others and the hardware's peak.

Runs one ALBERT with `transformers`, ONNX Runtime, OpenVINO and this package's engine, each in a
process of its own with the same number of threads, in turns, on the same texts: calls of fixed
shapes, and a stream of texts, tokenisation included. Prints medians over rounds, ratios within
rounds, memory, load times, and how far the answers are from those of `transformers` in fp32.
Writes `tables.md` and `results.json` into the output folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tqdm import tqdm

from albert_serve.bundle.weights import read_header
from albert_serve.config import PRESETS, AlbertConfig
from albert_serve.settings import num_usable_cpus
from albert_serve.tokenizer import AlbertTokenizer
from benchmarks.engine.contest import EngineContest
from benchmarks.engine.contestants import CONTESTANTS, KINDS, TEXTS, Inputs, ModelJob, Shape
from benchmarks.engine.models import TOKENIZER_FILE, FormPlan, make_form
from benchmarks.engine.tables import EngineReport, markdown
from benchmarks.harness.page import describe_machine
from benchmarks.harness.process import REPOSITORY, BenchmarkError
from benchmarks.harness.texts import WIKI, draw_texts
from training.errors import report_errors
from training.system.command_line import make_parser
from training.vocab import build_tokenizer

_TOKENIZER: Final = REPOSITORY / "models" / "albert-small-en" / TOKENIZER_FILE
_SPIECE_FILE: Final = "spiece.model"
_NUM_CALIBRATION: Final = 64
_FEW_ROUNDS: Final = (
    "fewer than 3 rounds: the first, in which some make kernels for lengths that are new, counts"
)
# The defaults, and those of --quick.
_AMOUNTS: Final[dict[str, tuple[Any, Any]]] = {
    "shapes": (["1x8", "1x32", "1x128", "4x128", "1x512"], ["1x32", "1x128"]),
    "num_texts": (64, 16),
    "rounds": (3, 1),
}
_EXAMPLES: Final = r"""examples:
  python -m benchmarks.engine
  python -m benchmarks.engine --texts imdb/test.jsonl.xz --num-texts 96
  python -m benchmarks.engine --checkpoint runs/imdb/checkpoint --texts imdb/test.jsonl.xz
  python -m benchmarks.engine --preset large --cases shapes --contestants onnxruntime ours-fp32
  python -m benchmarks.engine --quick

Nothing else should run on the machine meanwhile. Contestants whose packages are missing are left
out; all take part after: pip install openvino nncf onnxscript
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    options = _parser().parse_args(arguments)
    for name, values in _AMOUNTS.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
    return report_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    bar: tqdm[Any]
    with tqdm(disable=None, unit="turn") as bar:
        report = _measure(options, bar)
    tables = markdown(report)
    content = json.dumps(report.to_dict(), indent=1)
    (options.output / "results.json").write_text(content, encoding="utf-8")
    (options.output / "tables.md").write_text(tables, encoding="utf-8")
    print(tables)
    minutes = (time.monotonic() - began) / 60
    print(f"{options.output / 'results.json'} has every turn; this took {minutes:.1f} minutes")
    return 0


def _measure(options: argparse.Namespace, bar: tqdm[Any]) -> EngineReport:
    machine = list(describe_machine(options.threads))
    shapes = [Shape.parse(text) for text in dict.fromkeys(options.shapes)]
    cases = [str(shape) for shape in shapes] if "shapes" in options.cases else []
    cases += [TEXTS] if "texts" in options.cases else []
    keys, notes = _present(options.contestants)
    models = _Models(options, bar)
    config = models.make_checkpoint()
    too_long = [str(shape) for shape in shapes if shape.length > config.max_positions]
    if too_long and "shapes" in options.cases:
        raise BenchmarkError(
            f"--shapes {' '.join(too_long)}: the model has {config.max_positions} positions; "
            "leave them out"
        )
    inputs = _choose_inputs(options, models.tokenizer, config.max_positions)
    jobs = [(CONTESTANTS[key], models.jobs(key, inputs)) for key in keys]
    bar.reset(sum(len(each) + options.rounds * len(cases) for _, each in jobs))
    contest = EngineContest(
        cases=cases,
        rounds=options.rounds,
        shape_s=options.turn,
        num_threads=options.threads,
        logs=options.output,
        bar=bar,
    )
    return EngineReport(
        machine=[*machine, _describe_model(options, config)],
        num_threads=options.threads,
        config=config,
        num_labels=models.num_labels,
        inputs=inputs,
        measured=contest.run([each for each in jobs if each[1]]),
        disk=models.disk,
        notes=[*notes, *models.notes, *([_FEW_ROUNDS] if options.rounds < 3 else [])],
    )


def _present(keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the contestants whose packages are installed, and advice for the others."""
    present, notes = [], []
    for key in dict.fromkeys(keys):
        lacking = [name for name in CONTESTANTS[key].modules if find_spec(name) is None]
        if lacking:
            packages = " ".join(lacking)
            notes.append(f"{CONTESTANTS[key].name} is left out: pip install {packages}")
        else:
            present.append(key)
    return present, notes


def _choose_inputs(options: argparse.Namespace, tokenizer: Path, max_tokens: int) -> Inputs:
    num_texts: int = options.num_texts
    drawn = draw_texts(
        options.texts,
        Tokenizer.from_file(str(tokenizer)),
        num_texts + _NUM_CALIBRATION,
        max_tokens,
    )
    chosen, rest = drawn[:num_texts], drawn[num_texts:]
    return Inputs(
        texts=[each.text for each in chosen],
        lengths=[len(each.ids) for each in chosen],
        calibration=[each.text for each in rest or chosen],
        pool=[token for each in chosen for token in each.ids[1:-1]],
    )


class _Models:
    """The model in the forms that contestants read, made in the output folder."""

    def __init__(self, options: argparse.Namespace, bar: tqdm[Any]) -> None:
        self._options, self._bar = options, bar
        self._folder: Path = (options.output / "models").resolve()
        self.tokenizer = self._folder / TOKENIZER_FILE
        self.num_labels = 2
        self.max_tokens = 512
        self.disk: dict[str, int] = {}
        self.notes: list[str] = []

    def make_checkpoint(self) -> AlbertConfig:
        """Write the tokenizer and the checkpoint, and return its sizes.

        Raises:
            BenchmarkError: it cannot be made, or the tokenizer is not its own.
        """
        checkpoint: Path | None = self._options.checkpoint
        source = self._options.tokenizer if checkpoint is None else _tokenizer_of(checkpoint)
        self._folder.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".model":
            build_tokenizer(source).save(str(self.tokenizer))
        else:
            AlbertTokenizer.from_file(source)  # it says what is wrong with the file
            self.tokenizer.write_bytes(source.read_bytes())
        self._make("checkpoint", checkpoint)
        self._note_random_head(checkpoint)
        content = json.loads((self._folder / "checkpoint" / "config.json").read_bytes())
        config = AlbertConfig.from_hf(content)
        self.max_tokens = config.max_positions
        self.num_labels = len(content.get("id2label") or range(2))
        num_pieces = AlbertTokenizer.from_file(self.tokenizer).vocab_size
        if num_pieces > config.vocab_size:
            raise BenchmarkError(
                f"the tokenizer has {num_pieces} pieces, the model embeddings for "
                f"{config.vocab_size}; name the model's own with --tokenizer"
            )
        return config

    def jobs(self, key: str, inputs: Inputs) -> list[ModelJob]:
        """Return the job of each variant of a contestant whose form can be made."""
        contestant, jobs = CONTESTANTS[key], []
        for variant in contestant.variants:
            if variant.form not in self.disk:
                try:
                    self._make(variant.form, self._folder / "checkpoint", inputs)
                except BenchmarkError as error:
                    self.notes.append(f"{contestant.name}: no {variant.form}: {error}")
                    continue
            if not set(variant.kinds) & set(self._options.cases):
                continue
            jobs.append(
                ModelJob(
                    contestant=contestant.name,
                    variant=variant,
                    model=self._folder / variant.form,
                    tokenizer=self._folder / "checkpoint" / TOKENIZER_FILE,
                    inputs=inputs,
                    num_threads=self._options.threads,
                    max_tokens=self.max_tokens,
                )
            )
        return jobs

    def _make(self, form: str, source: Path | None, inputs: Inputs | None = None) -> None:
        self._bar.set_postfix_str(f"making {form}")
        plan = FormPlan(
            form=form,
            source=source,
            preset=self._options.preset,
            tokenizer=self.tokenizer,
            target=self._folder / form,
            max_tokens=self.max_tokens,
            calibration=inputs.calibration if inputs else (),
        )
        self.disk[form] = make_form(plan)

    def _note_random_head(self, checkpoint: Path | None) -> None:
        weights = (checkpoint or self._folder) / "model.safetensors"
        if weights.is_file() and "classifier.weight" not in read_header(weights):
            self.notes.append(f"{weights.parent.name} has no classifier: a random one")


def _tokenizer_of(checkpoint: Path) -> Path:
    for name in (TOKENIZER_FILE, _SPIECE_FILE):
        if (checkpoint / name).is_file():
            return checkpoint / name
    raise BenchmarkError(
        f"{checkpoint} has neither {TOKENIZER_FILE} nor {_SPIECE_FILE}; "
        "a checkpoint is a folder with config.json, model.safetensors and one of them"
    )


def _describe_model(options: argparse.Namespace, config: AlbertConfig) -> str:
    checkpoint: Path | None = options.checkpoint
    name = f"{options.preset}, random weights" if checkpoint is None else checkpoint.resolve().name
    return (
        f"ALBERT {name}: {config.num_layers} layers of {config.hidden_size}, vocabulary "
        f"{config.vocab_size:,}; medians of {options.rounds} rounds"
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.engine", __doc__, _EXAMPLES)
    add = parser.add_argument_group("what is run").add_argument
    add("--output", type=Path, default=Path("runs/bench-engine"), help="(%(default)s)")
    add("--checkpoint", type=Path, help="a Hugging Face directory; without it, random weights")
    add("--preset", choices=list(PRESETS), default="base", help="their sizes (%(default)s)")
    tokenizer_help = "tokenizer.json or spiece.model for random weights (the shipped model's)"
    add("--tokenizer", type=Path, metavar="FILE", default=_TOKENIZER, help=tokenizer_help)
    names = list(CONTESTANTS)
    contestants_help = f"of {', '.join(names)} (all)"
    add("--contestants", nargs="+", choices=names, default=names, help=contestants_help)
    add = parser.add_argument_group("what it is measured at").add_argument
    add("--cases", nargs="+", choices=KINDS, default=list(KINDS), help="(all)")
    add("--shapes", nargs="+", metavar="ROWSxTOKENS", help="(1x8 1x32 1x128 4x128 1x512)")
    texts_help = "text, or JSONL with a field `text`, perhaps compressed (a few articles)"
    add("--texts", nargs="+", type=Path, metavar="FILE", default=[WIKI], help=texts_help)
    add = parser.add_argument_group("how much is measured").add_argument
    add("--num-texts", type=int, help="of the stream (64)")
    add("--rounds", type=int, help="turns of each contestant at each case (3)")
    add("--turn", type=float, default=0.3, help="seconds of a shape's turn, at least (0.3)")
    add("--threads", type=int, default=num_usable_cpus(), help="of each (%(default)s)")
    add("--quick", action="store_true", help="fewer shapes, texts and rounds: a first look")
    return parser


if __name__ == "__main__":
    sys.exit(main())
