"""Vocabularies of SentencePiece and BERT, and their tokenizers."""
