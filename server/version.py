"""Version of the package, below all that says it; `chorus.__version__` reads it from here."""

VERSION = "0.5.0"
