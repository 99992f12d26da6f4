"""A stage of pretraining on one GPU for some minutes: here on the CPU, for some steps."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial, partialmethod
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from albert_serve.tokenizer import AlbertTokenizer
from recipes.albert_small_en import gpu_stage, gpu_text
from recipes.albert_small_en.gpu_text import MaskedText, read_text, write_text
from tests.training.processes import before_step, die, get_signals, run_in_process
from tests.training.support import make_part, make_shards, read_metrics
from training.commands import finetune, prepare
from training.data.batch import PretrainBatch
from training.data.collate import Slicing
from training.data.masking import NgramMasking, word_bounds
from training.errors import RunError
from training.loop.step import Run
from training.model.checkpoint import load_checkpoint, read_config, read_weights
from training.model.provenance import read_stages

PROGRAM = "recipes.albert_small_en.gpu_stage"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def packed(
    pretrained: Path, easy_corpus: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A packed folder of the easy corpus and the pretrained checkpoint."""
    folder = tmp_path_factory.mktemp("gpu")
    words = ["--corpus", str(easy_corpus), "--tokenizer", str(vocab_dir), "--workers", "1"]
    assert prepare.main([*words, "--output", str(folder / "shards")]) == 0
    words = ["pack", "--initialize-from", str(pretrained / "checkpoint")]
    words += ["--shards", str(folder / "shards"), "--output", str(folder / "packed")]
    assert gpu_stage.main(words) == 0
    return folder / "packed"


@pytest.fixture
def options(packed: Path) -> list[str]:
    return [
        *("train", "--packed", str(packed), "--device", "cpu", "--no-compile"),
        *("--length", "32", "--batch-size", "8", "--micro-batch-size", "4"),
        *("--report-every", "1", "--precision", "fp32"),
    ]


def test_the_next_stage_continues_from_the_checkpoint(
    packed: Path, options: list[str], easy_corpus: Path, tmp_path: Path, capsys: Capture
) -> None:
    run, checkpoint = tmp_path / "run", str(tmp_path / "run/checkpoint")
    rates = ("--lr", "1e-2", "--adamw-lr", "1e-2")
    assert gpu_stage.main([*options, *rates, "--steps", "4", "--output", str(run)]) == 0
    assert "4 steps, 1,024 tokens" in capsys.readouterr().out
    assert all(
        line.keys() >= {"fill-mask/loss", "tokens", "tokens_per_s"} for line in read_metrics(run)
    )
    before, after = read_weights(packed / "checkpoint"), read_weights(run / "checkpoint")
    assert {tensor.dtype for tensor in (*before.values(), *after.values())} == {torch.bfloat16}
    assert {name for name in before if torch.equal(before[name], after[name])} >= {
        name for name in before if "pooler" in name or "sop_classifier" in name
    }
    for name in ("albert.embeddings.word_embeddings.weight", "predictions.dense.weight"):
        assert not torch.equal(before[name], after[name])
    assert read_config(run / "checkpoint") == read_config(packed / "checkpoint")
    assert [stage["program"] for stage in read_stages(run / "checkpoint")[-2:]] == [
        f"{PROGRAM} pack",
        f"{PROGRAM} train",
    ]
    theirs = transformers.AlbertForPreTraining.from_pretrained(checkpoint)
    assert isinstance(theirs, transformers.AlbertForPreTraining)
    decoded = theirs.predictions.bias.detach().bfloat16()
    assert torch.equal(decoded, after["predictions.bias"])
    words = ["--initialize-from", checkpoint, "--pretraining", str(easy_corpus), "--length", "32"]
    words += ["--steps", "2", "--batch-size", "4", "--order-share", "0.5", "--device", "cpu"]
    assert finetune.main([*words, "--output", str(tmp_path / "next")]) == 0


def test_masked_tokens_are_learnt(options: list[str], tmp_path: Path) -> None:
    words = [*options, "--lr", "1e-2", "--adamw-lr", "1e-2", "--steps", "60"]
    assert gpu_stage.main([*words, "--output", str(tmp_path / "run")]) == 0
    losses = [line["fill-mask/loss"] for line in read_metrics(tmp_path / "run")]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])


def test_the_checkpoint_is_the_moving_average(options: list[str], tmp_path: Path) -> None:
    words = [*options, "--steps", "4", "--save-every", "0.0001s", "--keep", "9"]
    words += ["--lr", "0.05", "--adamw-lr", "0.05"]
    for decay in ("0", "0.5"):
        assert gpu_stage.main([*words, "--ema", decay, "--output", str(tmp_path / decay)]) == 0

    def at(decay: str, step: int) -> dict[str, torch.Tensor]:
        folder = tmp_path / decay / f"checkpoints/step-{step:08}"
        return {name: tensor.float() for name, tensor in read_weights(folder).items()}

    expected = at("0", 1)
    for step in (2, 3, 4):
        expected = {
            name: torch.lerp(expected[name], weights, 0.5)
            for name, weights in at("0", step).items()
        }
    torch.testing.assert_close(at("0.5", 4), expected, rtol=2**-6, atol=1e-4)
    name = "predictions.dense.weight"
    assert not torch.allclose(at("0.5", 4)[name], at("0", 4)[name], rtol=2**-6, atol=1e-4)


