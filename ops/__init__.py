"""Tensors in, tensors out: every operator behind one signature, with a plain reference."""
