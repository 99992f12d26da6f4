"""Data, small models of ours and of `transformers`, and readers of runs, for several tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor, nn

from albert_serve.bundle.manifest import ProblemType
from albert_serve.config import AlbertConfig, Sharing
from training.commands import evaluate
from training.data.labelled.columns import COMMON_COLUMNS, Columns
from training.data.shards import Shard, Shards
from training.loop.checkpointing import load_state, step_of
from training.model.albert import ModelInputs
from training.model.checkpoint import read_weights
from training.model.heads import AlbertForTasks, Task
from training.model.hf_names import parameters
from training.tasks.classification.files import LabelledText, read_splits

REPOSITORY: Final = Path(__file__).parents[2]
WIKI: Final = REPOSITORY / "tests" / "data" / "wiki.jsonl"
SMALL_PART: Final = 12_000  # number of bytes in each part of the shards
SQUAD: Final = REPOSITORY / "tests" / "data" / "squad.json"
RACE: Final = REPOSITORY / "tests" / "data" / "race"  # our own questions, in the format of RACE
SQUAD_V2: Final = REPOSITORY / "tests" / "data" / "squad_dev" / "dev-v2.0.json"

TINY: Final = AlbertConfig(
    vocab_size=50,
    embedding_size=12,
    hidden_size=24,
    num_layers=4,
    num_heads=3,
    ffn_size=40,
    max_positions=16,
    classifier_dropout=0.0,
)
# Each document is a list of its sentences' lengths. Some have one sentence, and some sentences are
# longer than any example.
corpora: Final = st.lists(
    st.lists(st.integers(1, 12) | st.integers(1, 90), min_size=1, max_size=12),
    min_size=1,
    max_size=8,
)
# Classes of `transformers`, and their heads.
HF_CLASSES: Final[dict[str, tuple[Task, ...]]] = {
    "AlbertForPreTraining": ("fill-mask", "sentence-order"),
    "AlbertForMaskedLM": ("fill-mask",),
    "AlbertForSequenceClassification": ("text-classification",),
    "AlbertForQuestionAnswering": ("question-answering",),
    "AlbertForMultipleChoice": ("multiple-choice",),
    "AlbertForTokenClassification": ("token-classification",),
}
each_class: Final = pytest.mark.parametrize("class_name", HF_CLASSES)
each_sharing: Final = pytest.mark.parametrize("sharing", get_args(Sharing))
SIZES: Final[dict[Task, int]] = {
    "fill-mask": TINY.vocab_size,
    "sentence-order": 2,
    "text-classification": 3,
    "question-answering": 2,
    "multiple-choice": 1,
    "token-classification": 3,
}
# Tasks that one model can have. The other two heads are named `classifier` like the third.
JOINT_TASKS: Final = tuple(SIZES)[:4]
# Tasks whose heads read all tokens, not only [CLS].
TOKEN_TASKS: Final = ("fill-mask", "question-answering", "token-classification")


def make_part(documents: Sequence[Sequence[int]], vocab_size: int = 1 << 20) -> Shard:
    """Make a part of a corpus from the lengths of each document's sentences, in tokens.

    The token ids ascend from the first id that is not special, and start over after the last id.
    """
    lengths = [length for document in documents for length in document]
    return Shard(
        tokens=np.arange(sum(lengths), dtype=np.int32) % (vocab_size - 5) + 5,
        sentences=np.array([0, *accumulate(lengths)]),
        documents=np.array([0, *accumulate(map(len, documents))]),
    )


def make_shards(*parts: Shard) -> Shards:
    """Make the shards of a corpus in memory."""
    return Shards(parts=parts, tokenizer_sha256="", fingerprint="")


def our_model(config: AlbertConfig, tasks: tuple[Task, ...], seed: int = 0) -> AlbertForTasks:
    """Build our model in fp32, with weights that make every bias and norm matter."""
    sizes = {**SIZES, "fill-mask": config.vocab_size}
    model = AlbertForTasks(config, {task: sizes[task] for task in tasks})
    randomize(model, seed)
    return model.eval()


def hf_model(config: AlbertConfig, class_name: str, seed: int = 1) -> Any:
    """Build a model of `transformers` in fp32, with random weights."""
    num_labels = 3 if class_name.endswith("Classification") else 2
    hf_config = transformers.AlbertConfig.from_dict({**config.to_hf(), "num_labels": num_labels})
    model = getattr(transformers, class_name)(hf_config)
    randomize(model, seed)
    return model.eval()


def our_and_hf_models(config: AlbertConfig, class_name: str) -> tuple[AlbertForTasks, Any]:
    """Build our model and the same model of `transformers`, with equal weights in float64."""
    our_copy = our_model(config, HF_CLASSES[class_name]).double()
    hf_copy = hf_model(config, class_name).double()
    hf_parameters = dict(hf_copy.named_parameters())
    our_parameters = parameters(our_copy)
    assert hf_parameters.keys() == our_parameters.keys()
    with torch.no_grad():
        for name, parameter in our_parameters.items():
            parameter.copy_(hf_parameters[name])
    return our_copy, hf_copy


def hf_load(class_name: str, folder: Path, **settings: Any) -> Any:
    """Load a model with `transformers`, and check that it found all of the model's weights."""
    model, report = getattr(transformers, class_name).from_pretrained(
        folder, output_loading_info=True, **settings
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


def randomize(model: nn.Module, seed: int) -> None:
    """Set all parameters to random numbers: around 1 for the weights of norms, else around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)


def ragged(lengths: tuple[int, ...] = (5, 16, 1, 9), seed: int = 2) -> ModelInputs:
    """Make right-padded sequences. Only the padding contains the pad id, 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    is_real = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return ModelInputs(
        ids=torch.randint(1, TINY.vocab_size, shape, generator=generator) * is_real,
        types=torch.randint(0, 2, shape, generator=generator) * is_real,
        lengths=torch.tensor(lengths),
    )


def is_real(batch: ModelInputs) -> Tensor:
    """Return a mask of the tokens that are not padding, (B, S)."""
    assert batch.lengths is not None
    return torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]


