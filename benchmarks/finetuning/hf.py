"""A child process that finetunes an ALBERT of `transformers` with `Trainer`.

In bf16 (fp32 on a CPU without it, as ours), with fused AdamW, without checkpoints and logs, on
examples that are tokenised and in memory; on a GPU with TF32 and data loader workers. The job says
whether it is compiled, and its padding.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.finetuning.data import Example, read_examples
from benchmarks.finetuning.jobs import Job
from benchmarks.finetuning.ours import LR
from benchmarks.harness.channel import Channel
from benchmarks.pretraining.hf import CountingTrainer, TakeTurns, arguments
from benchmarks.pretraining.jobs import HfSettings
from benchmarks.pretraining.stopwatch import Stopwatch

_ROUNDING: Final = 8
_MODELS: Final = {
    "text-classification": transformers.AlbertForSequenceClassification,
    "question-answering": transformers.AlbertForQuestionAnswering,
}


class Examples(Dataset[dict[str, Any]]):
    """The examples, not padded."""

    def __init__(self, examples: list[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self._examples[index]
        return {
            "input_ids": example.ids,
            "token_type_ids": example.types,
            "target": example.target,
        }


@dataclass(frozen=True, slots=True)
class Collator:
    """Pads the examples of a batch.

    Attributes:
        job: whose padding is to the full length, or to the longest rounded up.
        settings: of the job.
    """

    job: Job
    settings: HfSettings

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """The batch, with the targets as the model takes them."""
        length = self.job.case.length
        longest = max(len(row["input_ids"]) for row in rows)
        is_full = self.settings.padding == "full"
        size = length if is_full else min(length, -(-longest // _ROUNDING) * _ROUNDING)
        ids = torch.zeros(len(rows), size, dtype=torch.long)
        types, mask = ids.clone(), ids.clone()
        for number, row in enumerate(rows):
            end = len(row["input_ids"])
            ids[number, :end] = torch.tensor(row["input_ids"])
            types[number, :end] = torch.tensor(row["token_type_ids"])
            mask[number, :end] = 1
        targets = torch.tensor([row["target"] for row in rows])
        batch = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
        if self.job.case.task == "text-classification":
            return {**batch, "labels": targets}
        return {**batch, "start_positions": targets[:, 0], "end_positions": targets[:, 1]}


def make_model(job: Job, settings: HfSettings) -> Any:
    """The model of the case, at its first weights."""
    config = transformers.AlbertConfig.from_dict({**job.case.config.to_hf(), "num_labels": 2})
    config._attn_implementation = settings.attention
    torch.manual_seed(0)
    return _MODELS[job.case.task](config)


def main() -> None:
    """Train the job that the first argument is."""
    channel = Channel()
    job = Job.from_json(sys.argv[1])
    assert job.hf is not None
    torch.set_num_threads(job.num_threads)
    with tempfile.TemporaryDirectory() as output:
        trainer = CountingTrainer(
            model=make_model(job, job.hf),
            args=arguments(job, job.hf, LR, output),
            train_dataset=Examples(read_examples(job.examples)),
            data_collator=Collator(job, job.hf),
        )
        watch = Stopwatch(channel, torch.device(job.device), lambda: int(trainer.num_tokens))
        trainer.add_callback(TakeTurns(watch))
        trainer.train()


if __name__ == "__main__":
    main()
