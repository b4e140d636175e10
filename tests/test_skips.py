"""Every reason for which a test is skipped, and the job that runs it all the same: no test is left out everywhere."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Set
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

INSTALLED = "README's second command: `.[test]` installs it"
NATIVE = "README's second command: it builds the native library"
INTEGRATIONS = ".ci/integrations, called by .ci/run"
DEV = "make rest, called by .ci/run: `.[dev]` installs it"
LESSER = "make levels, of make rest, called by .ci/run: it builds the libraries of lesser levels"
LEVELS = "job levels of .github/workflows/ci.yml"
LINUX = "job ci of .github/workflows/ci.yml, which runs on Linux"
SHARED = "where CHORUS_SHARED names a folder of real models, configurations and papers: too large for the repository"
GPU = "job gpu of .github/workflows/perf.yml, on a machine with GPUs"
OTHER_CASE = "another case of the same test, or another file of the same run"

JOBS = {
    "import bitsandbytes.functional": INSTALLED,
    "import compressed_tensors.quantization": INSTALLED,
    "compressed-tensors is not installed": INSTALLED,
    "import gguf": INSTALLED,
    "import highspy": INSTALLED,
    "import jsonschema": INSTALLED,
    "import kubernetes_validate": INSTALLED,
    "import peft": INSTALLED,
    "import peft.tuners.tuners_utils": INSTALLED,
    "import peft.utils.other": INSTALLED,
    "import shtab": INSTALLED,
    "import transformers": INSTALLED,
    "import transformers.integrations.gguf.dequant": INSTALLED,
    "import zmq": INSTALLED,
    "the built-in model is not there": INSTALLED,
    "import cupy": INTEGRATIONS,
    "import flashinfer": INTEGRATIONS,
    "flashinfer is not installed": INTEGRATIONS,
    "import moto.server": INTEGRATIONS,
    "import s3fs": INTEGRATIONS,
    "import opentelemetry.exporter.otlp.proto.http": INTEGRATIONS,
    "import opentelemetry.sdk": INTEGRATIONS,
    "needs the extra vision": INTEGRATIONS,
    "import anthropic": INTEGRATIONS,
    "import inspect_ai": INTEGRATIONS,
    "import instructor": INTEGRATIONS,
    "import langchain_anthropic": INTEGRATIONS,
    "import langchain_openai": INTEGRATIONS,
    "import litellm": INTEGRATIONS,
    "import lm_eval": INTEGRATIONS,
    "import pydantic_ai": INTEGRATIONS,
    "import aiohttp": INTEGRATIONS,
    "import skyrl": INTEGRATIONS,
    "import trl": INTEGRATIONS,
    "verl is not installed": INTEGRATIONS,
    "import openai": INTEGRATIONS,
    "import requests": INTEGRATIONS,
    "import matplotlib": INSTALLED,
    "import ray": INTEGRATIONS,
    "needs ray": INTEGRATIONS,
    "needs aiperf: uv tool install aiperf": INTEGRATIONS,
    "needs chromium and chromedriver": INTEGRATIONS,
    "needs helm": INTEGRATIONS,
    "needs a compiler for aarch64 (g++-aarch64-linux-gnu) and its emulator (qemu-user)": INTEGRATIONS,
    "… is not installed; pip install …, best into an environment of its own": INTEGRATIONS,
    "import triton": DEV,
    "needs towncrier": DEV,
    "triton is not installed; pip install chorus-lora[kernels]": DEV,
    "interpreted kernels are launched by Triton": OTHER_CASE,
    "its head and embeddings are never one": OTHER_CASE,
    "has nothing to compare with: needs AVX2": INTEGRATIONS,
    "needs g++": NATIVE,
    "needs g++ on a system that the native library is for": NATIVE,
    "needs the native library": NATIVE,
    "no native library": NATIVE,
    "no native library: …": NATIVE,
    "the native library is not built": NATIVE,
    "assistants run the native library": NATIVE,
    "offload workers run the native library": NATIVE,
    "ranks add up by the native library": NATIVE,
    "ranks meet by the native library": NATIVE,
    "words are the native library's": NATIVE,
    "one level at most is built": LESSER,
    "this machine or build has no …": LEVELS,
    "the package was built without a compiler": OTHER_CASE,
    "Linux": LINUX,
    "needs Linux": LINUX,
    "needs the openssl command": LINUX,
    "needs the sqlite3 command": LINUX,
    "no test's time is limited by a signal": LINUX,
    "no configurations in …; set CHORUS_SHARED": SHARED,
    "no shared data in …; set CHORUS_SHARED": SHARED,
    "there are no tokenizers of real models": SHARED,
    "the papers' texts are not at hand": SHARED,
    "launches begin early on compute capability 9 and later": GPU,
    "needs an NVIDIA GPU": GPU,
    "needs an NVIDIA GPU of compute capability 8.9 or later": GPU,
    "needs two NVIDIA GPUs": GPU,
    "no test of the file matches …": OTHER_CASE,
    "str(error)": OTHER_CASE,
}
"""Reasons, with `…` for what differs, and the job in which such a test runs."""


def skips(tree: ast.Module) -> Iterator[str]:
    """Yield the reasons for skipping that a file of tests has."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or "skip" not in getattr(node.func, "attr", getattr(node.func, "id", "")):
            continue
        name = ast.unparse(node.func)
        if name.endswith("importorskip"):
            yield f"import {_text(node.args[0])}"
        elif name == "pytest.skip" or name.endswith("mark.skip"):
            yield _text(node.args[0])
        elif name.endswith("mark.skipif"):
            yield next(_text(each.value) for each in node.keywords if each.arg == "reason")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


