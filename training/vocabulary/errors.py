"""The error of a vocabulary."""

from training.errors import TrainingError


class VocabError(TrainingError):
    """A vocabulary that cannot be trained, or cannot be read with the ids of its own library."""


class TooFewPiecesError(VocabError):
    """A vocabulary with fewer pieces than its text has characters.

    Attributes:
        required: the number of pieces that it needs.
    """

    def __init__(self, message: str, required: int) -> None:
        super().__init__(message)
        self.required = required
