"""A child process that pretrains `transformers.AlbertForPreTraining` with `Trainer`.

Its fastest ordinary settings: bf16 (fp32 on a CPU without it, as ours), torch.compile, fused AdamW,
no checkpoints, no logs, and examples that lie ready-made in memory, where ours are cut, masked and
packed on the way.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.harness.channel import Channel
from benchmarks.pretraining.data import Arrays
from benchmarks.pretraining.jobs import HfSettings, Job, TurnJob
from benchmarks.pretraining.ours import LR
from benchmarks.pretraining.stopwatch import Stopwatch
from training.data.examples import IGNORED
from training.system.precision import product_dtype

Example = dict[str, "NDArray[np.int64] | int"]
_ROUNDING: Final = 8
_FILLERS: Final = {"input_ids": 0, "token_type_ids": 0, "attention_mask": 0, "labels": IGNORED}
_NUM_GPU_WORKERS: Final = 8


class Examples(Dataset[Example]):
    """The examples, each padded to the full length or not at all."""

    def __init__(self, arrays: Arrays, settings: HfSettings) -> None:
        self._arrays = arrays
        self._pads = settings.padding == "full"

    def __len__(self) -> int:
        return len(self._arrays.lengths)

    def __getitem__(self, index: int) -> Example:
        arrays, real = self._arrays, int(self._arrays.lengths[index])
        size = arrays.ids.shape[1] if self._pads else real
        return {
            "input_ids": arrays.ids[index, :size].astype(np.int64),
            "token_type_ids": arrays.types[index, :size].astype(np.int64),
            "attention_mask": (np.arange(size) < real).astype(np.int64),
            "labels": arrays.labels[index, :size].astype(np.int64),
            "sentence_order_label": int(arrays.orders[index]),
        }


@dataclass(frozen=True, slots=True)
class PadTogether:
    """Pads the examples of a batch to the longest, rounded up, but not over `length`."""

    length: int

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """The batch."""
        longest = max(len(example["input_ids"]) for example in examples)
        size = min(self.length, -(-longest // _ROUNDING) * _ROUNDING)
        batch = {name: np.full((len(examples), size), to) for name, to in _FILLERS.items()}
        for row, example in enumerate(examples):
            for name, values in batch.items():
                values[row, : len(example[name])] = example[name]
        orders = torch.tensor([example["sentence_order_label"] for example in examples])
        padded = {name: torch.from_numpy(values) for name, values in batch.items()}
        return {**padded, "sentence_order_label": orders}


class CountingTrainer(transformers.Trainer):
    """Trainer that counts real tokens, on the device, so that it need not wait for it."""

    num_tokens: int | Tensor = 0

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Tensor:
        """One forward and backward pass."""
        self.num_tokens = self.num_tokens + inputs["attention_mask"].sum()
        loss: Tensor = super().training_step(model, inputs, *rest)
        return loss


class TakeTurns(transformers.TrainerCallback):
    """Tells the stopwatch of each step, and stops when there is no further turn."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """A step has ended."""
        if not self._watch.step_is_done():
            control.should_training_stop = True


def model(job: Job, settings: HfSettings) -> Any:
    """The model of the case, at its first weights."""
    config = transformers.AlbertConfig.from_dict(job.case.config.to_hf())
    config._attn_implementation = settings.attention
    torch.manual_seed(0)
    return transformers.AlbertForPreTraining(config)


def arguments(
    job: TurnJob, settings: HfSettings, lr: float, output: str
) -> transformers.TrainingArguments:
    """Return the arguments of the Trainer."""
    on_gpu = job.device == "cuda"
    return transformers.TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=settings.num_rows,
        max_steps=sys.maxsize >> 32,
        bf16=product_dtype(torch.device(job.device)) == torch.bfloat16,
        tf32=True if on_gpu else None,
        torch_compile=job.compiles,
        optim="adamw_torch_fused",
        learning_rate=lr,
        lr_scheduler_type="constant",
        train_sampling_strategy="group_by_length" if settings.padding == "grouped" else "random",
        use_cpu=not on_gpu,
        dataloader_num_workers=min(_NUM_GPU_WORKERS, os.cpu_count() or 1) if on_gpu else 0,
        dataloader_persistent_workers=on_gpu,
        dataloader_pin_memory=on_gpu,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        log_level="error",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train the job that the first argument is."""
    channel = Channel()
    job = Job.from_json(sys.argv[1])
    assert job.hf is not None
    torch.set_num_threads(job.num_threads)
    collate = PadTogether(job.case.length) if job.hf.padding == "grouped" else None
    with tempfile.TemporaryDirectory() as output:
        trainer = CountingTrainer(
            model=model(job, job.hf),
            args=arguments(job, job.hf, LR, output),
            train_dataset=Examples(Arrays.open(job.examples), job.hf),
            data_collator=collate or transformers.default_data_collator,
        )
        device = torch.device(job.device)
        watch = Stopwatch(channel, device, lambda: int(trainer.num_tokens))
        trainer.add_callback(TakeTurns(watch))
        trainer.train()


if __name__ == "__main__":
    main()
