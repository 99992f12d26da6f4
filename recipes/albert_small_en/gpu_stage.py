"""Train masked tokens on a rented GPU for some minutes, between two stages on a CPU.

`pack` writes one folder to carry to the GPU: the token ids of the text, compressed, and the
checkpoint to start from, in bf16. `train` trains there until its time is over, while the learning
rate decays to 0. Every minute it saves the moving average of the weights in bf16, and
`albert-serve finetune --initialize-from` continues from it. The other heads are not trained:
sentence order, questions, sentiment and embeddings are for the next stages.

`train` is a run of `albert-serve pretrain`, except: the text is on the device before the clock
starts, and is masked there, because masking takes a CPU core for every 340,000 tokens/s. Batches
have one shape, and the layer is compiled before the clock starts. Checkpoints lack the optimizers'
state, so that they are small. A run cannot be resumed; a new run can start from its checkpoint.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from albert_serve.bundle.sentence_vectors import read_sentence_vectors
from albert_serve.tokenizer import AlbertTokenizer
from recipes.albert_small_en.gpu_text import MaskedText, read_text, write_text
from training.conversion.source import REFERENCE_HELP, Checkpoint, open_checkpoint
from training.data.collate import Slicing
from training.data.examples import MIN_LENGTH
from training.data.masking import NgramMasking
from training.data.shards import Shards
from training.errors import RunError, report_errors
from training.loop.checkpointing import Checkpoints
from training.loop.distributed import World
from training.loop.driver import build_run
from training.loop.metrics import MetricsWriter
from training.loop.progress import Progress
from training.loop.reproducibility import reproducible, run_precision
from training.loop.step import Mixture, Run
from training.loop.trainer import Saver, Trainer
from training.losses import LOSS_OF
from training.model import checkpoint as checkpoints
from training.model.heads import AlbertForTasks
from training.model.hf_names import parameters
from training.model.labels import head_config
from training.model.provenance import read_stages, record_stage
from training.options.config import COMPILE_HELP, RunFolder, StoppingCriteria
from training.options.device import should_compile
from training.options.flags import Options, add_flags, flag, read_flags
from training.options.values import Count, Duration, Fraction, Positive, Seed, Share
from training.pretraining.recipes import RECIPES, Recipe
from training.system.command_line import make_parser
from training.system.partial_folder import new_folder
from training.system.precision import precision
from training.system.threads import use_threads

_PROGRAM: Final = "recipes.albert_small_en.gpu_stage"
_TEXT: Final = "text.safetensors"
_START: Final = "checkpoint"
_EXAMPLES: Final = r"""examples:
  python -m recipes.albert_small_en.gpu_stage pack --shards runs/shards \
      --initialize-from models/albert-small-en --output runs/gpu-text
  python -m recipes.albert_small_en.gpu_stage train --packed runs/gpu-text --budget 8m \
      --output runs/gpu
  python -m recipes.albert_small_en.gpu_stage train --packed runs/gpu-text --budget 60s \
      --device cpu --batch-size 16 --micro-batch-size 16 --ema 0.9 --output runs/rehearsal
