"""Flags of vLLM, SGLang, LoRAX and llama.cpp: the equivalent here, or the reason why no flag is needed."""

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
    "--max-log-len": "requests are never logged",
    "--num-scheduler-steps": "a step is scheduled while the one before it runs; see --async-scheduling",
    **dict.fromkeys(("--disable-cuda-graph", "--cuda-graph-max-bs"), "graphs change no answer; see --graph-capture"),
    "--enable-metrics": "GET /metrics always tells them",
    "--enable-cache-report": "usage always has the cached tokens",
    "--grammar-backend": "there is one, llguidance",
    "--lora-backend": "there is one for each device",
    "--lora-eviction-policy": "pages of adapters and KV are evicted by one policy; see --eviction",
    "--max-loaded-loras": "as many as --host-cache-bytes holds are kept in host memory",
    "--max-loras-per-batch": "a step may have any number of adapters; --max-adapters-per-step limits it",
    # LoRAX's and TGI's
    "--adapter-cycle-time-s": "adapters take no turns: a step may have any number of them",
    "--adapter-memory-fraction": "adapters and KV share --memory-bytes",
    "--disable-custom-kernels": "kernels change no answer; see --attention",
    "--max-active-adapters": "a step may have any number of adapters; --max-adapters-per-step limits it",
    "--max-waiting-tokens": "prompts and answers share each step; see --target-step-ms",
    "--waiting-served-ratio": "prompts and answers share each step; see --target-step-ms",
    # llama.cpp's
    "--cont-batching": "requests are always computed together",
    "--embedding": "every model also embeds",
    "--embeddings": "every model also embeds",
    "--flash-attn": "see --attention",
    "--jinja": "chat templates are always rendered as they are written",
    "--metrics": "GET /metrics always tells them",
    "--reasoning-format": "reasoning is read as the model's chat template writes it",
    "--rerank": "every model also scores",
    "--reranking": "every model also scores",
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
    "--uds": "use --unix-socket, which is a socket beside --host and --port",
    "--attention-backend": "use --attention",
    "--chat-template-content-format": "chat templates are given contents as text; use a template that reads text, by "
    "--chat-template",
    "--enable-sleep-mode": "leave it out: POST /sleep needs no flag; it frees KV and the pages of adapters",
    "--long-lora-scaling-factors": "adapters have the model's context; change rope_scaling in its config.json",
    "--disable-radix-cache": "use --no-prefix-cache",
    "--dist-init-addr": "a model lies on one machine; use `chorus cluster up --ray` for replicas on several",
    "--json-model-override-args": "change config.json in a copy of the model's directory, and give that as MODEL",
    "--lora-target-modules": "leave it out: adapters may change every module, and their adapter_config.json says which",
    "--max-total-tokens": "use --max-model-len for what one request may have, --memory-bytes for what all have",
    "--mem-fraction-static": "use --gpu-memory-utilization, or --memory-bytes on a CPU",
    "--nnodes": "a model lies on one machine; use `chorus cluster up --ray` for replicas on several",
    "--page-size": "use --block-tokens",
    "--schedule-conservativeness": "use --max-num-seqs",
    "--schedule-policy": "use --fair-by and --weights",
    "--skip-tokenizer-init": "prompts may be token ids; the tokenizer is loaded in any case: leave it out",
    "--speculative-algorithm": "use --speculation; draft models are not served",
    "--watchdog-timeout": "use --stall-seconds and --give-up-seconds",
    # LoRAX's and TGI's
    "--adapter-id": "adapters are named by each request; use --lora-modules NAME=DIR or --adapters DIR",
    "--huggingface-hub-cache": "set HF_HOME to the Hub's cache",
    "--max-batch-total-tokens": "use --num-pages or --memory-bytes",
    "--json-output": "use --log-format json",
    "--max-concurrent-requests": "use --max-waiting and --max-num-seqs",
    "--max-input-length": "use --max-model-len, which is of prompt and answer together",
    "--ngrok": "put a proxy in front; see docs/how-to/deploy.md",
    "--predibase-api-token": "use --adapter-source for where adapters come from",
    "--preloaded-adapter-ids": "use --lora-modules NAME=DIR, and PATCH /v1/adapters/NAME to pin one",
    "--shard-uds-path": "leave it out: -tp starts the ranks",
    "--source": "give the model's directory as MODEL",
    "--speculative-tokens": "use --speculation",
    "--weights-cache-override": "set HF_HOME to the Hub's cache",
    # llama.cpp's
    "--cache-type-k": "use --kv-cache-dtype, which is of keys and values",
    "--cache-type-v": "use --kv-cache-dtype, which is of keys and values",
    "--hf-file": "download it, and give the file as MODEL",
    "--lora": "use --lora-modules NAME=DIR; GGUF adapters are read, too",
    "--lora-init-without-apply": "leave it out: an adapter is applied to the requests that name it",
    "--lora-scaled": "use --lora-modules NAME=DIR; a request scales its adapters by model: NAME*SCALE",
    "--mmproj": "give the model's directory, with its vision tower, as MODEL; see docs/how-to/images.md",
    "--mlock": "memory is not locked; turn swap off on the machine",
    "--model-draft": "use --speculation; draft models are not served",
    "--model-url": "download it, and give the file or directory as MODEL",
    "--n-gpu-layers": "leave it out: all layers are on --device",
    "--n-predict": "requests say max_tokens",
    "--no-webui": "use --no-ui",
    "--rope-freq-base": "change rope_theta in the model's config.json",
    "--slot-save-path": "use --kv-cache-dir, where prefixes are found again after a restart",
    "--temp": "requests say temperature; --override-generation-config sets what is usual",
    "--tensor-split": "use --tensor-parallel-size; ranks have equal parts",
    "--max-num-partial-prefills": "steps are shared among tenants' prompts; use --max-num-batched-tokens",
}
"""Flags that can't be honored, each with advice."""

