"""Flags of other servers, mainly vLLM's: the equivalent here, or the reason why no flag is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

NOTED = {
    "--disable-log-requests": "requests are never logged",
    "--disable-log-stats": "steps are not logged, except for warnings; /metrics has the numbers",
    "--disable-frontend-multiprocessing": "--engine-process off has engine and HTTP share a process, as on a CPU",
    "--enable-auto-tool-choice": "tools may be called in every request that has some",
    "--enable-chunked-prefill": "prompts are split over steps unless --no-chunked-prefill",
    "--enable-lora": "adapters are always served",
    "--enable-prefix-caching": "it is on unless --no-prefix-cache",
    "--enable-log-requests": "requests are never logged; --record writes a trace of their sizes",
    "--enable-server-load-tracking": "GET /load always tells it",
    "--fully-sharded-loras": "each rank of --tensor-parallel-size has one of the two matrices of a projection whole",
    "--lora-dtype": "adapters have the model's dtype",
    "--lora-extra-vocab-size": "tokens that adapters add are served without a flag",
    "--max-cpu-loras": "as many as --host-cache-bytes holds are kept in host memory",
    "--max-loras": "a step may have any number of adapters; --max-adapters-per-step limits it",
    "--no-enable-log-requests": "requests are never logged",
    "--reasoning-parser": "reasoning is read as the model's chat template writes it",
    "--swap-space": "host memory for KV is part of --host-cache-bytes",
    "--tokenizer-mode": "the model's fast tokenizer is used",
    "--tool-call-parser": "calls are read as the model's chat template writes them",
    "--trust-remote-code": "no code of a model is ever run",
    "--uvicorn-log-level": "--log-level is for everything",
    "--guided-decoding-backend": "there is one, llguidance",
    "--disable-custom-all-reduce": "ranks of one machine use shared memory or NCCL",
    "--disable-uvicorn-access-log": "requests are logged only with --access-log",
    "--enable-prompt-tokens-details": "usage always has the cached tokens",
    "--enforce-eager": "graphs change no answer; --graph-capture off turns them off",
}
"""Flags that are accepted and change nothing, each with the reason."""

INSTEAD = {
    "--block-size": "use --block-tokens",
    "--code-revision": "no code of a model is ever run",
    "--compilation-config": "nothing is compiled that can be chosen; use --graph-capture",
    "--cpu-offload-gb": "weights stay on the device that computes with them; use a smaller model, or more memory",
    "--data-parallel-size": "use `chorus cluster up --replicas N`",
    "--default-chat-template-kwargs": "set them in a template of your own, by --chat-template; requests may "
    "send chat_template_kwargs",
    "--distributed-executor-backend": "use --tensor-parallel-size, or `chorus cluster up --ray`",
    "--download-dir": "nothing is downloaded; give the directory as MODEL, or set HF_HOME to the Hub's cache",
    "--enable-expert-parallel": "leave it out: -tp shares every expert among ranks by its columns",
    "--hf-overrides": "change config.json in a copy of the model's directory, and give that as MODEL",
    "--kv-cache-memory-bytes": "use --memory-bytes, which holds KV and adapters",
    "--kv-events-config": "use --kv-events-endpoint",
    "--kv-transfer-config": "requests move between replicas of `chorus cluster up` by themselves",
    "--limit-mm-per-prompt": "language models are served, which read text only",
    "--log-config": "use --log-level",
    "--logits-processors": "no code of others is run; requests have logit_bias, bad_words and grammars",
    "--max-seq-len-to-capture": "use --graph-capture",
    "--middleware": "put a proxy in front; see docs/how-to/deploy.md",
    "--num-gpu-blocks-override": "use --num-pages",
    "--pipeline-parallel-size": "layers are not divided among devices; use --tensor-parallel-size, or `chorus "
    "cluster up --replicas N` for more requests",
    "--response-role": "answers are the assistant's",
    "--revision": "fetch that revision, and give its directory as MODEL",
    "--rope-scaling": "change rope_scaling in the model's config.json; --max-model-len may then be more",
    "--rope-theta": "change rope_theta in the model's config.json",
    "--scheduling-policy": "use --fair-by and --weights",
    "--speculative-config": "use --speculation; draft models are not served",
    **dict.fromkeys(
        ("--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-certfile", "--ssl-keyfile"),
        "let a proxy terminate TLS; see docs/how-to/deploy.md",
    ),
    "--task": "leave it out: every model also embeds, classifies and scores; see docs/how-to/embeddings.md",
    "--tokenizer-revision": "fetch that revision, and give its directory by --tokenizer",
    "--uds": "use --host and --port; a proxy may listen on a socket",
    "--max-num-partial-prefills": "steps are shared among tenants' prompts; use --max-num-batched-tokens",
}
"""Flags that can't be honored, each with advice."""

NEUTRAL = {
    "--data-parallel-size": "1",
    "--pipeline-parallel-size": "1",
    "--response-role": "assistant",
    "--scheduling-policy": "fcfs",
    "--task": "generate",
}
"""Values that make a flag ask for nothing."""

WITH_VALUE = frozenset(
    (
        "--guided-decoding-backend",
        "--lora-dtype",
        "--lora-extra-vocab-size",
        "--max-cpu-loras",
        "--max-loras",
        "--reasoning-parser",
        "--swap-space",
        "--tokenizer-mode",
        "--tool-call-parser",
        "--uvicorn-log-level",
        *NEUTRAL,
    )
)
"""Those of these flags that take a value."""

SHORT = {
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
}
"""vLLM's short flags."""


RENAMED = {"--fronts": "--api-servers"}
"""Old names of our own flags, accepted until the next release."""


class ForeignFlag(ValueError):
    """A flag that can't be honored; the text gives advice."""


def without_foreign_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without other servers' flags that change nothing, and notes about these and about renamed flags.

    Raises ForeignFlag for a flag that would change something.
    """
    left, kept, notes = deque(args), [], []
    while left:
        given = left.popleft()
        flag, equals, value = given.partition("=")
        flag = SHORT.get(flag, flag)
        if flag in RENAMED:
            notes.append(f"{flag} is now {RENAMED[flag]}")
        if flag not in NOTED and flag not in INSTEAD:
            kept.append(flag + equals + value)
            continue
        if flag in WITH_VALUE and not equals and left:
            value = left.popleft()
        if flag in INSTEAD and not (flag in NEUTRAL and value == NEUTRAL[flag]):
            raise ForeignFlag(f"{flag} is no flag of chorus; {INSTEAD[flag]}")
        notes.append(f"{flag} changes nothing here: {NOTED.get(flag, 'that is so in any case')}")
    return kept, notes
