"""Flags of other servers, vLLM's above all: what is there instead, or why one needs no flag here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

NOTED = {
    "--disable-log-requests": "requests are never logged",
    "--disable-log-stats": "nothing but warnings is logged of steps; /metrics has the numbers",
    "--disable-frontend-multiprocessing": "engine and HTTP share a process unless --engine-process on",
    "--enable-auto-tool-choice": "tools may be called wherever a request brings some",
    "--enable-chunked-prefill": "prompts are split over steps unless --no-chunked-prefill",
    "--enable-lora": "adapters are always served",
    "--enable-prefix-caching": "it is on unless --no-prefix-cache",
    "--enable-log-requests": "requests are never logged; --record writes a trace of their sizes",
    "--enable-server-load-tracking": "GET /load tells it always",
    "--fully-sharded-loras": "each rank of --tensor-parallel-size has one of the two matrices of a projection whole",
    "--lora-dtype": "adapters have the model's dtype",
    "--lora-extra-vocab-size": "adapters may not add tokens",
    "--max-cpu-loras": "as many as --host-cache-bytes holds are kept in host memory",
    "--max-loras": "a step takes adapters without number; --max-adapters-per-step bounds it",
    "--no-enable-log-requests": "requests are never logged",
    "--reasoning-parser": "what is reasoning is read as the model's chat template has it",
    "--swap-space": "host memory for KV is part of --host-cache-bytes",
    "--tokenizer-mode": "the model's fast tokenizer is used",
    "--tool-call-parser": "calls are read as the model's chat template writes them",
    "--trust-remote-code": "no code of a model is ever run",
    "--uvicorn-log-level": "--log-level is the one of everything",
    "--guided-decoding-backend": "there is one, llguidance",
    "--enforce-eager": "graphs change no answer; --graph-capture off leaves them out",
}
"""Flags that are taken and change nothing, each with the reason."""

INSTEAD = {
    "--block-size": "use --block-tokens",
    "--chat-template": "put it into the model's directory as chat_template.jinja",
    "--cpu-offload-gb": "weights stay where they are computed with; use a smaller model, or more memory",
    "--data-parallel-size": "use `chorus cluster up --replicas N`",
    "--enable-expert-parallel": "models with experts are not served",
    "--kv-cache-dtype": "KV has the model's dtype; use --memory-bytes for more pages",
    "--kv-cache-memory-bytes": "use --memory-bytes, which holds KV and adapters",
    "--kv-events-config": "use --kv-events-endpoint",
    "--kv-transfer-config": "requests move between replicas of `chorus cluster up` by themselves",
    "--limit-mm-per-prompt": "language models are served, which read text only",
    "--max-seq-len-to-capture": "use --graph-capture",
    "--num-gpu-blocks-override": "use --num-pages",
    "--pipeline-parallel-size": "a model lies on one device; use `chorus cluster up --replicas N` for more requests",
    "--quantization": "use a checkpoint in bfloat16 or float16",
    "--revision": "fetch that revision, and give its directory as MODEL",
    "--scheduling-policy": "use --fair-by and --weights",
    "--speculative-config": "drafts are not served",
    "--ssl-certfile": "let a proxy in front end TLS; see docs/deploy.md",
    "--ssl-keyfile": "let a proxy in front end TLS; see docs/deploy.md",
    "--tokenizer": "put tokenizer.json into the model's directory",
    "--max-num-partial-prefills": "steps are shared among tenants' prompts; use --max-num-batched-tokens",
}
"""Flags that can't be obeyed, each with what to do."""

NEUTRAL = {
    "--data-parallel-size": "1", "--kv-cache-dtype": "auto", "--pipeline-parallel-size": "1",
    "--scheduling-policy": "fcfs",
}  # fmt: skip
"""Values with which a flag asks for nothing."""

WITH_VALUE = frozenset(
    (
        "--guided-decoding-backend", "--lora-dtype", "--lora-extra-vocab-size", "--max-cpu-loras", "--max-loras",
        "--reasoning-parser", "--swap-space", "--tokenizer-mode", "--tool-call-parser", "--uvicorn-log-level",
        *NEUTRAL,
    )
)  # fmt: skip
"""Flags among these that are followed by a value."""

SHORT = {"-dp": "--data-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization",
         "-tp": "--tensor-parallel-size"}  # fmt: skip
"""vLLM's short flags."""


class ForeignFlag(ValueError):
    """A flag that can't be obeyed; the text says what to do instead."""


def without_foreign_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without other servers' flags that change nothing, and a note on each. ForeignFlag for another."""
    left, kept, notes = deque(args), [], []
    while left:
        given = left.popleft()
        flag, equals, value = given.partition("=")
        flag = SHORT.get(flag, flag)
        if flag not in NOTED and flag not in INSTEAD:
            kept.append(flag + equals + value)
            continue
        if flag in WITH_VALUE and not equals and left:
            value = left.popleft()
        if flag in INSTEAD and not (flag in NEUTRAL and value == NEUTRAL[flag]):
            raise ForeignFlag(f"{flag} is no flag of chorus; {INSTEAD[flag]}")
        notes.append(f"{flag} changes nothing here: {NOTED.get(flag, 'that is so in any case')}")
    return kept, notes
