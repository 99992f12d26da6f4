"""The wire contract: requests and replies of each endpoint, in Hugging Face's inference format.

A request is `{"inputs": ..., "parameters": {...}}`; `inputs` is one item or a list of them. A
parameter that is left out, or null, has its default. Replies have Hugging Face's shapes exactly;
what they have no room for travels in the headers named here.
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

# Each hosted model also has a path of its own.
MODELS_PATH: Final = "/v1/models"
MODEL_PATH: Final = f"{MODELS_PATH}/{{model}}"
# Warnings for the caller, as a JSON array in ASCII.
WARNINGS_HEADER: Final = "X-Albert-Warnings"

MAX_HEAD_CHARS: Final = 64
MAX_TOP_K: Final = 1000
MAX_TARGETS: Final = 1000
_MAX_TARGET_CHARS: Final = 1000
_MAX_CHARS_OF_TARGETS: Final = 1 << 16
# The limit of all texts of a request together: each mask is a row of vocabulary-wide logits.
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

    text: Text = Field(description="The first text.")
    text_pair: Text = Field(description="The second text.")


class Sentences(Request):
    """A text, as the sentences that it consists of."""

    sentences: list[Text] = Field(min_length=2, max_length=MAX_SENTENCES)


class TextInput(Request):
    """A text, or two that are read together."""

    text: Text = Field(description="The first, or only, text.")
    text_pair: Text | None = Field(None, description="The second text.")


class QuestionContext(Request):
    """A question, and the text to search for its answer."""

    question: Text
    context: Text


def _text_or_object(value: object) -> str:
    return _TEXT if isinstance(value, str) else _OBJECT


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

    top_k: int = Field(5, ge=1, le=MAX_TOP_K, description="Predictions for each mask.")
    targets: Targets | None = Field(
        None,
        description="Score these tokens only. One that the vocabulary lacks stands for its first "
        f"piece, which the {WARNINGS_HEADER} header then says.",
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        num_chars = 0 if self.targets is None else sum(map(len, self.targets))
        if num_chars > _MAX_CHARS_OF_TARGETS:
            raise contradiction(
                f"the targets have {num_chars} characters together; at most "
                f"{_MAX_CHARS_OF_TARGETS} are taken: send fewer or shorter ones"
            )
        return self


class TextClassificationParameters(Parameters):
    """The parameters of text classification."""

    function_to_apply: ScoreFunction | None = Field(
        None,
        description="The function of the logits. Left out, the model's problem type decides, and "
        "the classifier's temperature applies.",
    )
    top_k: int | None = Field(
        None, ge=1, le=MAX_TOP_K, description="The best so many labels; left out, all."
    )
    head: str | None = Field(
        None,
        max_length=MAX_HEAD_CHARS,
        description="The classifier, of a model that has several; left out, its default one.",
    )


class QuestionAnsweringParameters(Parameters):
    """The parameters of question answering; lengths are in tokens."""

    top_k: int = Field(1, ge=1, le=MAX_TOP_K, description="Answers; over 1 replies with a list.")
    doc_stride: int | None = Field(
        None, ge=0, description="Tokens that neighbouring windows share; left out, 128 or fewer."
    )
    max_answer_len: int = Field(15, ge=1, le=512, description="Longest answer.")
    max_question_len: int | None = Field(
        None, ge=1, description="Cut a longer question to this; left out, it is not cut."
    )
    max_seq_len: int | None = Field(
        None, ge=4, description="Question and window together; left out, 384 or fewer."
    )
    handle_impossible_answer: bool | None = Field(
        None,
        description='Let "no answer" compete, as an empty answer. Left out, of a model that has a '
        "threshold for it.",
    )
    null_score_diff_threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description='"No answer" wins where its logit is over that of the best answer by more than '
        "this. Left out, the model's own, tuned on questions without an answer, or 0.",
    )
    align_to_words: bool = Field(True, description="Widen an answer to whole words.")


class SentenceOrderParameters(Parameters):
    """The parameters of sentence order."""


class TokenClassificationParameters(Parameters):
    """The parameters of token classification, which reads a text of any length."""

    aggregation_strategy: AggregationStrategy = Field(
        "first",
        description="How labels of tokens become entities: not at all (none); by the label of each "
        "token (simple); or by that of each word: of its first token, of its tokens' mean scores, "
        "of its highest score.",
    )
    ignore_labels: list[str] = Field(
        ["O"], max_length=MAX_TARGETS, description="Labels that are not answered."
    )
    stride: int | None = Field(
        None, ge=0, description="Tokens that neighbouring windows share; left out, 128 or fewer."
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
    """Say whether the second text follows the first, or how well sentences follow each other."""

    inputs: OneOrMany[_OrderItem]
    parameters: OrNull[SentenceOrderParameters] = SentenceOrderParameters()


class TokenClassificationRequest(TaskRequest):
    """Find the entities in one text or in several."""

    inputs: OneOrMany[Text]
    parameters: OrNull[TokenClassificationParameters] = TokenClassificationParameters()


class FilledToken(Reply):
    """One way to fill a mask."""

    score: float = Field(description="Probability over the whole vocabulary.")
    token: int
    token_str: str
    sequence: str = Field(description="The text with this mask filled.")


class LabelScore(Reply):
    """The score of a label."""

    label: str
    score: float


class EntityGroup(Reply):
    """An entity of a text: `text[start:end] == word`, in code points."""

    entity_group: str = Field(description="Its label, without B- or I-.")
    score: float = Field(description="Mean of its tokens' or words' probabilities.")
    word: str
    start: int
    end: int


class ClassifiedToken(Reply):
    """A token of a text, and its label."""

    entity: str
    score: float
    index: int = Field(description="The token's place in the text, from 1.")
    word: str = Field(description="The token as the vocabulary writes it.")
    start: int
    end: int


class Answer(Reply):
    """A part of the context: `context[start:end] == answer`, in code points."""

    answer: str = Field(description='"" where "no answer" is the answer.')
    score: float = Field(description='Probability among the 20 best answers and "no answer".')
    start: int
    end: int


class Order(Reply):
    """The order of a pair of texts."""

    in_order: float = Field(description="Probability that the second text follows the first.")


class PairOrder(Reply):
    """The order of two sentences of a list, given by their indices."""

    first: int
    second: int
    in_order: float = Field(description="Probability that the second follows the first.")


class Coherence(Reply):
    """The coherence of sentences in the order of the request."""

    pairs: list[PairOrder] = Field(description="The neighbours.")
    coherence: float = Field(description="Geometric mean of the neighbours' in_order.")


FillMaskAnswer: TypeAlias = list[FilledToken] | list[list[FilledToken]]
QuestionAnsweringAnswer: TypeAlias = Answer | list[Answer]
SentenceOrderAnswer: TypeAlias = Coherence | Order
TokenClassificationAnswer: TypeAlias = list[EntityGroup] | list[ClassifiedToken]

FillMaskReply: TypeAlias = FillMaskAnswer | list[FillMaskAnswer]
# Nested for a single text too: Hugging Face's clients take the first element.
TextClassificationReply: TypeAlias = list[list[LabelScore]]
# Lists first: of several types BentoML's OpenAPI document has the first, which may be no reference.
QuestionAnsweringReply: TypeAlias = list[QuestionAnsweringAnswer] | QuestionAnsweringAnswer
SentenceOrderReply: TypeAlias = list[SentenceOrderAnswer] | SentenceOrderAnswer
TokenClassificationReply: TypeAlias = list[TokenClassificationAnswer] | TokenClassificationAnswer
# One text or several, each pooled or not.
FeatureExtractionReply: TypeAlias = (
    Embedding | list[Embedding] | TokenFeatures | list[TokenFeatures]
)


class TaskQuality(Reply):
    """Quality of the model's answers to a task, on the labelled data of its manifest."""

    metric: str = Field(description='Such as "accuracy" or "F1".')
    percent: float
    count: int = Field(description="Answers that it was measured on.")
    data: str | None = Field(None, description="The files that these are from, where known.")