@functools.cache
def found() -> Set[tuple[str, str]]:
    """Files with the reasons that they have: not a constant, which each process that collects tests would compute."""
    return {
        (str(path.relative_to(HERE)), reason)
        for path in sorted(HERE.rglob("*.py"))
        if "skip" in (text := path.read_text(encoding="utf-8"))
        for reason in skips(ast.parse(text))
    }


def test_each_reason_has_a_job():
    unknown = sorted((reason, path) for path, reason in found() if reason not in JOBS)
    assert not unknown, "name the job that runs such a test"
    assert not JOBS.keys() - {reason for _, reason in found()}, "no test has these reasons any more"


def test_the_jobs_are_there():
    run, integrations = ((ROOT / ".ci" / name).read_text() for name in ("run", "integrations"))
    assert all(f'bash .ci/integrations "$venvs" {step}' in run for step in ("install", "test"))
    assert '"$bin/pytest" -q -m integration ' in integrations
    assert '-m "vision and not slow"' in integrations
    assert "as_readme_says 2" in run
    assert "make" in run
    assert " rest" in run
    jobs = (ROOT / ".github/workflows/ci.yml").read_text(), (ROOT / ".github/workflows/perf.yml").read_text()
    assert "\n  ci:\n" in jobs[0]
    assert "\n  levels:\n" in jobs[0]
    assert "\n  gpu:\n" in jobs[1]


def test_what_integrations_run_has_the_mark():
    """So that its job selects it."""
    for path in sorted({path for path, reason in found() if JOBS.get(reason) == INTEGRATIONS}):
        text = (HERE / path).read_text(encoding="utf-8")
        assert "pytest.mark.integration" in text or "pytest.mark.vision" in text, path


def test_what_needs_the_extra_vision_has_its_mark():
    for path in sorted(HERE.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"\bneeds_vision\b(?!\.)", text) and path.name != "test_skips.py":
            assert "pytest.mark.vision" in text, path


def test_what_needs_a_gpu_is_in_files_of_their_own():
    """So that their job selects them by their names."""
    files = {path for path, reason in found() if JOBS.get(reason) == GPU}
    assert files
    assert all(path.endswith("_gpu.py") for path in files), files
    assert 'find tests -name "test_*_gpu.py"' in (ROOT / ".github/workflows/perf.yml").read_text()
