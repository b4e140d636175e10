"""A model's layers as a program: a short list of ops over named buffers, that an interpreter runs."""