def our_logits(model: AlbertForTasks, batch: ModelInputs) -> dict[Task, Tensor]:
    """Compute our model's logits of each head, for all real tokens or for the [CLS] tokens."""
    hidden = model(batch)
    rows: dict[bool, Tensor] = {True: hidden[is_real(batch)], False: hidden[:, 0]}
    return {task: model.logits(task, rows[task in TOKEN_TASKS]) for task in model.tasks}


def hf_logits(model: Any, batch: ModelInputs) -> dict[Task, Tensor]:
    """Compute the same logits with a model of `transformers`."""
    real = is_real(batch)
    inputs = {"input_ids": batch.ids, "token_type_ids": batch.types, "attention_mask": real.long()}
    name = type(model).__name__
    if name == "AlbertForMultipleChoice":
        out = model(**{key: value[None] for key, value in inputs.items()})
        return {"multiple-choice": out.logits.T}
    out = model(**inputs)
    if name == "AlbertForPreTraining":
        return {"fill-mask": out.prediction_logits[real], "sentence-order": out.sop_logits}
    if name == "AlbertForQuestionAnswering":
        both = torch.stack([out.start_logits, out.end_logits], -1)
        return {"question-answering": both[real]}
    (task,) = HF_CLASSES[name]
    return {task: out.logits[real] if task in TOKEN_TASKS else out.logits}


def assert_close(
    actual: Mapping[Any, Tensor], expected: Mapping[Any, Tensor], limit: float = 1e-10
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.shape == expected[name].shape, name
        assert (tensor - expected[name]).abs().max() < limit, name


def run_command(
    main: Callable[[Sequence[str]], int], options: Sequence[str], folder: Path, *extra_options: str
) -> int:
    """Run a command with an output folder in this process."""
    return main([*options, "--output", str(folder), *extra_options])


def startup_error(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """Return the error output of a command, after checking that it did not start a run."""
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in error
    assert not (folder / "run.json").exists()
    return error


def write(file: Path, content: str | bytes) -> Path:
    """Write a file, and return its path."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read a run's `metrics.jsonl`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_validations(folder: Path, task: Task, metric: str) -> dict[int, float]:
    """Read a metric of each validation of a run, by step."""
    name = f"validation/{task}/{metric}"
    return {int(line["step"]): line[name] for line in read_metrics(folder) if name in line}


def evaluate_checkpoint(checkpoint: Path, *options: str) -> dict[str, Any]:
    """Run `albert-serve evaluate`, and return the metrics that it writes into the checkpoint."""
    assert evaluate.main([str(checkpoint), *options]) == 0
    metrics: dict[str, Any] = json.loads((checkpoint / "evaluation.json").read_text())
    return metrics


def best_step(folder: Path) -> int:
    """Return the step of a run's best checkpoint."""
    assert (folder / "best").is_symlink()
    return step_of((folder / "best").resolve())


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of a run's checkpoints in order."""
    return sorted(step_of(path) for path in (folder / "checkpoints").glob("step-*"))


def file_contents(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder, by relative path."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def checkpoint_state(folder: Path) -> dict[str, Any]:
    """Read the training state in the newest checkpoint of a run."""
    return load_state(folder / "checkpoint")


def same_weights(first_run: Path, second_run: Path) -> bool:
    """Return whether two runs have identical weights and training states.

    The states may differ in the time and in the last validation: its step and its texts' names.
    """
    checkpoints = [run / "checkpoint" for run in (first_run, second_run)]
    files = [(folder / "model.safetensors").read_bytes() for folder in checkpoints]
    states = [load_state(folder) for folder in checkpoints]
    for state in states:
        del state["elapsed_s"], state["validated_step"]
        state.get("selection", {}).pop("measured", None)
    return files[0] == files[1] and values_are_equal(states[0], states[1])


def check_same(run: Path, expected_run: Path) -> None:
    """Check that two runs have identical weights and states, and reported the same steps."""
    assert same_weights(run, expected_run)
    metrics = [read_metrics(folder) for folder in (run, expected_run)]
    assert [line["step"] for line in metrics[0]] == [line["step"] for line in metrics[1]]


def largest_weight_change(folder: Path) -> float:
    """Return the largest change of a weight in a run that kept its first checkpoint."""
    first, last = (
        read_weights(file)
        for file in (folder / "checkpoints" / "step-00000000", folder / "checkpoint")
    )
    return max(
        float((tensor - last[name]).abs().max()) for name, tensor in first.items() if name in last
    )


def values_are_equal(first: Any, second: Any) -> bool:
    """Return whether nested values that contain tensors are equal."""
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            values_are_equal(first[k], second[k]) for k in first
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(values_are_equal, first, second))
    return bool(first == second)


def pretend_bf16(patch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    """Make the CPU appear to have fast instructions for bf16, or none."""
    patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    patch.setattr("training.system.precision.cpu_is_faster_in_bf16", lambda: has_bf16)


def read_labelled(
    files: Sequence[Path],
    label_names: Sequence[str] | None = None,
    columns: Columns = COMMON_COLUMNS,
    problem: ProblemType = "single_label_classification",
) -> tuple[list[LabelledText], list[str]]:
    """Read the texts of one split, and the names of their labels in order."""
    splits = read_splits({"data": files}, label_names, columns, problem)
    return splits.texts["data"], splits.names
