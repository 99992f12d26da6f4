"""The wire contract: requests and replies of each endpoint, in Hugging Face's inference format.

A request is `{"inputs": ..., "parameters": {...}}`; `inputs` is one item or a list of items. A
parameter that is omitted or null has its default. Replies have exactly Hugging Face's format.
Warnings and the number of truncated tokens are in headers.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from albert_serve.api.embeddings import Embedding, Pooled, TokenFeatures
from albert_serve.api.model_card import ModelCard, describe_limits, describe_model
from albert_serve.api.wire import (
    MANY,
    MAX_CHARS,
    ONE,
    OneOrMany,
    OrNull,
    Parameters,
    Reply,
    Request,
    Text,
    contradiction,
    one_or_many,
)
from albert_serve.api.wire import TRUNCATED_HEADER as TRUNCATED_HEADER
from albert_serve.api.wire import AnyTruncation as AnyTruncation
from albert_serve.api.wire import TaskRequest as TaskRequest
from albert_serve.api.wire import Truncation as Truncation  # part of the contract, too

# Each hosted model also has its own path.
MODELS_PATH: Final = "/v1/models"
MODEL_PATH: Final = f"{MODELS_PATH}/{{model}}"
# Has warnings for the caller, as a JSON array in ASCII.
WARNINGS_HEADER: Final = "X-Albert-Warnings"

MAX_HEAD_CHARS: Final = 64
MAX_TOP_K: Final = 1000
MAX_TARGETS: Final = 1000
_MAX_TARGET_CHARS: Final = 1000
_MAX_CHARS_OF_TARGETS: Final = 1 << 16
# Limits all texts of a request together: each mask is a row of vocabulary-wide logits.
MAX_MASKS: Final = 1024

MAX_SENTENCES: Final = 256

ScoreFunction: TypeAlias = Literal["sigmoid", "softmax", "none"]
AggregationStrategy: TypeAlias = Literal["none", "simple", "first", "average", "max"]
ProblemType: TypeAlias = Literal[
    "regression", "single_label_classification", "multi_label_classification"
]

# No field can have such a name, so that error paths can omit it.
_TEXT: Final = "<text>"
_OBJECT: Final = "<object>"
_PAIR: Final = "<pair>"
_SENTENCES: Final = "<sentences>"


class TextPair(Request):
    """Two texts that are read together."""

    text: Text = Field(description="First text.")
    text_pair: Text = Field(description="Second text.")


class Sentences(Request):
    """A text as a list of its sentences."""

    sentences: list[Text] = Field(min_length=2, max_length=MAX_SENTENCES)


class TextInput(Request):
    """A text, or two that are read together."""

    text: Text = Field(description="Text, or the first text of a pair.")
    text_pair: Text | None = Field(None, description="Second text.")


class QuestionContext(Request):
    """A question, and the text to search for its answer."""

    question: Text
    context: Text


def _text_or_object(value: object) -> str:
    return _OBJECT if isinstance(value, dict | TextInput) else _TEXT


def _pair_or_sentences(value: object) -> str:
    many = isinstance(value, Sentences) or (isinstance(value, dict) and "sentences" in value)
    return _SENTENCES if many else _PAIR


_TextItem: TypeAlias = Annotated[
    Annotated[Text, Tag(_TEXT)] | Annotated[TextInput, Tag(_OBJECT)],
    Discriminator(_text_or_object),
]
Target: TypeAlias = Annotated[str, Field(max_length=_MAX_TARGET_CHARS)]
Targets: TypeAlias = Annotated[
    Annotated[Target, Tag(ONE)]
    | Annotated[list[Target], Field(min_length=1, max_length=MAX_TARGETS), Tag(MANY)],
    Discriminator(one_or_many),
]
_OrderItem: TypeAlias = Annotated[
    Annotated[TextPair, Tag(_PAIR)] | Annotated[Sentences, Tag(_SENTENCES)],
    Discriminator(_pair_or_sentences),
]


class FillMaskParameters(Parameters):
    """The parameters of fill-mask."""

    top_k: int = Field(5, ge=1, le=MAX_TOP_K, description="Number of predictions for each mask.")
    targets: Targets | None = Field(
        None,
        description="Token or list of tokens to choose from; if a token is not in the vocabulary, "
        f"its first piece is scored and the header {WARNINGS_HEADER} says so (default: the whole "
        "vocabulary).",
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        num_chars = 0 if self.targets is None else sum(map(len, self.targets))
        if num_chars > _MAX_CHARS_OF_TARGETS:
            raise contradiction(
                f"The targets have {num_chars} characters; at most {_MAX_CHARS_OF_TARGETS} are "
                "allowed. Send fewer or shorter targets."
            )
        return self


class TextClassificationParameters(Parameters):
    """The parameters of text classification."""

    function_to_apply: ScoreFunction | None = Field(
        None,
        description="Function that turns logits into scores (default: by the model's problem "
        "type, after division by the classifier's temperature).",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        le=MAX_TOP_K,
        description="Number of labels to return, best first (default: all).",
    )
    head: str | None = Field(
        None,
        max_length=MAX_HEAD_CHARS,
        description="Name of the classifier, if the model has several (default: the default "
        "classifier).",
    )


class QuestionAnsweringParameters(Parameters):
    """The parameters of question answering; lengths are in tokens."""

    top_k: int = Field(
        1,
        ge=1,
        le=MAX_TOP_K,
        description="Number of answers; if it is more than 1, the reply is a list.",
    )
    doc_stride: int | None = Field(
        None,
        ge=0,
        description="Number of tokens that neighbouring windows share (default: "
        "128, or fewer if windows are short).",
    )
    max_answer_len: int = Field(15, ge=1, le=512, description="Maximum tokens of an answer.")
    max_question_len: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens of the question, which is truncated to it "
        "(default: unlimited).",
    )
    max_seq_len: int | None = Field(
        None,
        ge=4,
        description="Maximum tokens of question and window together (default: 384, "
        "or the model's maximum if smaller).",
    )
    handle_impossible_answer: bool | None = Field(
        None,
        description='Whether "no answer" competes, as an empty answer (default: if the model '
        "has a threshold for it).",
    )
    null_score_diff_threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description='Threshold: "no answer" wins if its logit exceeds the best answer\'s by more'
        " than this (default: the model's threshold, otherwise 0).",
    )
    align_to_words: bool = Field(True, description="Whether answers are extended to whole words.")


class SentenceOrderParameters(Parameters):
    """The parameters of sentence order."""


class TokenClassificationParameters(Parameters):
    """The parameters of token classification, which reads a text of any length."""

    aggregation_strategy: AggregationStrategy = Field(
        "first",
        description="How labels of tokens become entities: not at all (none), by the label of "
        "each token (simple), or by the label of each word: its first token's label "
        "(first), the label with the best mean score (average), or the label with the "
        "highest score (max).",
    )
    ignore_labels: list[str] = Field(
        ["O"], max_length=MAX_TARGETS, description="Labels that are not returned."
    )
    stride: int | None = Field(
        None,
        ge=0,
        description="Number of tokens that neighbouring windows share (default: "
        "128, or fewer if windows are short).",
    )


class FillMaskRequest(TaskRequest):
    """Fill the masks of one text or of several."""

    inputs: OneOrMany[Text]
    parameters: OrNull[FillMaskParameters] = FillMaskParameters()


class TextClassificationRequest(TaskRequest):
    """Classify one text, or pair of texts, or several."""

    inputs: OneOrMany[_TextItem]
    parameters: OrNull[TextClassificationParameters] = TextClassificationParameters()


class QuestionAnsweringRequest(TaskRequest):
    """Find the answer to a question in a text, for one such pair or several."""

    inputs: OneOrMany[QuestionContext]
    parameters: OrNull[QuestionAnsweringParameters] = QuestionAnsweringParameters()


class SentenceOrderRequest(TaskRequest):
    """Score the order of a pair of texts, or of the sentences of a text."""

    inputs: OneOrMany[_OrderItem]
    parameters: OrNull[SentenceOrderParameters] = SentenceOrderParameters()


class TokenClassificationRequest(TaskRequest):
    """Find the entities in one text or in several."""

    inputs: OneOrMany[Text]
    parameters: OrNull[TokenClassificationParameters] = TokenClassificationParameters()


class FilledToken(Reply):
    """One way to fill a mask."""

    score: float = Field(description="Probability over the whole vocabulary, 0 to 1.")
    token: int
    token_str: str
    sequence: str = Field(description="Text with this mask filled.")


class LabelScore(Reply):
    """The score of a label."""

    label: str
    score: float


class EntityGroup(Reply):
    """An entity of a text: `text[start:end] == word`, in code points."""

    entity_group: str = Field(description="Label of the entity, without B- or I-.")
    score: float = Field(
        description="Mean of the probabilities of the entity's tokens or words, 0 to 1."
    )
    word: str
    start: int
    end: int


class ClassifiedToken(Reply):
    """A token of a text, and its label."""

    entity: str
    score: float
    index: int = Field(description="Position of the token in the text, from 1.")
    word: str = Field(description="Token, as in the vocabulary.")
    start: int
    end: int


class Answer(Reply):
    """A part of the context: `context[start:end] == answer`, in code points."""

    answer: str = Field(description='Part of the context; "" means "no answer".')
    score: float = Field(
        description='Probability among the 20 best answers and "no answer", 0 to 1.'
    )
    start: int
    end: int


class Order(Reply):
    """The order of a pair of texts."""

    in_order: float = Field(
        description="Probability of this order against the reverse order, 0 to 1."
    )


class PairOrder(Reply):
    """The order of two sentences of a list, given by their indices."""

    first: int
    second: int
    in_order: float = Field(
        description="Probability of this order against the reverse order, 0 to 1."
    )


class Coherence(Reply):
    """The coherence of sentences in the order of the request."""

    pairs: list[PairOrder] = Field(description="Order of each pair of neighbouring sentences.")
    coherence: float = Field(
        description="Geometric mean of `in_order` over all pairs; 0.5 means chance."
    )


FillMaskAnswer: TypeAlias = list[FilledToken] | list[list[FilledToken]]
QuestionAnsweringAnswer: TypeAlias = Answer | list[Answer]
SentenceOrderAnswer: TypeAlias = Coherence | Order
TokenClassificationAnswer: TypeAlias = list[EntityGroup] | list[ClassifiedToken]

FillMaskReply: TypeAlias = FillMaskAnswer | list[FillMaskAnswer]
# A single text has a nested list, too, because Hugging Face's clients take the first element.
TextClassificationReply: TypeAlias = list[list[LabelScore]]
# BentoML's OpenAPI document has only the first type, which must not be a reference.
QuestionAnsweringReply: TypeAlias = list[QuestionAnsweringAnswer] | QuestionAnsweringAnswer
SentenceOrderReply: TypeAlias = list[SentenceOrderAnswer] | SentenceOrderAnswer
TokenClassificationReply: TypeAlias = list[TokenClassificationAnswer] | TokenClassificationAnswer
# A request has one text or several, and pooling may be off.
FeatureExtractionReply: TypeAlias = (
    Embedding | list[Embedding] | TokenFeatures | list[TokenFeatures]
)


class TaskQuality(Reply):
    """Quality of the model's answers to a task, on the labelled data of its manifest."""

    metric: str = Field(description='Name of the metric, such as "accuracy" or "F1".')
    percent: float
    count: int = Field(description="Number of answers that were measured.")
    data: str | None = Field(None, description="Name of the data, if known.")


