"""The error of a vocabulary."""

from training.errors import TrainingError


class VocabError(TrainingError):
    """A vocabulary that cannot be trained or read, or not with the ids of its own library."""


class TooFewPiecesError(VocabError):
    """A vocabulary with fewer pieces than its text has characters.

    Attributes:
        least: the pieces that it needs.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least
