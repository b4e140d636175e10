"""PEFT's methods other than LoRA: those whose matrices are A and B of LoRA, computed when an adapter is read."""
