"""A model's specification: its layers, mixers and parts, and the names of its tensors."""
