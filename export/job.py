"""An export, by its configuration.

exported = export(ExportConfig(checkpoint="runs/mine/best", bundle="bundles/mine"))
with AlbertClient.local(exported.bundle.folder) as albert:
    ...
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from albert_serve.api.wire import validate
from albert_serve.bundle.manifest import (
    CARD_FILE,
    MAX_EXAMPLES,
    Bundle,
    Manifest,
    TaskExample,
)
from albert_serve.bundle.sentence_vectors import read_sentence_vectors, write_sentence_vectors
from albert_serve.bundle.weights import TaskName, is_task
from albert_serve.errors import InvalidInputError
from albert_serve.runtime.engine import Engine
from albert_serve.settings import RuntimeOptions
from albert_serve.tasks import TASKS
from albert_serve.tokenizer import AlbertTokenizer
from export.bundle import (
    check_target,
    describe_files,
    measure_parity,
    new_folder,
    provenance,
    write_files,
    write_manifest,
)
from export.card import model_card
from export.config import ExportConfig as ExportConfig
from export.config import ExportError
from export.labelled import LabelledData, read_labelled_data, tasks_with_data
from export.quality import Comparison, check_quality, compare
from export.selection import select_tasks
from export.source import Source, read_json_object, read_source, with_threshold
from training.conversion.source import open_checkpoint
from training.model.checkpoint import load_checkpoint
from training.model.heads import AlbertForTasks
from training.tasks.engine import TorchEngine

_TORCH_BATCH_TOKENS: Final = 1024
_WIDTH: Final = 24  # the least width of the first column of the summary


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """The result of an export.

    Attributes:
        unused: names of the checkpoint's weights that none of its heads reads.
        left_out: tasks of the checkpoint that the bundle has not, and why.
        fp32_bytes: size of the checkpoint's weight file.
        comparison: the bundle's answers compared with torch's.
    """

    bundle: Bundle
    unused: list[str]
    left_out: dict[str, str]
    fp32_bytes: int
    comparison: Comparison


def export(config: ExportConfig) -> ExportResult:
    """Write a checkpoint as a bundle, atomically.

    Raises:
        ExportError: the checkpoint cannot be exported, the graphs differ from torch, the precision
            costs a task too much, or the target is there or cannot be written.
        CheckpointError, BundleError: see `read_source`; CheckpointError also if the
            checkpoint is neither here nor on the Hub.
        ConfigError: it is a model of sentences whose vectors are not computed here.
        VocabError: there is no `tokenizer.json`, and the vocabulary cannot be read.
        CorpusError: data cannot be read.
    """
    target = Path(config.bundle).resolve()
    check_target(Path(config.checkpoint), target, config.overwrite)
    with open_checkpoint(config.checkpoint) as opened, new_folder(target) as folder:
        source, left_out = _read_selected(config, opened.folder)
        vectors = read_sentence_vectors(opened.folder)
        labelled = read_labelled_data(config, source) if config.quality else {}
        model = load_checkpoint(source.folder, source.num_outputs)
        unused = write_files(source, folder, model, config)
        parity, cuda_parity = measure_parity(source, folder, model, config)
        manifest = Manifest(
            config=source.config.to_hf(),
            heads=source.heads,
            precision=config.precision,
            kept_fp32=sorted(config.keep_fp32) if config.precision != "fp32" else [],
            files=describe_files(folder),
            parity=parity,
            cuda_precision=config.cuda_precision,
            cuda_parity=cuda_parity,
            evaluation=source.evaluation,
            provenance=provenance(source, opened.name),
            examples=source.examples,
            sentence_vectors=vectors,
        )
        comparison = Comparison()
        if config.quality:
            bundle = Bundle(folder=folder, manifest=manifest, config=source.config)
            comparison = _compare(source, bundle, model, labelled, config)
            heads = {
                head: entry.model_copy(update={"quality": comparison.quality.get(head)})
                for head, entry in source.heads.items()
            }
            manifest = manifest.model_copy(update={"heads": heads})
        write_manifest(manifest, folder)
        if vectors is not None and config.precision == "fp32":  # for sentence-transformers
            write_sentence_vectors(vectors, folder, hidden_size=source.config.hidden_size)
        if manifest.evaluation:
            card = model_card(manifest, target.name)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
        bundle = Bundle.open(folder, verify="size")
        fp32_bytes = source.weights_file.stat().st_size
    return ExportResult(
        bundle=replace(bundle, folder=target),
        unused=unused,
        left_out=left_out,
        fp32_bytes=fp32_bytes,
        comparison=comparison,
    )


def _read_selected(config: ExportConfig, folder: Path) -> tuple[Source, dict[str, str]]:
    """Return the checkpoint with the tasks and settings of the bundle, and the tasks left out."""
    source = read_source(folder)
    if (file := config.evaluation) is not None and not file.is_file():
        raise ExportError(f"--evaluation {file} is not there")
    results = read_json_object(config.evaluation) if config.evaluation else {}
    source = replace(source, evaluation={**source.evaluation, **results})
    source, left_out = select_tasks(source, config.tasks, tasks_with_data(config))
    source = with_threshold(source, config.null_score_diff_threshold, results)
    examples = source.examples
    if config.examples is not None:
        examples = read_examples(config.examples, source.tasks)
    examples = {task: examples[task] for task in source.tasks if task in examples}
    return replace(source, examples=examples), left_out


def read_examples(file: Path, tasks: Collection[TaskName]) -> dict[str, list[TaskExample]]:
    """Read a JSON file like `albert_serve/web/examples.json`: for each task a list of examples.

    An example is `{"inputs": ..., "label": ...}`: one item as the task's endpoint takes it, and
    perhaps a few words for it. Other fields are ignored.
    """
    if not file.is_file():
        raise ExportError(f"--examples {file} is not there")
    examples: dict[str, list[TaskExample]] = {}
    for name, items in read_json_object(file).items():
        if not is_task(name) or name not in tasks:
            raise ExportError(
                f"{file} has examples of {name}, but the bundle has {', '.join(tasks)}. Remove them"
            )
        if not isinstance(items, list) or not 0 < len(items) <= MAX_EXAMPLES:
            raise ExportError(f"{file}, {name} must be a list of 1 to {MAX_EXAMPLES} examples")
        examples[name] = [
            _read_example(f"{file}, {name}[{number}]", name, item)
            for number, item in enumerate(items)
        ]
    return examples


def _read_example(place: str, name: TaskName, item: object) -> TaskExample:
    try:
        example = validate(TaskExample, item)
        if isinstance(example.inputs, list):
            raise ExportError(f"{place}: inputs is a list; an example is one item")
        validate(TASKS[name].request, {"inputs": example.inputs})
    except InvalidInputError as error:
        raise ExportError(f"{place}: {error}") from error
    return example


def _compare(
    source: Source,
    bundle: Bundle,
    model: AlbertForTasks,
    labelled: Mapping[str, LabelledData],
    config: ExportConfig,
) -> Comparison:
    """Compare the bundle's answers with torch's."""
    tokenizer = AlbertTokenizer.from_file(bundle.tokenizer_file)
    engine = Engine.open(bundle, RuntimeOptions(device="cpu"))
    reference = TorchEngine(model, max_batch_tokens=_TORCH_BATCH_TOKENS)
    comparison = compare(source, tokenizer, reference, engine, labelled, config.text)
    if not config.force:
        check_quality(comparison, config.max_cost)
    return comparison


def report(exported: ExportResult) -> None:
    """Print the files, the measurements and the tasks that were left out."""
    if exported.unused:
        listed = ", ".join(exported.unused)
        print(f"warning: no task reads these weights of the file: {listed}", file=sys.stderr)
    for task, why in exported.left_out.items():
        print(f"{task} is left out: {why}", file=sys.stderr)
    if not exported.bundle.manifest.tasks:
        print("the bundle has no head: it answers embeddings only", file=sys.stderr)
    print(_summarize(exported))


def _summarize(exported: ExportResult) -> str:
    """Sizes and differences, for people."""
    manifest = exported.bundle.manifest
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    graphs = sum(size for name, size in sizes.items() if name.endswith(".onnx"))
    total = sum(sizes.values())
    share = total / exported.fp32_bytes
    width = max(_WIDTH, *map(len, (*sizes, *manifest.parity)))
    return "\n".join(
        [
            f"{exported.bundle.folder} ({manifest.precision})",
            *(f"  {name:<{width}} {size:>14,} bytes" for name, size in sizes.items()),
            f"  {'graphs':<{width}} {graphs:>14,} bytes, which hold no weight",
            f"  {'all':<{width}} {total:>14,} bytes, {share:.3f} of fp32 weights",
            "largest difference from torch, over the largest value",
            *(f"  {name:<{width}} {value:>14.1e}" for name, value in manifest.parity.items()),
            f"for CUDA in {manifest.cuda_precision}, emulated, over the largest value",
            *(f"  {name:<{width}} {value:>14.1e}" for name, value in manifest.cuda_parity.items()),
            *_summarize_comparison(exported.comparison, width),
        ]
    )


def _summarize_comparison(comparison: Comparison, width: int) -> Iterator[str]:
    if comparison.measured:
        yield "on labelled data, in percent: in torch, from the bundle"
    for head, quality in comparison.quality.items():
        figures = f"{quality.torch:.2f} {quality.bundle:.2f}"
        yield f"  {head:<{width}} {figures:>14} {quality.metric} ({quality.count:,})"
    if comparison.differences:
        yield f"mean difference of probabilities from torch, on {', '.join(comparison.texts)}"
    for head, difference in comparison.differences.items():
        yield f"  {head:<{width}} {difference:>14.4f}"
