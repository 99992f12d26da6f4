"""The beam search of a start-conditioned head: against the original's, and over several windows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from albert_serve.bundle.weights import NUM_BEAMS
from albert_serve.tasks import Logits
from albert_serve.tasks.question_answering.beams import find_beams
from albert_serve.tasks.question_answering.windows import Windows, lay_windows


def offsets_of(num_tokens: int) -> list[tuple[int, int]]:
    """Words of two characters with a space between them."""
    return [(3 * token, 3 * token + 2) for token in range(num_tokens)]


def random_logits(windows: Windows, seed: int) -> list[Logits]:
    generator = np.random.default_rng(seed)
    return [
        generator.normal(scale=2, size=(1 + end - begin, 2 + NUM_BEAMS)).astype(np.float32)
        for begin, end in windows.ranges
    ]


def log_shares(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(0))
    return shares


def original(windows: Windows, logits: list[Logits], longest: int) -> list[tuple[int, int, float]]:
    """Spans of tokens by `write_predictions_v2` of google-research/ALBERT, the best first.

    It takes the 5 best ends of each start, and leaves out what is no span: here all ends are asked
    for, so that none is lost to them.
    """
    owners = windows.owners()
    found = []
    for number, ((begin, _), window) in enumerate(zip(windows.ranges, logits, strict=True)):
        starts = log_shares(window[:, 0].astype(np.float64))
        for beam, start in enumerate(np.argsort(-starts)[:NUM_BEAMS]):
            ends = log_shares(window[:, 2 + beam].astype(np.float64))
            spans = []
            for end in range(len(window)):
                if start == 0 or owners[begin + start - 1] != number:
                    continue
                if end < start or end - start + 1 > longest:
                    continue
                spans.append((begin + start - 1, begin + end - 1, starts[start] + ends[end]))
            found += sorted(spans, key=lambda span: -span[2])[:NUM_BEAMS]
    return sorted(found, key=lambda span: -span[2])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("num_tokens", "room", "overlap"), [(12, 20, 0), (40, 16, 6), (3, 9, 0)])
def test_the_spans_are_the_originals(seed: int, num_tokens: int, room: int, overlap: int) -> None:
    windows = lay_windows(num_tokens, room, overlap, num_before=4)
    logits = random_logits(windows, seed)
    found = find_beams(windows, logits, offsets_of(num_tokens), max_answer_len=6)
    expected = original(windows, logits, 6)
    assert expected
    assert [(span.start, span.end) for span in found.best] == [
        (3 * first, 3 * last + 2) for first, last, _ in expected
    ]
    np.testing.assert_allclose(
        [span.logit for span in found.best], [logit for *_, logit in expected], atol=1e-6
    )
    assert found.null_score == pytest.approx(min(each[0, 1] for each in logits), abs=1e-6)


def test_no_answer_is_as_likely_as_the_window_that_doubts_least() -> None:
    """Its odds against the best answer are those of the answerability logit and the threshold."""
    windows = lay_windows(40, 16, 6, num_before=4)
    logits = random_logits(windows, 0)
    for window, doubt in zip(logits, (3.0, -1.5, 2.0, 4.0), strict=True):
        window[:, 1] = doubt
    found = find_beams(windows, logits, offsets_of(40), max_answer_len=6)
    assert found.null_score == pytest.approx(-1.5)
    for threshold in (0.0, -1.0, -2.0):
        scores, no_answer = found.scores(threshold)
        assert no_answer / scores[0] == pytest.approx(np.exp(-1.5 - threshold))
        assert (no_answer > scores[0]) == (threshold < -1.5)


def test_where_no_window_has_a_start_of_its_own_those_of_the_others_are_taken() -> None:
    windows = Windows(ranges=[(0, 1), (0, 1)], num_before=4)
    unsure, sure = (np.full((2, 2 + NUM_BEAMS), -30, np.float32) for _ in range(2))
    unsure[0, 0] = sure[1, 0] = sure[1, 2] = 30
    found = find_beams(windows, [unsure, sure], offsets_of(1), max_answer_len=6)
    assert [(span.start, span.end) for span in found.best] == [(0, 2)]


def test_tokens_of_the_same_characters_are_one_answer() -> None:
    windows = lay_windows(3, 9, 0, num_before=4)
    logits = np.zeros((4, 2 + NUM_BEAMS), np.float32)
    found = find_beams(windows, [logits], [(0, 2), (0, 2), (3, 5)], max_answer_len=3)
    spans = {(span.start, span.end): span.logit for span in found.best}
    pair = -2 * np.log(4)
    assert spans == {
        (0, 2): pytest.approx(pair + np.log(3)),
        (0, 5): pytest.approx(pair + np.log(2)),
        (3, 5): pytest.approx(pair),
    }


def test_a_context_of_white_space_has_no_answer() -> None:
    windows = lay_windows(2, 9, 0, num_before=4)
    logits = np.zeros((3, 2 + NUM_BEAMS), np.float32)
    found = find_beams(windows, [logits], [(1, 1), (2, 2)], max_answer_len=3)
    assert found.best == []
    assert found.null_score == np.inf
