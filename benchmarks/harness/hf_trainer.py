"""The side of `transformers`: its `Trainer` at its fastest ordinary settings, in turns.

bf16 (fp32 on a CPU without it, as ours), fused AdamW, no checkpoints, no logs, and examples that
lie ready-made in memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from benchmarks.harness.process import Channel
from benchmarks.harness.trainers import Stopwatch, TrainerJob
from training.data.examples import IGNORED
from training.system.precision import product_dtype

_NUM_GPU_WORKERS: Final = 8
_ROUNDING: Final = 8


class _CountingTrainer(transformers.Trainer):
    """Trainer that counts real tokens, on the device, so that it need not wait for it."""

    num_tokens: int | Tensor = 0

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Tensor:
        self.num_tokens = self.num_tokens + inputs["attention_mask"].sum()
        loss: Tensor = super().training_step(model, inputs, *rest)
        return loss


class _TakeTurns(transformers.TrainerCallback):
    """Reports each step to the stopwatch, and stops after the last turn."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if not self._watch.step_is_done():
            control.should_training_stop = True


@dataclass(frozen=True, slots=True)
class PadRows:
    """Pads the rows of a batch to `length`, or to the longest rounded up if that is less."""

    length: int
    is_full: bool

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the batch, with `attention_mask`; numbers in rows become a vector."""
        sizes = torch.tensor([len(row["input_ids"]) for row in rows])
        rounded = -(-int(sizes.max()) // _ROUNDING) * _ROUNDING
        width = self.length if self.is_full else min(self.length, rounded)
        batch = {"attention_mask": (torch.arange(width) < sizes[:, None]).long()}
        for name in rows[0]:
            values = [torch.as_tensor(row[name]) for row in rows]
            if values[0].ndim == 0:
                batch[name] = torch.stack(values)
                continue
            filler = IGNORED if name == "labels" else 0
            batch[name] = torch.full((len(rows), width), filler)
            for number, value in enumerate(values):
                batch[name][number, : len(value)] = value
        return batch


def train_hf_in_turns(channel: Channel, job: TrainerJob) -> None:
    """Train a model of `transformers` until the last turn."""
    assert job.hf is not None
    case = job.case
    dataset: Any = case.hf_rows()
    with tempfile.TemporaryDirectory() as output:
        trainer = _CountingTrainer(
            model=case.make_hf_model(job.hf.attention),
            args=_arguments(job, output),
            train_dataset=dataset,
            data_collator=PadRows(case.length, job.hf.padding == "full"),
        )
        watch = Stopwatch(channel, torch.device(job.device), lambda: int(trainer.num_tokens))
        trainer.add_callback(_TakeTurns(watch))
        trainer.train()


def _arguments(job: TrainerJob, output: str) -> transformers.TrainingArguments:
    assert job.hf is not None
    on_gpu = job.device == "cuda"
    return transformers.TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=job.hf.num_rows,
        max_steps=sys.maxsize >> 32,
        bf16=product_dtype(torch.device(job.device)) == torch.bfloat16,
        tf32=True if on_gpu else None,
        torch_compile=job.compiles,
        optim="adamw_torch_fused",
        learning_rate=job.case.lr,
        lr_scheduler_type="constant",
        train_sampling_strategy="group_by_length" if job.hf.padding == "grouped" else "random",
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
