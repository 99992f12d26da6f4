"""The text of a model card."""

from __future__ import annotations

from albert_serve.api.model_card import ModelCard, ModelSizes, TrainingStage
from albert_serve.api.schemas import InfoReply, TaskInfo, TaskQuality

SIZES = ModelSizes(
    num_parameters=5_338_470,
    weights_bytes=21_358_128,
    num_layers=6,
    hidden_size=384,
    embedding_size=256,
    num_heads=12,
    ffn_size=1536,
    vocab_size=12_000,
)


INFO = InfoReply(
    model_id="small",
    version="0.1.0",
    precision="int8",
    tasks=[
        TaskInfo(
            name="text-classification",
            labels=["no", "yes"],
            quality=TaskQuality(metric="accuracy", percent=84.29, count=872),
        )
    ],
    max_positions=512,
    mask_token="[MASK]",
    max_items=1024,
    max_body_bytes=4_194_304,
)


def test_the_text_has_all_that_is_known() -> None:
    stage = TrainingStage(
        program="albert-serve finetune", steps=3120, data=["a", "b", "c", "d", "e"]
    )
    card = ModelCard(
        license="mit",
        language=["en"],
        base_model=["a/b"],
        sizes=SIZES,
        evaluation={"masked_loss": 4.46967, "masked_tokens": 116_035},
        training=[stage, TrainingStage(program="albert-serve distil", tokens=7, seconds=60)],
    )
    info = INFO.model_copy(update={"revision": "abc", "needs_key": True, "card": card})
    assert str(info).splitlines() == [
        "small: an ALBERT in int8, revision abc",
        "license: mit",
        "language: en",
        "base model: a/b",
        (
            "sizes: 5,338,470 parameters in 21.4 MB, 6 layers of 384 with 12 heads, "
            "a vocabulary of 12,000"
        ),
        "tasks:",
        "  text-classification (no, yes): accuracy 84.3 % of 872",
        "evaluation:",
        "  fill-mask: loss 4.47",
        "  fill-mask: tokens 116,035",
        "training:",
        "  albert-serve finetune, 3,120 steps, on a, b, c, 2 more",
        "  albert-serve distil, 7 tokens, 60 s",
        "limits: 512 tokens a text, 1,024 items and 4,194,304 bytes a request, with a key",
    ]


def test_what_is_not_known_is_left_out() -> None:
    info = INFO.model_copy(update={"card": ModelCard(sizes=SIZES)})
    assert [line.partition(":")[0] for line in str(info).splitlines()] == [
        *("small", "sizes", "tasks", "  text-classification (no, yes)", "limits"),
    ]
