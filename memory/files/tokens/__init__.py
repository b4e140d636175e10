"""Tokenizer files of adapters: their added tokens, and the comparison with the base model's tokenizer."""
