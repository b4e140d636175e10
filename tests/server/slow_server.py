"""`chorus serve` over an engine that a test makes hang, be slow, or violate an accounting invariant. Run as a process,
forked from one that has imported all of this.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from transformers import PreTrainedTokenizerFast

from chorus.server.cli.command import main
from chorus.server.engine.worker import EngineWorker
from chorus.server.http import server as http_server
from chorus.server.start import launch
from chorus.server.start.exits import leave
from chorus.server.text.tokenizer import Tokenizer
from tests.server.conftest import BOS, CHAT_TEMPLATE, FakeEngine, byte_level_backend

assert BOS == 256

MODE = ""


def load(settings):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )
    engine = FakeEngine(["alice"], max_model_len=1 << 20)
    engine.step_seconds = 0.01
    if MODE == "invariant":
        add_request = engine.add_request

        def add_and_lose_a_page(request):
            add_request(request)
            engine.accounts_match = False

        engine.add_request = add_and_lose_a_page
    if MODE == "engine":
        engine.step = lambda: threading.Event().wait()
    worker = EngineWorker(lambda: engine)
    worker.start()
    return worker, Tokenizer(tokenizer)


class StuckServer(http_server.HttpServer):
    """Hangs at the place that the mode names, once it is up."""

    async def startup(self, sockets=None):
        await super().startup(sockets)
        if MODE == "pools":
            for pool in (self.executors.text, self.executors.stop):
                for _ in range(16):
                    try:
                        pool.submit(threading.Event().wait)
                    except Exception:  # it is full, as it is meant to be
                        break
            ThreadPoolExecutor(1).submit(threading.Event().wait)  # such a pool is joined at the interpreter's exit
        elif MODE == "loop":
            signal.signal(signal.SIGUSR1, _hang)  # not by the loop, which would take the deadline's wakeup descriptor


def _hang(*_):
    print("the loop hangs", file=sys.stderr, flush=True)
    time.sleep(10**6)


def run(mode: str, flags: list[str], errors: Connection) -> None:
    global MODE
    MODE = mode
    os.dup2(errors.fileno(), 2)
    errors.close()
    for name in [name for name in os.environ if name.startswith("CHORUS_")]:
        del os.environ[name]
    launch.load = load
    launch.HttpServer = StuckServer
    leave(main(["serve", "--port", "0", "--served-model-name", "base", *flags]))
