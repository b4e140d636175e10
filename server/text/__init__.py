"""Tokenizer, detokenizer and parser of the output."""
