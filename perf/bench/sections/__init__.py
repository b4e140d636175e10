"""The sections of the GPU benchmark; each returns plain values and tables of them."""