"""


@dataclass(frozen=True, kw_only=True)
class _PackConfig(Options, title="pack"):
    """The text and the checkpoint to carry, and the folder to write."""

    shards: Path = flag("folder that albert-serve prepare wrote", MISSING)
    initialize_from: str = flag(REFERENCE_HELP, MISSING, metavar="CHECKPOINT")
    max_mib: Count = flag("maximum size of the folder, in MiB", 64)
    output: Path = flag("new folder", MISSING)


@dataclass(frozen=True, kw_only=True)
class _TrainConfig(RunFolder, StoppingCriteria, title="train"):
    """The folder that `pack` wrote, and the stage."""

    packed: Path = flag("folder that pack wrote", MISSING)
    initialize_from: str | None = flag(
        f"{REFERENCE_HELP} (default: the one in the folder)", metavar="CHECKPOINT"
    )
    length: Count = flag("tokens per row", 256)
    batch_size: Count = flag("rows per step", 512)
    micro_batch_size: Count = flag("rows per forward pass", 256)
    mask_rate: Fraction = flag("fraction of the tokens of a row that is predicted", 0.2)
    lr: Positive = flag("peak learning rate of the layer's matrices, with Muon", 1e-3)
    adamw_lr: Positive = flag("peak learning rate of the rest, with AdamW", 1e-3)
    warmup: Fraction = flag("fraction of the run that is warm-up", 0.02)
    ema: Share = flag("decay of the moving average of the weights, per step", 0.998)
    seed: Seed = flag("seed of rows and masks", 0)
    compile: bool | None = flag(f"{COMPILE_HELP} (default: yes, where there is a compiler)")
    save_every: Duration = flag("time between checkpoints (1m)", 60.0)

    @property
    def recipe(self) -> Recipe:
        """The recipe of pretraining with these values."""
        names = ("length", "batch_size", "mask_rate", "lr", "adamw_lr", "warmup", "seed")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return replace(
            RECIPES["small"],
            num_steps=self.steps,
            schedule="linear",
            sentence_task="none",
            **values,
        )


def _pack(config: _PackConfig) -> int:
    """Write the folder to carry, and print its size."""
    with new_folder(config.output) as folder, open_checkpoint(config.initialize_from) as source:
        model = _write_start(source, folder / _START)
        shards = Shards.open(config.shards, source.folder / "tokenizer.json")
        room = (config.max_mib << 20) - _size(folder)
        num_tokens = write_text(shards, model.config.vocab_size, folder / _TEXT, room)
        if not num_tokens:
            raise RunError(
                f"--max-mib {config.max_mib}: no text fits into it besides the weights; give more"
            )
        num_bytes = _size(folder)
    print(
        f"{config.output}: {num_bytes / (1 << 20):.1f} MiB with {num_tokens:,} of "
        f"{shards.num_tokens:,} tokens"
    )
    return 0


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _write_start(source: Checkpoint, folder: Path) -> AlbertForTasks:
    """Write a checkpoint in bf16, with its history, and return its model."""
    model = checkpoints.load_checkpoint(source.folder)
    checkpoints.save_checkpoint(
        model,
        folder,
        tensors=_in_bf16(model),
        tokenizer_from=source.folder,
        extra_config=head_config(checkpoints.read_config(source.folder), model.tasks),
        sentence_vectors=read_sentence_vectors(source.folder),
    )
    record = {"initialize_from": source.name, "precision": "bf16"}
    record_stage(folder, f"{_PROGRAM} pack", record, earlier=read_stages(source.folder))
    return model


def _in_bf16(model: AlbertForTasks) -> dict[str, Tensor]:
    return {name: tensor.detach().bfloat16() for name, tensor in parameters(model).items()}


@dataclass(kw_only=True)
class _AverageSaver(Saver):
    """Writes the average of the weights in bf16, without the optimizers' state."""

    average: AveragedModel

    def save(self, run: Run) -> None:
        """Write a checkpoint.

        Raises:
            RunError: it cannot be written; the last one is kept.
        """
        model = self.average.module
        assert isinstance(model, AlbertForTasks)
        tensors = _in_bf16(model)
        self.checkpoints.save(
            run.progress.step, lambda folder: self._write(run, folder, tensors), {}
        )
        self._saved_at = time.monotonic()


def _train(config: _TrainConfig) -> int:
    """Train the stage; returns the exit status."""
    if (config.output / "checkpoints").exists():
        raise RunError(
            f"{config.output} holds a run, which cannot be resumed; give another --output, and "
            f"--initialize-from {config.output / 'checkpoint'} to start from its weights"
        )
    use_threads(config.threads)
    with open_checkpoint(config.initialize_from or config.packed / _START) as source:
        run = _build(config, source.folder)
        saver = _saver(config, source, run)
    if should_compile(config.compile, run.world.device):
        _compile(run)
    status = Trainer(
        run=run,
        saver=saver,
        metrics=MetricsWriter(config.output, step=0),
        report_every=config.report_every,
        sequel="a new run can start from its checkpoint",
    ).train()
    print(
        f"{config.output / 'checkpoint'}: {run.progress.step:,} steps, {run.num_tokens:,} tokens, "
        f"{run.progress.seconds:,.0f} s"
    )
    return status


