"""The description of a model for `/info`: its tasks, limits and card."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from albert_serve import __version__
from albert_serve.api.embeddings import FEATURE_EXTRACTION
from albert_serve.api.model_card import ModelCard, ModelSizes, TrainingStage
from albert_serve.api.schemas import (
    HeadInfo,
    InputExample,
    ModelReply,
    SentenceVectorsInfo,
    TaskInfo,
    TaskQuality,
)
from albert_serve.bundle.card import (
    count_parameters,
    read_figure,
    read_figures,
    read_metadata,
    read_stages,
)
from albert_serve.bundle.manifest import MANIFEST_FILE, WEIGHTS_FILE, Bundle, Manifest, TaskEntry
from albert_serve.bundle.weights import CLASSIFICATION, further_head
from albert_serve.settings import Settings
from albert_serve.tasks.text_classification import label_names


def describe_model(
    name: str, bundle: Bundle, tasks: Iterable[str], settings: Settings, *, mask_token: str
) -> ModelReply:
    """Return a model's description; the bundle's card is read, so call it off the event loop."""
    manifest, config = bundle.manifest, bundle.config
    return ModelReply(
        id=name,
        created=int((bundle.folder / MANIFEST_FILE).stat().st_mtime),
        model_id=name,
        version=__version__,
        precision=manifest.precision,
        revision=manifest.revision,
        tasks=[_describe(task, manifest) for task in tasks],
        max_positions=config.max_positions,
        mask_token=mask_token,
        max_items=settings.max_items,
        max_body_bytes=settings.max_body_bytes,
        needs_key=settings.needs_key,
        card=_read_card(bundle),
    )


def _read_card(bundle: Bundle) -> ModelCard:
    config, manifest = bundle.config, bundle.manifest
    return ModelCard(
        **asdict(read_metadata(bundle.folder)),
        sizes=ModelSizes(
            num_parameters=count_parameters(config, manifest),
            weights_bytes=manifest.files[WEIGHTS_FILE].size,
            num_layers=config.num_layers * config.num_inner_layers,
            hidden_size=config.hidden_size,
            embedding_size=config.embedding_size,
            num_heads=config.num_heads,
            ffn_size=config.ffn_size,
            vocab_size=config.vocab_size,
        ),
        evaluation=read_figures(manifest),
        training=[TrainingStage(**stage) for stage in read_stages(manifest)],
    )


def _describe(task: str, manifest: Manifest) -> TaskInfo:
    """Return the description of a task, which may have no head and so no entry."""
    for name, entry in manifest.tasks.items():
        if name != task:
            continue
        examples = manifest.examples.get(name, [])
        return TaskInfo(
            name=name,
            labels=label_names(entry) if name == CLASSIFICATION else entry.labels,
            problem_type=entry.problem_type,
            null_score_diff_threshold=entry.null_score_diff_threshold,
            heads=_describe_heads(entry, manifest) if entry.head or entry.heads else None,
            quality=_quality(manifest, name),
            examples=[InputExample(**example.model_dump()) for example in examples] or None,
        )
    vectors = manifest.sentence_vectors if task == FEATURE_EXTRACTION else None
    return TaskInfo(name=task, sentence_vectors=vectors and SentenceVectorsInfo(**asdict(vectors)))


def _describe_heads(entry: TaskEntry, manifest: Manifest) -> list[HeadInfo]:
    """Return the description of each classifier of texts, the default one first."""
    keys: dict[str, str] = {entry.default_head: CLASSIFICATION}
    keys |= {name: further_head(name) for name in entry.heads}
    heads = manifest.heads
    return [
        HeadInfo(
            name=name,
            labels=label_names(heads[key]),
            problem_type=heads[key].problem_type,
            quality=_quality(manifest, key),
        )
        for name, key in keys.items()
    ]


def _quality(manifest: Manifest, head: str) -> TaskQuality | None:
    figure = read_figure(manifest, head)
    return None if figure is None else TaskQuality(**asdict(figure))