def test_a_killed_run_leaves_a_checkpoint_to_start_from(
    options: list[str], tmp_path: Path, capsys: Capture
) -> None:
    run, words = tmp_path / "run", [*options, "--steps", "9", "--save-every", "0.0001s"]
    fate = partial(before_step, 4, die)
    assert run_in_process(words, run, program=PROGRAM, fate=fate).status == -signal.SIGKILL
    load_checkpoint(run / "checkpoint")
    assert gpu_stage.main([*words, "--output", str(run)]) == 1
    assert f"--initialize-from {run}/checkpoint" in capsys.readouterr().err
    words += ["--initialize-from", f"{run}/checkpoint", "--output", str(tmp_path / "next")]
    assert gpu_stage.main(words) == 0


def test_a_signal_ends_the_run_with_a_checkpoint(options: list[str], tmp_path: Path) -> None:
    fate = partial(before_step, 3, partial(get_signals, signal.SIGTERM))
    words = [*options, "--steps", "8"]
    ended = run_in_process(words, tmp_path / "run", program=PROGRAM, fate=fate)
    assert (ended.status, ended.err) == (128 + signal.SIGTERM, "")
    assert "stopped at 37.5%; a new run can start from its checkpoint\n" in ended.out
    assert (tmp_path / "run/checkpoint").resolve().name == "step-00000003"


# Dynamo hides it by a function that pytest replaces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_nothing_is_compiled_after_the_clock_starts(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step has another learning rate than the second, and an epoch ends."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    original = gpu_stage._compile
    frames = list[int]()

    def compile_then_refuse(run: Run) -> None:
        original(run)
        frames.append(torch._dynamo.utils.counters["frames"]["ok"])
        monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)

    monkeypatch.setattr(gpu_stage, "_compile", compile_then_refuse)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    words = [*options, "--compile", "--steps", "40", "--output", str(tmp_path / "run")]
    assert gpu_stage.main(words) == 0
    assert frames == [4]
    assert torch._dynamo.utils.counters["frames"]["ok"] == 4
    torch._dynamo.reset()


def _truncate(folder: Path) -> None:
    file = folder / "text.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _damage(folder: Path) -> None:
    file = folder / "text.safetensors"
    content = bytearray(file.read_bytes())
    content[-60:-40] = bytes(20)
    file.write_bytes(content)


def _remove(folder: Path) -> None:
    (folder / "text.safetensors").unlink()


@pytest.mark.parametrize("fault", [_truncate, _damage, _remove])
def test_a_damaged_text_is_refused(
    packed: Path,
    options: list[str],
    tmp_path: Path,
    capsys: Capture,
    fault: Callable[[Path], None],
) -> None:
    copy = tmp_path / "packed"
    copy.mkdir()
    (copy / "checkpoint").symlink_to(packed / "checkpoint")
    (copy / "text.safetensors").write_bytes((packed / "text.safetensors").read_bytes())
    fault(copy)
    words = [*options, "--steps", "1", "--packed", str(copy), "--output", str(tmp_path / "run")]
    assert gpu_stage.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {copy / 'text.safetensors'} cannot be read: ")
    assert error.endswith("; copy it again, or pack it again\n")


