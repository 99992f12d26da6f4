"""The beam search of a start-conditioned head: against the original's, and over several windows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from albert_serve.bundle.weights import NUM_BEAMS
from albert_serve.errors import EngineError
from albert_serve.tasks import Logits
from albert_serve.tasks.question_answering.beams import find_beams
from albert_serve.tasks.question_answering.windows import Windows, lay_windows

NO_LOGIT = -30.0


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


def peaked(num_rows: int, start: int, end: int) -> Logits:
    """The logits of a window that is sure of a span of rows."""
    logits = np.full((num_rows, 2 + NUM_BEAMS), NO_LOGIT, np.float32)
    logits[:, 0] -= np.arange(num_rows)
    logits[start, 0] = logits[end, 2:] = 30
    return logits


def test_a_window_that_points_at_cls_loses_to_one_that_is_sure() -> None:
    windows = lay_windows(20, 10, 0, num_before=4)
    found = find_beams(
        windows, [peaked(11, 0, 0), peaked(11, 3, 5)], offsets_of(20), max_answer_len=6
    )
    assert (found.best[0].start, found.best[0].end) == (3 * 12, 3 * 14 + 2)
    assert found.best[0].logit == pytest.approx(0, abs=1e-6)


def test_a_start_that_another_window_has_more_context_of_does_not_count() -> None:
    """Both windows are sure of the same token, which stands at the edge of the first."""
    windows = lay_windows(16, 10, 4, num_before=4)
    token = 9
    logits = [peaked(11, token + 1, token + 1), peaked(11, token - 6 + 1, token - 6 + 1)]
    found = find_beams(windows, logits, offsets_of(16), max_answer_len=6)
    assert (found.best[0].start, found.best[0].end) == (3 * token, 3 * token + 2)
    assert found.best[0].logit == pytest.approx(0, abs=1e-6)
    # Where no window has a start of its own, those of the others are taken.
    only = find_beams(
        Windows(ranges=[(0, 1), (0, 1)], num_before=4),
        [peaked(2, 0, 0), peaked(2, 1, 1)],
        offsets_of(1),
        max_answer_len=6,
    )
    assert only.best


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


def test_logits_that_are_not_finite_are_refused() -> None:
    windows = lay_windows(2, 9, 0, num_before=4)
    logits = np.full((3, 2 + NUM_BEAMS), np.nan, np.float32)
    with pytest.raises(EngineError, match="finite"):
        find_beams(windows, [logits], offsets_of(2), max_answer_len=3)
