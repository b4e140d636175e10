"""The native library of CPUs: its file, the structures that it reads, a model and its ops in them."""
