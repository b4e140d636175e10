"""Version of the package, defined once; `chorus.__version__` reads it from here."""

VERSION = "0.6.0"