class InputExample(Reply):
    """An example input for the model."""

    inputs: Any = Field(description="One item, as the endpoint takes it.")
    label: str | None = Field(None, description="A few words for it.")


class HeadInfo(Reply):
    """One of the classifiers of a model that has several."""

    name: str = Field(description="The value of the parameter `head`.")
    labels: list[str]
    problem_type: ProblemType | None = None
    quality: TaskQuality | None = Field(None, description="Left out, it is not known.")


class SentenceVectorsInfo(Reply):
    """The form of embeddings where a request does not say it."""

    pooling: Pooled
    normalize: bool
    max_length: int | None = Field(
        None, description="Tokens of a text, [CLS] and [SEP] among them; left out: max_positions."
    )


class TaskInfo(Reply):
    """One task that the service answers."""

    name: str
    labels: list[str] | None = None
    problem_type: ProblemType | None = None
    heads: list[HeadInfo] | None = Field(
        None,
        description="Of text classification: the classifiers of a model that has several or named "
        "ones; labels, problem type and quality of the task are those of the first, the default.",
    )
    null_score_diff_threshold: float | None = Field(
        None, description="Of question answering: the default of the parameter."
    )
    sentence_vectors: SentenceVectorsInfo | None = Field(
        None,
        description="Of feature extraction, if the model was trained to give vectors of sentences; "
        "left out, the mean of all tokens' vectors.",
    )
    quality: TaskQuality | None = Field(None, description="Left out, it is not known.")
    examples: list[InputExample] | None = Field(None, description="Of the model's manifest.")


class ModelDescription(Reply):
    """A model: its tasks, its sizes, and how it was trained and measured."""

    model_id: str
    precision: str
    revision: str = Field("", description="Another as soon as a byte of the bundle is.")
    tasks: list[TaskInfo]
    max_positions: int
    card: ModelCard | None = Field(None, description="What the model is, and how it was made.")

    def text(self) -> str:
        """Return the description as text of several lines."""
        return describe_model(self)


class InfoReply(ModelDescription):
    """The hosted model, and the service's limits."""

    version: str
    mask_token: str
    max_items: int = Field(description="Items that one request may hold.")
    max_body_bytes: int
    needs_key: bool = Field(False, description="Whether the tasks are answered with a key only.")
    max_chars: int = Field(MAX_CHARS, description="Characters of one text.")
    max_targets: int = Field(MAX_TARGETS, description="Targets of one fill-mask request.")
    max_top_k: int = MAX_TOP_K
    max_masks: int = Field(MAX_MASKS, description="Masks in all texts of a request together.")
    max_sentences: int = Field(MAX_SENTENCES, description="Sentences of one text.")

    def __str__(self) -> str:
        return f"{self.text()}\n{describe_limits(self)}"


class ModelObject(Reply):
    """A hosted model, in OpenAI's format."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When its bundle was written, in seconds since 1970.")
    owned_by: str = "albert-serve"


class ModelReply(ModelObject, InfoReply):
    """A hosted model: the fields of OpenAI's format, then those of `/info`."""


class ModelsReply(Reply):
    """The models of the service, as `data` in OpenAI's format."""

    object: Literal["list"] = "list"
    data: list[ModelObject]
    default: str = Field(description="The model that answers where none is named.")
    models: list[ModelReply]


class ErrorReply(Reply):
    """The body of every reply that is not a success."""

    error: str
    error_type: str
    request_id: str | None = None
