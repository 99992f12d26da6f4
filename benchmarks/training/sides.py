"""The two sides, each in its own process. They train in turns, so other load affects both."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, Literal

import torch
from torch import Tensor

from benchmarks.training.case import LR, HfRow, PretrainingCase
from benchmarks.training.finetuning import FinetuningCase
from training.data.examples import IGNORED
from training.system.precision import product_dtype
from training.system.process import keep_freed_memory

# With these variables of glibc's malloc and of torch, a process retains the memory that a step
# frees, in large pages, so the next step need not map and zero it again.
_KEEPS_MEMORY: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "THP_MEM_ALLOC_ENABLE": "1",
}
_NUM_WARM_UP_STEPS: Final = 3
# Every step is given this progress, between warm-up and decay, so it has the full learning rate.
_DONE: Final = 0.5
_BYTES_PER_KIB: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class HfSettings:
    """The training settings of `transformers`.

    Attributes:
        num_rows: number of sequences per step (`per_device_train_batch_size`).
        attention: name of the attention implementation.
        keeps_memory: whether the process retains the memory that a step frees.
        groups_lengths: whether a batch has rows of similar lengths.
    """

    num_rows: int
    attention: Literal["sdpa", "eager"] = "sdpa"
    keeps_memory: bool = False
    groups_lengths: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerJob:
    """The training in one of the processes that take turns.

    Attributes:
        hf: settings of `transformers`, or None if this package trains.
        compiles: whether the model is compiled.
    """

    case: PretrainingCase | FinetuningCase
    hf: HfSettings | None
    device: torch.device
    num_threads: int
    compiles: bool

    @property
    def name(self) -> str:
        """The name of the side, with its settings."""
        if self.hf is None:
            return "ours"
        memory = ", memory kept" if self.hf.keeps_memory else ""
        grouped = ", grouped by length" if self.hf.groups_lengths else ""
        return f"transformers ({self.hf.num_rows} rows, {self.hf.attention}{memory}{grouped})"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the process."""
        memory = _KEEPS_MEMORY if self.hf is not None and self.hf.keeps_memory else {}
        threads = {"OMP_NUM_THREADS": str(self.num_threads), "TOKENIZERS_PARALLELISM": "false"}
        return {**threads, **memory}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerTurn:
    """The measurement of one turn.

    Attributes:
        seconds: wall-clock time.
        cpu_seconds: CPU time of all threads, the better measure if other programs run.
        num_tokens: number of tokens without padding.
        peak_bytes: peak memory so far, of the process or, on a GPU, of its tensors.
    """

    seconds: float
    cpu_seconds: float
    num_tokens: int
    peak_bytes: int


class Stopwatch:
    """A timer of turns, each of several complete steps, in a training process.

    Args:
        connection: connection that requests turns of a given duration and receives their results.
        count_tokens: function that returns the number of tokens so far. It is called only at the
            end of a turn, because it may wait for the device.
    """

    def __init__(
        self, connection: Connection, device: torch.device, count_tokens: Callable[[], int]
    ) -> None:
        self._connection, self._device, self._count_tokens = connection, device, count_tokens
        self._created_s = time.perf_counter()
        self._num_steps = 0
        self._turn_s = self._began_s = self._began_cpu_s = 0.0
        self._first_token = 0

    def step_is_done(self) -> bool:
        """Count a step; return whether to train another one."""
        self._num_steps += 1
        if self._num_steps < _NUM_WARM_UP_STEPS:
            return True
        if self._num_steps == _NUM_WARM_UP_STEPS:
            self._connection.send(time.perf_counter() - self._created_s)
        elif time.perf_counter() - self._began_s < self._turn_s:
            return True
        else:
            self._connection.send(self._measure())
        turn_s = self._connection.recv()
        if turn_s is None:
            return False
        self._turn_s = turn_s
        self._first_token = self._num_tokens()
        self._began_cpu_s, self._began_s = time.process_time(), time.perf_counter()
        return True

    def _num_tokens(self) -> int:
        """Return the number of tokens so far, once the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._count_tokens()

    def _measure(self) -> TrainerTurn:
        num_tokens = self._num_tokens() - self._first_token
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_KIB
        return TrainerTurn(
            seconds=time.perf_counter() - self._began_s,
            cpu_seconds=time.process_time() - self._began_cpu_s,
            num_tokens=num_tokens,
            peak_bytes=peak_bytes,
        )


def serve(connection: Connection, job: TrainerJob) -> None:
    """Train a job in this process until the last turn."""
    torch.set_num_threads(job.num_threads)
    if job.hf is not None:
        _train_hf(connection, job, job.hf)
        return
    run = job.case.build_ours(job.device, compiles=job.compiles)
    run.objective.train()
    if job.device.type == "cpu":
        keep_freed_memory()
    watch = Stopwatch(connection, job.device, lambda: run.num_tokens)
    while True:
        run.step(_DONE)
        if not watch.step_is_done():
            return


def pad_rows(rows: Sequence[HfRow], length: int | None) -> dict[str, Tensor]:
    """Return a batch of rows, padded to a length or to the longest row, with `attention_mask`."""
    sizes = torch.tensor([len(row["input_ids"]) for row in rows])
    length = length or int(sizes.max())
    batch = {"attention_mask": (torch.arange(length) < sizes[:, None]).long()}
    for name, first in rows[0].items():
        if isinstance(first, int):
            batch[name] = torch.tensor([row[name] for row in rows])
            continue
        batch[name] = torch.full((len(rows), length), IGNORED if name == "labels" else 0)
        for number, row in enumerate(rows):
            batch[name][number, : len(row[name])] = torch.as_tensor(row[name])
    return batch


def _train_hf(connection: Connection, job: TrainerJob, settings: HfSettings) -> None:
    """Train a `transformers` model with the `Trainer`, until the last turn.

    The examples are ready-made in memory, and the `Trainer` writes no checkpoints and no logs.
    """
    import transformers  # imported here, so that our own process does not load it

    class CountingTrainer(transformers.Trainer):
        """A `Trainer` that counts real tokens on the device, so it need not wait for them."""

        num_tokens: int | Tensor = 0

        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Tensor:
            self.num_tokens = self.num_tokens + inputs["attention_mask"].sum()
            loss: Tensor = super().training_step(model, inputs, *rest)
            return loss

    class TakeTurns(transformers.TrainerCallback):
        """A callback that reports each step to the stopwatch, and stops after the last turn."""

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop = not watch.step_is_done()

    on_gpu = job.device.type == "cuda"
    dataset: Any = job.case.examples
    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=settings.num_rows,
            max_steps=sys.maxsize >> 32,
            bf16=product_dtype(job.device) == torch.bfloat16,
            tf32=True if on_gpu else None,
            torch_compile=job.compiles,
            optim="adamw_torch_fused",
            learning_rate=LR,
            lr_scheduler_type="constant",
            use_cpu=not on_gpu,
            dataloader_num_workers=8 if on_gpu else 0,
            dataloader_persistent_workers=on_gpu,
            dataloader_pin_memory=on_gpu,
            dataloader_drop_last=True,
            train_sampling_strategy="group_by_length" if settings.groups_lengths else "random",
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            logging_nan_inf_filter=False,
            log_level="error",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = CountingTrainer(
            model=job.case.make_hf_model(settings.attention),
            args=arguments,
            train_dataset=dataset,
            data_collator=partial(pad_rows, length=job.case.padded_length),
            callbacks=[TakeTurns()],
        )
        watch = Stopwatch(connection, job.device, lambda: int(trainer.num_tokens))
        trainer.train()
