"""Recurrent mixers: Gated DeltaNet, Mamba 2, short convolutions."""
