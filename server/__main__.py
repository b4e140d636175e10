"""`python -m chorus.server` is the `chorus` command."""

from .cli import run

run()
