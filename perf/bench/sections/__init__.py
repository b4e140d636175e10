"""The parts of the GPU benchmark; each gives plain values, and a table of them."""