class InputExample(Reply):
    """An example input for the model."""

    inputs: Any = Field(description="One item of `inputs`.")
    label: str | None = Field(None, description="Short description of the example.")


class HeadInfo(Reply):
    """One of the classifiers of a model that has several."""

    name: str = Field(description="Name of the classifier: the value of the parameter `head`.")
    labels: list[str]
    problem_type: ProblemType | None = None
    quality: TaskQuality | None = Field(None, description="Quality on held-out data, if known.")


class SentenceVectorsInfo(Reply):
    """The default form of embeddings."""

    pooling: Pooled
    normalize: bool
    max_length: int | None = Field(
        None,
        description="Maximum tokens of a text, including [CLS] and [SEP] (default: max_positions).",
    )


class TaskInfo(Reply):
    """One task that the service answers."""

    name: str
    labels: list[str] | None = None
    problem_type: ProblemType | None = None
    heads: list[HeadInfo] | None = Field(
        None,
        description="Text classification: the classifiers, if the model has several or named "
        "ones. The first is the default, whose labels, problem type and quality the"
        " task shows.",
    )
    null_score_diff_threshold: float | None = Field(
        None,
        description="Question answering: default of the parameter `null_score_diff_threshold`.",
    )
    sentence_vectors: SentenceVectorsInfo | None = Field(
        None,
        description="Feature extraction: defaults of a model that was trained for sentence "
        "embeddings (otherwise: the mean of all tokens' vectors).",
    )
    quality: TaskQuality | None = Field(None, description="Quality on held-out data, if known.")
    examples: list[InputExample] | None = Field(
        None, description="Example inputs from the bundle's manifest."
    )


