"""The end of a process whose engine is at work."""

import subprocess
import sys

import pytest

GENERATING = """
import sys, threading, time
from chorus import LLM, SamplingParams
llm = LLM(threads=1)
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

def generate():
    try:
        llm.generate(["hello world\\n"] * 64, params)
    except Exception:
        pass  # the engine ends before the interpreter does

threading.Thread(target=generate, daemon=True).start()
while not llm._worker.stats.num_running:
    time.sleep(0.01)
sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_that_ends_during_a_step_ends_as_it_was_told():
    """The interpreter was torn down below the engine's thread, and C++ called abort()."""
    done = subprocess.run([sys.executable, "-c", GENERATING], capture_output=True, text=True, timeout=240)
    assert done.returncode == 3, done.stderr
    assert "nanobind" not in done.stderr and "terminate" not in done.stderr