def test_a_text_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.safetensors"
    write_text(make_shards(make_part([[300]], 50)), 50, file, 1 << 20)
    with pytest.raises(RunError, match=r"a vocabulary of 50 tokens, and the checkpoint has 12,000"):
        read_text(file, 12_000)
    with pytest.raises(RunError, match=r"100,000 tokens; two bytes a token hold 65,536"):
        write_text(make_shards(make_part([[300]])), 100_000, file, 1 << 20)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "4096"), "--batch-size 4096: the text has only "),
        (("--length", "128"), "--length 128: a row has from 8 tokens to the model's 64 positions"),
        (("--micro-batch-size", "3"), "8 rows do not divide into batches of 3"),
    ],
)
def test_a_stage_that_does_not_fit_is_refused(
    options: list[str], tmp_path: Path, capsys: Capture, words: tuple[str, ...], message: str
) -> None:
    words = (*words, "--steps", "1", "--output", str(tmp_path / "run"))
    assert gpu_stage.main([*options, *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("room", [9_000, 1 << 20])
def test_as_much_text_is_written_as_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(gpu_text, "_TOKENS_A_BLOCK", 1024)
    parts = [make_part([[5_000]], 60_000), make_part([[3_000]], 60_000)]
    file = tmp_path / "text.safetensors"
    num_tokens = write_text(make_shards(*parts), 60_000, file, room)
    assert file.stat().st_size <= room
    assert (num_tokens == 8_000) is (room == 1 << 20)
    tokens = np.concatenate([part.tokens for part in parts])
    assert read_text(file, 60_000).tolist() == tokens[:num_tokens].tolist()


def test_a_limit_below_the_weights_is_refused(
    pretrained: Path, packed: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_text, "_HEADER_BYTES", 1 << 20)
    words = ["pack", "--initialize-from", str(pretrained / "checkpoint"), "--max-mib", "1"]
    words += ["--shards", str(packed.with_name("shards")), "--output", str(tmp_path / "packed")]
    assert gpu_stage.main(words) == 1
    assert "--max-mib 1: no text fits" in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()


def masked_text(masking: NgramMasking, num_tokens: int = 40_000, seed: int = 0) -> MaskedText:
    random = np.random.default_rng(0).integers(5, len(masking.word_starts), num_tokens)
    return MaskedText(
        tokens=torch.from_numpy(random.astype(np.int32)),
        masking=masking,
        length=64,
        slicing=Slicing(num_rows=32, rows_a_batch=16),
        seed=seed,
    )


def steps(text: MaskedText, count: int) -> list[PretrainBatch]:
    batches = [batch for _ in range(count) for batch in text.step()]
    return [batch for batch in batches if isinstance(batch, PretrainBatch)]


def test_rows_have_equally_many_masks_on_whole_words(tokenizer: AlbertTokenizer) -> None:
    masking = NgramMasking.of(tokenizer, 0.2)
    kinds: list[int] = []
    for batch in steps(masked_text(masking), 10):
        ids = batch.tokens.ids
        whole = ids.flatten().scatter(0, batch.rows, batch.targets).view_as(ids)
        assert len(set(batch.rows.tolist())) == batch.counts["fill-mask"]
        assert ((batch.rows // 64).bincount() == round(0.2 * 62)).all()
        assert (whole[:, 0] == tokenizer.cls_id).all()
        assert (whole[:, -1] == tokenizer.sep_id).all()
        assert not np.isin(batch.targets, list(tokenizer.special.every)).any()
        is_masked = torch.zeros(ids.shape, dtype=torch.bool).flatten()
        is_masked[batch.rows] = True
        for row, masks in zip(whole.numpy(), is_masked.view_as(ids).numpy(), strict=True):
            words = zip(*word_bounds(row, masking.word_starts, masking.is_special), strict=True)
            shares = [masks[begin:end].mean() for begin, end in words]
            assert sum(0 < share < 1 for share in shares) <= 1
        shown = ids.flatten()[batch.rows]
        kinds += torch.where(
            shown == tokenizer.mask_id, 0, 1 + (shown == batch.targets).int()
        ).tolist()
    np.testing.assert_allclose(np.bincount(kinds) / len(kinds), [0.8, 0.1, 0.1], atol=0.02)


def test_an_epoch_has_each_token_once_and_the_next_is_cut_elsewhere(
    tokenizer: AlbertTokenizer,
) -> None:
    text = masked_text(NgramMasking.of(tokenizer), 62 * (4 * 32 + 1) + 5)
    text.tokens = torch.arange(len(text.tokens), dtype=torch.int32) % 700 + 5
    epochs = [steps(text, 4), steps(text, 4)]
    firsts = []
    for batches in epochs:
        ids = torch.cat(
            [b.tokens.ids.flatten().scatter(0, b.rows, b.targets).view(-1, 64) for b in batches]
        )
        assert ((ids[:, 2:-1] - ids[:, 1:-2]) % 700 == 1).all()
        rows = sorted(ids[:, 1:-1].tolist())
        assert len(rows) == len({tuple(row) for row in rows}) == 4 * 32
        firsts.append({row[0] for row in rows})
    assert firsts[0] != firsts[1]


def test_steps_depend_on_the_seed_and_their_number(tokenizer: AlbertTokenizer) -> None:
    masking = NgramMasking.of(tokenizer)
    ids = [batch.tokens.ids for batch in steps(masked_text(masking), 6)]
    again = masked_text(masking)
    again.restore([4])
    assert again.state() == [4]
    assert torch.equal(steps(again, 1)[0].tokens.ids, ids[8])
    assert not any(torch.equal(first, second) for first, second in pairwise(ids))
    assert not torch.equal(steps(masked_text(masking, seed=1), 1)[0].tokens.ids, ids[0])
