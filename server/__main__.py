"""The `chorus` command; `python -m chorus.server` is the same."""

from __future__ import annotations

import signal
from typing import NoReturn


def run() -> NoReturn:
    """Run the command and end the process.

    Its modules take seconds to import. Until then Ctrl-C ends the process as the system does, without a traceback of
    whatever module was being imported.
    """
    handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if a shell has it ignored
    if handles:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli.command import run as run_command

    if handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command()


if __name__ == "__main__":
    run()
