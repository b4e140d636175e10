"""A.X K1 and K2: how configurations are read, and their layers."""
