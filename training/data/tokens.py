"""Training windows of texts with entities, and the tag of each word."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from albert_serve.progress import progress
from albert_serve.tasks import TaskSetup, TokenClassification
from albert_serve.tasks.token_classification.entities import OUTSIDE
from albert_serve.tasks.token_classification.task import TextInWindows
from albert_serve.tokenizer import AlbertTokenizer
from training.data.batch import TokenisedExample
from training.data.examples import IGNORED
from training.data.labelled.entities import TaggedText, tell


def token_task(tokenizer: AlbertTokenizer, length: int) -> TokenClassification:
    """Return the service's task, which lays texts in windows of at most `length` tokens."""
    return TokenClassification(TaskSetup(tokenizer=tokenizer, max_positions=length, hidden_size=1))


def words_of(laid: TextInWindows, text: TaggedText) -> list[range]:
    """Return the tokens of each word: the file's, or those that the service finds in plain text.

    A word of a file may have no token.
    """
    if not text.words:
        return laid.words
    begins = [start for start, _ in laid.encoding.offsets]
    return [range(*(bisect_left(begins, place) for place in word)) for word in text.words]


def word_tags(laid: TextInWindows, text: TaggedText) -> tuple[list[str], int]:
    """Return the tag of each word, as BIO has it, and the number of entities that fit no words.

    Such an entity begins or ends within a word; the words that begin in it are its.
    """
    offsets = laid.encoding.offsets
    bounds = text.words or [(offsets[word[0]][0], offsets[word[-1]][1]) for word in laid.words]
    tags = [OUTSIDE] * len(bounds)
    num_unfit = 0
    for start, end, label in text.entities:
        inside = [n for n, (begin, _) in enumerate(bounds) if start <= begin < end]
        for number in inside:
            tags[number] = f"{'B' if number == inside[0] else 'I'}-{label}"
        fits = inside and bounds[inside[0]][0] == start and bounds[inside[-1]][1] == end
        num_unfit += not fits
    return tags, num_unfit


def token_examples(
    texts: Sequence[TaggedText], tokenizer: AlbertTokenizer, names: Sequence[str], *, length: int
) -> list[TokenisedExample]:
    """Return the windows of texts, and print the places of entities that fit no words.

    The target of a word's first token is the number of its tag, of each word in one window: that
    with most text around it. The other tokens are IGNORED.

    Args:
        names: of the tags.
        length: maximum tokens of a window.
    """
    task, number_of = token_task(tokenizer, length), {name: n for n, name in enumerate(names)}
    examples, unfit = [], []
    for text in progress(texts, title="tokenising texts", unit="texts"):
        if not tokenizer.encode_plain(text.text).ids:
            continue
        laid = task.lay(text.text)
        tags, num_unfit = word_tags(laid, text)
        unfit += [text.place] * num_unfit
        targets = [IGNORED] * len(laid.encoding)
        for word, tag in zip(words_of(laid, text), tags, strict=True):
            if word:
                targets[word.start] = number_of[tag]
        owners = laid.windows.owners().tolist()
        for number, (window, (start, end)) in enumerate(
            zip(laid.inputs, laid.windows.ranges, strict=True)
        ):
            part = [
                target if owner == number else IGNORED
                for target, owner in zip(targets[start:end], owners[start:end], strict=True)
            ]
            if any(target != IGNORED for target in part):
                target = [IGNORED, *part, IGNORED]
                examples.append(TokenisedExample(ids=window.ids, types=window.types, target=target))
    tell("entities that fit no words, and get the words that begin in them", unfit)
    return examples
