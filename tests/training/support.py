"""Small models of ours and of `transformers`, and what both compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
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
from training.model.albert import ModelInputs, Packing
from training.model.checkpoint import read_weights
from training.model.heads import AlbertForTasks, Task
from training.model.hf_names import parameters
from training.tasks.classification.files import LabelledText, read_splits

REPOSITORY: Final = Path(__file__).parents[2]
WIKI: Final = REPOSITORY / "tests" / "data" / "wiki.jsonl"
SMALL_PART: Final = 12_000  # bytes of a part of shards
SQUAD: Final = REPOSITORY / "tests" / "data" / "squad.json"
RACE: Final = REPOSITORY / "tests" / "data" / "race"  # ours, in its format
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
CONFIGS: Final[dict[str, AlbertConfig]] = {
    "base": TINY,
    "groups": replace(TINY, num_groups=3),
    "inner": replace(TINY, num_inner_layers=2),
    "groups and inner": replace(TINY, num_groups=2, num_inner_layers=2),
    "E is H": replace(TINY, embedding_size=24),
    "gelu": replace(TINY, activation="gelu"),
    "odd": replace(TINY, num_layers=5, num_groups=2, num_heads=1, num_token_types=3),
}
# Documents by the lengths of their sentences: single sentences, and some longer than any example.
corpora: Final = st.lists(
    st.lists(st.integers(1, 12) | st.integers(1, 90), min_size=1, max_size=12),
    min_size=1,
    max_size=8,
)
# Rows that are full and not, of one sequence and of many, one token long and as long as can be.
ROWS: Final = [(5, 3, 1, 7), (16,), (9, 4), (1, 1, 1, 1, 1, 1, 1), (2,)]
# The class of `transformers` for each set of heads that it has a class for.
HF_CLASSES: Final[dict[str, tuple[Task, ...]]] = {
    "AlbertForPreTraining": ("fill-mask", "sentence-order"),
    "AlbertForMaskedLM": ("fill-mask",),
    "AlbertForSequenceClassification": ("text-classification",),
    "AlbertForQuestionAnswering": ("question-answering",),
    "AlbertForMultipleChoice": ("multiple-choice",),
    "AlbertForTokenClassification": ("token-classification",),
}
each_config: Final = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
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
# Of three heads that are named `classifier` a model has one.
TOGETHER: Final = tuple(SIZES)[:4]
# Heads that read all rows.
OF_TOKENS: Final = ("fill-mask", "question-answering", "token-classification")


def make_part(documents: Sequence[Sequence[int]], vocab_size: int = 1 << 20) -> Shard:
    """A part of a corpus from the lengths of each document's sentences, in tokens.

    Its ids ascend from the first that is not special, over and over where the vocabulary ends.
    """
    lengths = [length for document in documents for length in document]
    return Shard(
        tokens=np.arange(sum(lengths), dtype=np.int32) % (vocab_size - 5) + 5,
        sentences=np.array([0, *accumulate(lengths)]),
        documents=np.array([0, *accumulate(map(len, documents))]),
    )


def make_shards(*parts: Shard) -> Shards:
    """A corpus of these parts, as if it had been read from a disk."""
    return Shards(parts=parts, tokenizer_sha256="", fingerprint="")


def sizes(tasks: tuple[Task, ...]) -> dict[Task, int]:
    return {task: SIZES[task] for task in tasks}


def our_model(config: AlbertConfig, tasks: tuple[Task, ...], seed: int = 0) -> AlbertForTasks:
    """A model in fp32 with weights that make every bias and norm matter."""
    model = AlbertForTasks(config, sizes(tasks))
    randomize(model, seed)
    return model.eval()


def hf_model(config: AlbertConfig, class_name: str, seed: int = 1) -> Any:
    """The same architecture of `transformers`, in fp32."""
    labels = 3 if class_name.endswith("Classification") else 2
    hf_config = transformers.AlbertConfig.from_dict({**config.to_hf(), "num_labels": labels})
    model = getattr(transformers, class_name)(hf_config)
    randomize(model, seed)
    return model.eval()


def copies(config: AlbertConfig, class_name: str) -> tuple[AlbertForTasks, Any]:
    """Our model and that of `transformers`, with the same weights in float64."""
    ours = our_model(config, HF_CLASSES[class_name]).double()
    theirs = hf_model(config, class_name).double()
    hf_parameters = dict(theirs.named_parameters())
    our_parameters = parameters(ours)
    assert hf_parameters.keys() == our_parameters.keys()
    with torch.no_grad():
        for name, parameter in our_parameters.items():
            parameter.copy_(hf_parameters[name])
    return ours, theirs


def hf_load(class_name: str, folder: Path, **changes: Any) -> Any:
    """Loads, and sees that `transformers` found every weight that it has a place for."""
    model, report = getattr(transformers, class_name).from_pretrained(
        folder, output_loading_info=True, **changes
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


def randomize(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)


def ragged(lengths: tuple[int, ...] = (5, 16, 1, 9), seed: int = 2) -> ModelInputs:
    """Right-padded sequences; pad ids stand in the padding only."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    is_real = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return ModelInputs(
        ids=torch.randint(1, TINY.vocab_size, shape, generator=generator) * is_real,
        types=torch.randint(0, 2, shape, generator=generator) * is_real,
        lengths=torch.tensor(lengths),
    )


