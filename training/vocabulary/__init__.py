"""Vocabularies of checkpoints, as `tokenizers` reads them: SentencePiece's and BERT's."""
