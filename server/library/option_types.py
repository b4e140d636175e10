"""Types of `LLM`'s options. Written by docs/generate.py: change the settings, and run `make docs`.

Tests: tests/server/library/test_options.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class Options(TypedDict, total=False):
    """Keyword arguments of `LLM`: the settings of `chorus serve` that make sense without HTTP."""

    max_logprobs: int
    """Maximum log-probabilities per token in a request. Default: 20."""
    max_scores: int
    """Maximum log-probabilities in one response: tokens times one more than their alternatives. Default: 100000."""
    max_prompts: int
    """Maximum choices in one request: prompts times n. Default: 128."""
    max_inputs: int
    """Maximum texts in one request for embeddings, classes, scores or a ranking. Default: 2048."""
    max_call_tokens: int
    """Maximum prompt tokens in one request, each prompt counted n times. Default: 262144."""
    max_messages: int
    """Maximum messages in a conversation. Default: 1024."""
    max_tools: int
    """Maximum tools in a request. Default: 128."""
    max_tool_bytes: int | str
    """Maximum bytes of a request's tools. Default: 262144."""
    max_stop_strings: int
    """Maximum stop strings. Default: 16."""
    max_bad_words: int
    """Maximum bad words. Default: 256."""
    max_logit_bias: int
    """Maximum entries of logit_bias, or of stop_token_ids. Default: 1024."""
    max_allowed_tokens: int
    """Maximum entries of allowed_token_ids. Default: 16384."""
    max_grammar_bytes: int | str
    """Maximum bytes of a JSON schema, of choices or of another grammar. Default: 32768."""
    max_pattern_bytes: int | str
    """Maximum bytes of regular expressions, or of rules, in a grammar; compile time grows with their square, to
    half a second. Default: 8192.
    """
    max_steering: int
    """Maximum bad words, logit_bias entries, allowed token ids and stop string characters together, each times the
    choices of the request. Default: 8192.
    """
    max_json_values: int
    """Maximum values in a request's JSON. Default: 131072."""
    tokenizer: str | Path | None
    """Directory of the tokenizer (tokenizer.json and its configuration); default: the model's."""
    strict_adapters: bool
    """Refuse to start if an adapter of adapters or lora_modules can't be served; by default it is listed with the
    reason and the others are served. Default: False.
    """
    adapter_load_seconds: float
    """Time limit for reading and checking an adapter. Default: 30.0."""
    served_model_name: str | None
    """The base model's name in the API; default: its directory's name."""
    strict_base: bool
    """Refuse an adapter whose base_model_name_or_path names another base model; by default the difference is logged
    and listed. Default: False.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """Dtype of weights, adapters and, unless kv_cache_dtype says otherwise, KV cache; auto: the checkpoint's own.
    Default: auto.
    """
    load_format: Literal["auto", "dummy"]
    """auto: the checkpoint's weights; dummy: random weights, to measure a model from its config.json alone.
    Default: auto.
    """
    quantization: Literal["int8", "int4", "w8a8", "w4a8", "fp8"] | None
    """Quantise the projections of layers while the checkpoint is read, each weight to the nearest of 256 or 16
    values. int8: one scale per row; int4: one per row and group of 128 inputs (64 or 32 where 128 does not divide
    the row). w8a8 and w4a8: the same weights, and on a CPU activations are rounded to 8 bits where they are
    multiplied with them, but not for experts. fp8: E4M3, one scale per row; kept so by GPUs, and dequantised on a
    CPU. Adapters and KV cache keep dtype. Default: weights stay as they are.
    """
    quantize_lm_head: bool
    """Quantise the output projection, too; the embeddings stay. Needs quantization. Default: False."""
    fp8_activations: bool
    """On a GPU of compute capability 8.9 or later, in bfloat16: round activations to FP8 (E4M3), each row by
    itself, for FP8 weights with one scale per row or tensor whose checkpoint asks for it, or that quantization fp8
    makes. It costs quality, in steps of any size. Products are then of FP8 with FP8 where that is measured to be
    faster at the start. Adapters get activations as they are. Default: False.
    """
    kv_cache_dtype: Literal["auto", "fp8"]
    """Dtype of keys and values in the page pool. auto: that of dtype; fp8: E4M3, one byte each, with the
    checkpoint's k_scale and v_scale of each layer where it has them, else 1; values beyond 448 times the scale
    become that. Default: auto.
    """
    device: str
    """Where the model runs: cpu, cuda, or one of several GPUs such as cuda:1; auto: a GPU if PyTorch finds one and
    Triton is installed. Default: auto.
    """
    tensor_parallel_size: int
    """TP ranks: processes that each compute a share of every layer; on GPUs each uses one, starting with the first.
    Default: 1.
    """
    max_model_len: int | None
    """Maximum tokens of a request, prompt and output together; default: the model's limit."""
    max_num_seqs: int
    """Maximum sequences in one step; default: 32, on a GPU with 14 GiB 128, with 40 GiB or more 256, for quantised
    models 64.
    """
    max_waiting: int | None
    """Maximum queued sequences; beyond it requests get 429. A tenant may hold at most as many queue entries as are
    free for others. None: no limit. Default: 4096.
    """
    max_num_batched_tokens: int
    """Maximum tokens in one step; default: 1024, on a GPU with 14 GiB 4096, with 40 GiB or more 8192."""
    chunked_prefill: bool
    """Split long prompts over several steps. Default: True."""
    block_tokens: int
    """Tokens per KV page; raised if a slab of an adapter needs a larger page. A page must have room for a part of a
    recurrent layer's state, and must divide the chunks of Llama 4's attention; the start is refused otherwise.
    Default: 16.
    """
    memory_bytes: int | str | None
    """Size of the page pool that KV cache and adapters share; default on a CPU: room for a few requests of maximum
    length, at most a quarter of the memory that the weights leave; on a GPU: the rest of gpu_memory_utilization.
    """
    num_pages: int | None
    """Size of the page pool in pages, instead of memory_bytes."""
    gpu_memory_utilization: float
    """Share of a GPU's memory that weights, page pool and everything else may use. Default: 0.9."""
    graph_capture: Literal["ahead", "lazy", "off"]
    """When decode steps are captured as CUDA graphs: ahead: before the first request; lazy: at the first use of a
    batch size; off: never. Default: ahead.
    """
    mixed_graph_tokens: int
    """On a GPU: maximum tokens of a step with prefill that uses piecewise CUDA graphs; such steps are padded to one
    of a few sizes. 0: none. Default: 512.
    """
    dependent_launch: Literal["auto", "off"]
    """On a GPU of compute capability 9 or later: start small kernels while the previous kernel ends (programmatic
    dependent launch), if Triton compiles it; or never. Default: auto.
    """
    attention: Literal["auto", "flashinfer", "xqa", "triton", "torch"]
    """Attention backend on a GPU. auto: the first available of FlashInfer, our Triton decode kernel, and PyTorch,
    which captures no graphs; beside FlashInfer, decode steps use its XQA kernel where that is built ahead and
    measured to be faster at the start. xqa: FlashInfer, with XQA for all decode steps. A named backend that is not
    available stops the start. triton's decode attention is batch-invariant. Default: auto.
    """
    small_gemm: Literal["auto", "on", "fused", "swapped", "off"]
    """On a GPU: GEMM backend of the base weights in decode steps of up to 64 sequences, and of quantised ones in
    all steps. auto: measured at the start for each shape; on: our kernel; fused: our kernel with LoRA expand fused
    in, up to 32 sequences; swapped: on, but quantised weights by our kernel for steps of any size, which widens
    them in registers; off: cuBLAS, with quantised weights kept dequantised. With on or fused, results are the same
    for all batch sizes up to 16, and for all from 17 to 64, at every start; beyond 64 sequences and in prompts they
    widen quantised weights in memory for cuBLAS. Default: auto.
    """
    max_lora_rank: int
    """Largest rank of an adapter on a GPU, at most 256; adapter tables are sized for it at the start. A CPU has no
    such limit. Default: 256.
    """
    cpu_kernels: Literal["auto", "native", "torch"]
    """CPU kernels: auto: the native decoder if it was built and can run, else PyTorch. Default: auto."""
    host_cache_bytes: int | str | None
    """Host memory for adapters, for the KV cache of preempted requests, for cached prefixes that leave the page
    pool, and for rows of images; what costs least to bring back for how often it is used leaves first; default: an
    eighth of the free memory at the start, at least 1 GiB.
    """
    host_prefix_cache: Literal["auto", "on", "off"]
    """Keep cached prefixes that leave the page pool in host memory: auto: on a CPU; on: on a GPU, too, where they
    are copied before they leave, which is experimental; off: nowhere. Default: auto.
    """
    kv_cache_dir: str | Path | None
    """Directory for cached prefixes that leave host memory, and of earlier runs; several servers of one user may
    share it. It must be that user's alone (mode 700). Default: prefixes are not kept in files.
    """
    kv_cache_disk_bytes: int | str | None
    """Size limit of kv_cache_dir, for all servers that use it; what was used longest ago is removed."""
    async_scheduling: bool
    """On a GPU: launch the next step before the tokens of the current one are read; off while speculation is on,
    which needs these tokens. Default: True.
    """
    speculation: Literal["auto", "ngram", "off"]
    """Propose tokens and verify several per step; the output stays the same. ngram: what followed the last tokens
    earlier in the prompt or the answer; on a GPU it switches async_scheduling off. auto: ngram on a CPU with the
    native decoder, or with speculation_cache_tokens; else off. Default: auto.
    """
    speculation_cache_tokens: int
    """Tokens of recent answers, of all adapters together, in which speculation looks for proposals, too. A
    request's come from answers of its own adapter's version, tenant and cache_salt only. Default: 0.
    """
    preemption: Literal["auto", "swap", "recompute"]
    """What happens to the KV cache of a preempted request: swap: it moves to host memory and back; recompute: it is
    computed again; auto: whichever was measured to take less time. It is always recomputed if host memory is full.
    Default: auto.
    """
    eviction: Literal["cost", "lru"]
    """Which pages are evicted first: cost: those that cost least to restore for how often they are used; lru: the
    least recently used, a baseline. Default: cost.
    """
    prefix_cache: bool
    """Reuse the KV cache of equal prompt prefixes. Default: True."""
    state_checkpoint_tokens: int
    """Models with recurrent layers: keep the recurrent state in the prefix cache at the end of a prompt, and after
    every so many tokens; 0: never, so that no prefix is reused. Default: 1024.
    """
    share_prefix_cache: bool
    """Share the prefix cache between tenants; a tenant can then find out what another has asked. A request's
    cache_salt applies either way. Default: False.
    """
    limit_mm_per_prompt: Mapping[str, int]
    """The most images of a request, as JSON: {"image": 4}; 0: images are refused, and the vision tower is not read.
    Default: {'image': 16}.
    """
    max_image_tokens: int
    """The most tokens of an image: a larger one is made smaller if the model's image processor has a setting for
    that, else it is refused. Default: 4096.
    """
    encoder_threads: int
    """Threads that encode images, beside those of steps and at a lower priority. Default: 1."""
    encoder_cache_bytes: int | str
    """Host memory for rows of encoded images that requests hold and for the pixels of the one that is being
    encoded: requests that hold more keep others' images waiting. As many bytes of host_cache_bytes may hold rows
    for the next use of an image. Default: 256MiB.
    """
    lookahead: int
    """Number of waiting requests whose adapters are read into host memory ahead. Default: 8."""
    prefetch: int
    """Number of waiting requests whose adapters are loaded into the page pool ahead, if no other request waits for
    the room. Default: 0.
    """
    max_adapters_per_step: int | None
    """Maximum distinct adapters in a step; default: no limit."""
    max_overtake_seconds: float
    """How long requests with resident adapters may overtake a waiting request. Default: 1.0."""
    fair_by: Literal["tenant", "adapter"]
    """Fairness key: tenant or adapter; the base model counts as an adapter. Default: tenant."""
    weights: Mapping[str, float] | str
    """Shares of tenants or adapters, as comma-separated NAME=WEIGHT: weight 2 gets twice as much of a busy engine
    as weight 1, the default. A tenant's name is the one in the tenant header or the key file, or else the one that
    /metrics shows.
    """
    max_turn_seconds: float
    """Longest time that a tenant or adapter waits for its turn, whatever the weights. Default: 10.0."""
    max_turn_steps: int
    """Longest wait for a turn, in steps. Default: 1000."""
    mode_policy: Literal["manual", "fastest", "dlora-1", "dlora-2", "dlora-3", "dlora-artifact"]
    """Which adapter is merged into the weights, and which requests a step runs. manual: none, unless a program
    calls `Engine.merge`; fastest: the mode with the most predicted tokens per second; dlora-1, dlora-2, dlora-3:
    dLoRA's dynamic batching, from 2 with adaptive thresholds, at 3 with credits; dlora-artifact: as the authors'
    code does it. The dlora policies are baselines. Default: manual.
    """
    max_load_stall_seconds: float
    """How long a step may wait for adapters that are still being read; 0: a request starts only once its adapter
    has been read. Default: 0.02.
    """
    target_step_ms: Literal["auto"] | float
    """How long steps should take, on average, while prompts of one tenant are computed beside answers of another:
    it bounds the prompts' tokens in a step, and leaves them out of others; auto: 5 decode steps, as measured; a
    number: at least 2 decode steps; 0: no bound. Default: auto.
    """
    adapter_read_seconds: float
    """How long an adapter read may make no progress before its requests fail; up to 32 s longer for large layers.
    Default: 30.0.
    """
    threads: int | None
    """CPU threads of all TP ranks together; default: the number of processors."""
    offload_workers: int
    """CPU LoRA offload workers, each on its own processor: they compute LoRA terms of prompts while the adapter is
    being copied, if that is predicted to be faster. Needs the native decoder on a CPU, or a GPU with CuPy
    (experimental). Default: 0.
    """
    seed: int | None
    """Seed from which the seeds of requests without one are generated."""
    config: str | Path | None
    """TOML file with any of these settings."""
    generation_config: Literal["auto", "vllm"]
    """Sampling defaults: auto: the model's generation_config.json; vllm: OpenAI's defaults, as in vLLM. Default:
    auto.
    """
    override_generation_config: Mapping[str, Any] | str
    """JSON object of sampling defaults that override the model's, such as '{"temperature": 0.5}', as in vLLM."""
    chat_template: str | Path | None
    """File with a Jinja chat template that replaces the model's."""
    tool_call_format: str | None
    """Format in which the model writes tool calls; default: as its chat template tells."""
    adapter_chat_templates: bool
    """Use an adapter's own chat_template.jinja if it differs from the model's. Templates are programs: enable this
    only for adapters of people you trust. Default: False.
    """
    adapter_roots: Sequence[str | Path] | str | None
    """Directories, separated by ':', that adapters loaded over HTTP must be in; none: adapters can't be changed
    over HTTP; default: the adapters directory.
    """
    adapter_uploads: str | Path | None
    """Directory for uploaded adapters and for the names of all adapters loaded over HTTP, which are served again
    after a restart. Each server or cluster needs its own. Default: uploads are refused.
    """
    max_adapter_bytes: int | str
    """Maximum bytes of an uploaded adapter. Default: 1GiB."""
    max_uploaded_bytes: int | str
    """Maximum bytes of all uploaded adapters together. Default: 16GiB."""
    keep_versions: int
    """Versions of an adapter that stay available as NAME@VERSION, including the newest, unless a load says
    otherwise. Default: 1.
    """
    adapter_source: Sequence[str] | str
    """Source of adapters that a request names but that are not registered, as PATTERN=URL with a * in both, such as
    'acme/*=https://adapters.acme.example/*.tar.gz' or 'hf/*=hf://*'. The URL is a directory, hf://, https://, s3://
    or gs://, and its host must be in adapter_source_hosts; default: none.
    """
    adapter_source_hosts: Sequence[str] | str
    """Comma-separated hosts that adapters may be fetched from, including redirects: store.example, *.store.example,
    http://minio:9000, s3://BUCKET, gs://BUCKET, and private addresses or networks such as 10.1.0.0/16; default:
    none.
    """
    adapter_source_bytes: int | str
    """Maximum bytes of a fetched adapter. Default: 2GiB."""
    adapter_source_seconds: float
    """Time limit for fetching an adapter. Default: 60."""
    adapter_cache: str | Path | None
    """Directory of fetched adapters, not shared with another server; default: in the user's cache directory."""
    adapter_cache_bytes: int | str
    """Maximum bytes of fetched adapters; the least recently used are removed first. Default: 20GiB."""
    lora_modules: Sequence[str | dict[str, str] | tuple[str, str | Path]] | str
    """Adapter to serve from anywhere on this machine, as NAME=DIR."""
    allowed_media_domains: Sequence[str] | str
    """Comma-separated domains that images of requests may be fetched from by URL: images.example, *.images.example,
    http://files:9000 for one without TLS, and private addresses or networks such as 10.1.0.0/16 that names may lead
    to; redirects are not followed; default: none.
    """