class ModelDescription(Reply):
    """A model: its tasks, its sizes, and how it was trained and measured."""

    model_id: str
    precision: str
    revision: str = Field("", description="Hash of the bundle's content.")
    tasks: list[TaskInfo]
    max_positions: int = Field(description="Maximum tokens of a text.")
    card: ModelCard | None = Field(None, description="Origin, sizes and metrics of the model.")

    def text(self) -> str:
        """Return the description as text of several lines."""
        return describe_model(self)


class InfoReply(ModelDescription):
    """The hosted model, and the service's limits."""

    version: str
    mask_token: str
    max_items: int = Field(description="Maximum number of items in a request.")
    max_body_bytes: int = Field(description="Maximum size of a body in bytes.")
    needs_key: bool = Field(False, description="Whether the tasks require an API key.")
    max_chars: int = Field(MAX_CHARS, description="Maximum characters of a text.")
    max_targets: int = Field(
        MAX_TARGETS, description="Maximum number of targets in a fill-mask request."
    )
    max_top_k: int = Field(MAX_TOP_K, description="Maximum value of `top_k`.")
    max_masks: int = Field(
        MAX_MASKS, description="Maximum number of masks in all texts of a request."
    )
    max_sentences: int = Field(MAX_SENTENCES, description="Maximum number of sentences in a text.")

    def __str__(self) -> str:
        return f"{self.text()}\n{describe_limits(self)}"


class ModelObject(Reply):
    """A hosted model, in OpenAI's format."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Time at which the bundle was written, in seconds since 1970.")
    owned_by: str = "albert-serve"


class ModelReply(ModelObject, InfoReply):
    """A hosted model: the fields of OpenAI's format and of `/info`."""


class ModelsReply(Reply):
    """The models of the service, as `data` in OpenAI's format."""

    object: Literal["list"] = "list"
    data: list[ModelObject]
    default: str = Field(
        description="Name of the model that answers requests without a model name."
    )
    models: list[ModelReply]


class ErrorReply(Reply):
    """The body of every reply that is not a success."""

    error: str
    error_type: str
    request_id: str | None = None