NEUTRAL = {
    "--chat-template-content-format": ("auto", "string"),
    "--data-parallel-size": ("1",),
    "--nnodes": ("1",),
    "--pipeline-parallel-size": ("1",),
    "--response-role": ("assistant",),
    "--scheduling-policy": ("fcfs",),
    "--schedule-policy": ("fcfs", "lpm"),
    "--task": ("generate",),
}
"""Values that make a flag ask for nothing."""

WITH_VALUE = frozenset(
    (
        "--cuda-graph-max-bs",
        "--grammar-backend",
        "--guided-decoding-backend",
        "--lora-backend",
        "--lora-dtype",
        "--lora-eviction-policy",
        "--lora-extra-vocab-size",
        "--max-cpu-loras",
        "--max-loaded-loras",
        "--max-log-len",
        "--max-loras",
        "--max-loras-per-batch",
        "--adapter-cycle-time-s",
        "--adapter-memory-fraction",
        "--max-active-adapters",
        "--max-waiting-tokens",
        "--reasoning-format",
        "--waiting-served-ratio",
        "--num-scheduler-steps",
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
    "--no-enable-chunked-prefill": "--no-chunked-prefill",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--lora-paths": "--lora-modules",
    "--max-running-requests": "--max-num-seqs",
    "--model-path": "--model",
    "--pp-size": "--pipeline-parallel-size",
    "--random-seed": "--seed",
    "--tokenizer-path": "--tokenizer",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    # LoRAX's and TGI's
    "--cors-allow-origin": "--cors-origins",
    "--cuda-memory-fraction": "--gpu-memory-utilization",
    "--hostname": "--host",
    "--max-batch-prefill-tokens": "--max-num-batched-tokens",
    "--max-stop-sequences": "--max-stop-strings",
    "--model-id": "--model",
    "--num-shard": "--tensor-parallel-size",
    "--otlp-endpoint": "--otlp-traces-endpoint",
    "--prefix-caching": "--prefix-cache",
    "--quantize": "--quantization",
    # llama.cpp's
    "-a": "--served-model-name",
    "-c": "--max-model-len",
    "-m": "--model",
    "-md": "--model-draft",
    "-ngl": "--n-gpu-layers",
    "-np": "--max-num-seqs",
    "-t": "--threads",
    "--alias": "--served-model-name",
    "--batch-size": "--max-num-batched-tokens",
    "--chat-template-file": "--chat-template",
    "--ctx-size": "--max-model-len",
    "--gpu-layers": "--n-gpu-layers",
    "--parallel": "--max-num-seqs",
}
"""Other names of flags: vLLM's short ones, and those of SGLang, LoRAX and llama.cpp."""

SAME = {("--load-format", "safetensors"): "a checkpoint's safetensors, or its GGUF file, are read in any case"}
"""Values of our own flags that ask for what is done in any case."""


RENAMED = {"--fronts": "--api-servers"}
"""Old names of our own flags, accepted until the next release."""


class ForeignFlag(ValueError):
    """Flags that can't be honored; the text gives advice."""

    def __init__(self, faults: Sequence[str], kept: Sequence[str]) -> None:
        """faults: one for each flag. kept: the other arguments."""
        super().__init__("\n".join(faults))
        self.faults, self.kept = list(faults), list(kept)


def without_foreign_flags(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without other servers' flags that change nothing, and notes about these and about renamed flags.

    Raises ForeignFlag for all flags that would change something.
    """
    left, kept, notes, faults = deque(args), [], [], []
    while left:
        given = left.popleft()
        flag, equals, value = given.partition("=")
        flag = SHORT.get(flag, flag)
        if flag in RENAMED:
            notes.append(f"{flag} is now {RENAMED[flag]}")
        if not _is_foreign(flag, value if equals else left[0] if left else ""):
            kept.append(flag + equals + value)
            continue
        if not equals:
            value = _value_of(flag, left)
        if flag in INSTEAD and value not in NEUTRAL.get(flag, ()):
            faults.append(f"{flag} is no flag of chorus; {INSTEAD[flag]}")
        else:
            reason = SAME.get((flag, value)) or NOTED.get(flag, "that is so in any case")
            notes.append(f"{flag} changes nothing here: {reason}")
    if faults:
        raise ForeignFlag(faults, kept)
    return kept, notes


def _is_foreign(flag: str, value: str) -> bool:
    return flag in NOTED or flag in INSTEAD or (flag, value) in SAME


def _value_of(flag: str, left: deque[str]) -> str:
    """Take a foreign flag's value from the arguments after it, and all values of one that can't be honored."""
    takes = flag in WITH_VALUE or any(flag == same for same, _ in SAME)
    value = left.popleft() if takes and left else ""
    while flag in INSTEAD and flag not in NEUTRAL and left and not left[0].startswith("-"):
        value = left.popleft()
    return value
