"""LoRA in a step: which rows take which adapter, in what launches."""