def packed(
    rows: Sequence[Sequence[int]], length: int, seed: int = 2
) -> tuple[ModelInputs, list[tuple[slice, ModelInputs]]]:
    """Rows of sequences of these lengths; and each alone, with its place in the flattened rows.

    What is padded holds other tokens than 0: no matter.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(rows), length)
    ids = torch.randint(1, TINY.vocab_size, shape, generator=generator)
    types = torch.randint(0, 2, shape, generator=generator)
    positions, sequences = torch.zeros_like(ids), torch.full_like(ids, -1)
    bounds: list[int] = []
    alone: list[tuple[slice, ModelInputs]] = []
    for line, lengths in enumerate(rows):
        ends = list(accumulate(lengths, initial=0))
        for number, (begin, end) in enumerate(pairwise(ends)):
            positions[line, begin:end] = torch.arange(end - begin)
            sequences[line, begin:end] = number
            one = ModelInputs(
                ids=ids[line : line + 1, begin:end], types=types[line : line + 1, begin:end]
            )
            alone.append((slice(line * length + begin, line * length + end), one))
        bounds += [line * length + end for end in ends if end < length]
    whole = torch.full((8 * len(rows) + 1,), ids.numel(), dtype=torch.int32)
    whole[: len(bounds)] = torch.tensor(bounds)
    packing = Packing(positions=positions, sequences=sequences, bounds=whole)
    return ModelInputs(ids=ids, types=types, packing=packing), alone


def weighed(hidden_sh: Tensor) -> Tensor:
    """A loss to which every number matters."""
    return (hidden_sh.square() * torch.arange(1, 1 + hidden_sh.shape[0])[:, None]).sum()


def gradients(model: AlbertForTasks) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in model.albert.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def is_real(batch: ModelInputs) -> Tensor:
    """True where a token is no padding, (B, S)."""
    assert batch.lengths is not None
    return torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]


def our_logits(model: AlbertForTasks, batch: ModelInputs) -> dict[Task, Tensor]:
    """The logits of each head: of all real rows, or of the [CLS] rows."""
    hidden = model(batch)
    rows: dict[bool, Tensor] = {True: hidden[is_real(batch)], False: hidden[:, 0]}
    return {task: model.logits(task, rows[task in OF_TOKENS]) for task in model.tasks}


def hf_logits(model: Any, batch: ModelInputs) -> dict[Task, Tensor]:
    """The same of a model of `transformers`."""
    real = is_real(batch)
    inputs = {
        "input_ids": batch.ids,
        "token_type_ids": batch.types,
        "attention_mask": real.long(),
    }
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
    return {task: out.logits[real] if task in OF_TOKENS else out.logits}


def assert_close(
    ours: Mapping[Any, Tensor], theirs: Mapping[Any, Tensor], limit: float = 1e-10
) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape, name
        assert (tensor - theirs[name]).abs().max() < limit, name


def assert_close_to_scale(
    ours: Mapping[Any, Tensor], theirs: Mapping[Any, Tensor], limit: float = 1e-10
) -> None:
    """As `assert_close`, relative to the largest number where that is over 1."""
    scale = max(float(tensor.abs().max()) for tensor in ours.values())
    assert_close(ours, theirs, limit * max(scale, 1))


def run_command(
    main: Callable[[Sequence[str]], int], options: Sequence[str], folder: Path, *more: str
) -> int:
    """Run a command with an output folder in this process."""
    return main([*options, "--output", str(folder), *more])


def refusal(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The one line with which a command refused to begin a run in a folder."""
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in error
    assert not (folder / "run.json").exists()
    return error


def write(file: Path, content: str | bytes) -> Path:
    """Write a file of a test, and return its path."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's `metrics.jsonl`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def validations(folder: Path, task: Task, figure: str) -> dict[int, float]:
    """A figure of each validation of a run, by its step."""
    name = f"validation/{task}/{figure}"
    return {int(line["step"]): line[name] for line in read_metrics(folder) if name in line}


def evaluated(checkpoint: Path, *options: str) -> dict[str, Any]:
    """The figures that `albert-serve evaluate` writes into a checkpoint's folder."""
    assert evaluate.main([str(checkpoint), *options]) == 0
    figures: dict[str, Any] = json.loads((checkpoint / "evaluation.json").read_text())
    return figures


def best_step(folder: Path) -> int:
    """The step of a run's best checkpoint."""
    assert (folder / "best").is_symlink()
    return step_of((folder / "best").resolve())


def file_contents(folder: Path) -> dict[str, bytes]:
    """The content of all files in a folder, by relative path."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def checkpoint_state(folder: Path) -> dict[str, Any]:
    """The training state in the newest checkpoint of a run."""
    return load_state(folder / "checkpoint")


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs have the same checkpoint to the bit, and all that training goes on from.

    One may have been validated, and the other not; or on the same texts by another name.
    """
    states = [checkpoint_state(folder) for folder in (one, other)]
    files = [(folder / "checkpoint" / "model.safetensors").read_bytes() for folder in (one, other)]
    for state in states:
        del state["elapsed_s"], state["validated_step"]
        state.get("selection", {}).pop("measured", None)
    return files[0] == files[1] and equal(states[0], states[1])


def moved(folder: Path) -> float:
    """The largest change of a weight in a run whose first checkpoint was kept."""
    first, last = (
        read_weights(file)
        for file in (folder / "checkpoints" / "step-00000000", folder / "checkpoint")
    )
    return max(
        float((tensor - last[name]).abs().max()) for name, tensor in first.items() if name in last
    )


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def pretend_bf16(patch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    """Have the CPU look as if it had fast instructions for bf16, or none."""
    patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    patch.setattr("training.system.precision.cpu_is_faster_in_bf16", lambda: has_bf16)


def read_labelled(
    files: Sequence[Path],
    label_names: Sequence[str] | None = None,
    columns: Columns = COMMON_COLUMNS,
    problem: ProblemType = "single_label_classification",
) -> tuple[list[LabelledText], list[str]]:
    """The texts of one split, and the names of their labels in order."""
    splits = read_splits({"data": files}, label_names, columns, problem)
    return splits.texts["data"], splits.names