def _build(config: _TrainConfig, folder: Path) -> Run:
    """Build the run at step 0, with the text on the device."""
    world, model = World(device=config.device), checkpoints.load_checkpoint(folder)
    if not MIN_LENGTH <= config.length <= model.config.max_positions:
        raise RunError(
            f"--length {config.length}: a row has from {MIN_LENGTH} tokens to the model's "
            f"{model.config.max_positions} positions"
        )
    tokenizer = AlbertTokenizer.from_file(folder / "tokenizer.json")
    text = MaskedText(
        tokens=read_text(config.packed / _TEXT, model.config.vocab_size).to(world.device),
        masking=NgramMasking.of(tokenizer, config.mask_rate),
        length=config.length,
        slicing=Slicing(num_rows=config.batch_size, rows_a_batch=config.micro_batch_size),
        seed=config.seed,
    )
    recipe = config.recipe
    return build_run(
        model,
        Mixture(streams=[text], weights=[1.0], loss_weights={}),
        LOSS_OF,
        recipe,
        progress=Progress(num_steps=config.steps, budget_s=config.budget),
        world=world,
        precision=run_precision(config.precision, config.output, world),
    )


def _saver(config: _TrainConfig, source: Checkpoint, run: Run) -> _AverageSaver:
    """Return the run's saver, whose average is updated after each step."""
    mean = get_ema_multi_avg_fn(config.ema)  # type: ignore[no-untyped-call]
    average = AveragedModel(run.model, multi_avg_fn=mean)
    run.optimizers.parts[-1].register_step_post_hook(
        lambda *_: average.update_parameters(run.model)
    )
    settings = {**asdict(config.recipe), "budget_s": config.budget, "ema": config.ema}
    return _AverageSaver(
        average=average,
        checkpoints=Checkpoints(folder=config.output, num_kept=config.keep),
        tokenizer=checkpoints.read_tokenizer(source.folder),
        every_s=config.save_every,
        program=f"{_PROGRAM} train",
        stage={
            "settings": {**settings, "precision": run.precision},
            "corpus": [_TEXT],
            "initialize_from": source.name,
        },
        earlier_stages=read_stages(source.folder),
        extra_config=head_config(checkpoints.read_config(source.folder), run.model.tasks),
        sentence_vectors=read_sentence_vectors(source.folder),
    )


def _compile(run: Run) -> None:
    """Compile the layer with a micro-batch, before the clock starts.

    Its two blocks are compiled twice: for all positions, and for those that the last layer needs.
    Learning rates are in no compiled code, so that a new one compiles nothing.
    """
    encoder, (stream,) = run.model.albert.encoder, run.mixture.streams
    for block in (*encoder.attentions, *encoder.ffns):
        block.compile(dynamic=False)
    batch = stream.step()[0]
    with reproducible(run.world.device):
        with precision(run.world.device, run.precision):
            losses = run.objective(batch)
        losses["fill-mask"].loss.backward()
    run.optimizers.zero_grad()
    stream.restore([0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = make_parser(f"python -m {_PROGRAM}", __doc__, _EXAMPLES)
    commands = parser.add_subparsers(dest="command", required=True)
    add_flags(commands.add_parser("pack", help="write the folder to carry"), _PackConfig)
    add_flags(commands.add_parser("train", help="train from that folder"), _TrainConfig)
    values = parser.parse_args(arguments)
    if values.command == "pack":
        return report_errors(lambda: _pack(read_flags(_PackConfig, values)))
    return report_errors(lambda: _train(read_flags(_TrainConfig, values)))


if __name__ == "__main__":
    sys.exit(main())
