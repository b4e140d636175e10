"""`python -m chorus.server` is the `chorus` command."""

from .cli.command import run

run()
