"""Configuration of an engine. One schema: the server's settings extend it with flags, environment and file.

Tests: tests/server/test_settings.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

LEAST_HOST_CACHE_BYTES = 1 << 30

#: The largest rank that kernels for GPUs are made for.
MOST_GPU_RANK = 256

#: Names that other servers have for the forms of quantised checkpoints.
_FORMS_OF_CHECKPOINTS = (
    "awq",
    "awq_marlin",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "gguf",
    "gptq",
    "gptq_marlin",
    "modelopt",
)


class EngineConfig(BaseModel):
    """Model, memory and batching limits of one engine."""

    model_config = ConfigDict(extra="forbid")

    model: Path = Field(description="directory of a Hugging Face checkpoint (config.json, *.safetensors)")
    adapters: Path | None = Field(
        default=None,
        description="directory of PEFT adapters: each subdirectory that holds an adapter is served under its name",
    )
    tokenizer: Path | None = Field(
        default=None,
        description="directory of the tokenizer (tokenizer.json and its configuration); default: the model's",
    )
    strict_adapters: bool = Field(
        default=False,
        description="refuse to start if an adapter of --adapters or --lora-modules can't be served; by default "
        "it is listed with the reason and the others are served",
    )
    adapter_load_seconds: float = Field(
        default=30.0, gt=0, description="time limit for reading and checking an adapter"
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="the base model's name in the API; default: its directory's name"
    )
    strict_base: bool = Field(
        default=False,
        description="refuse an adapter whose base_model_name_or_path names another base model; by default the "
        "difference is logged and listed",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="dtype of weights, adapters and, unless kv_cache_dtype says otherwise, KV cache; auto: the "
        "checkpoint's own",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="auto: the checkpoint's weights; dummy: random weights, to measure a model from its "
        "config.json alone",
    )
    quantization: Literal["int8", "int4", "w8a8", "w4a8", "fp8"] | None = Field(
        default=None,
        description="quantise the projections of layers while the checkpoint is read, each weight to the nearest of "
        "256 or 16 values. int8: one scale per row; int4: one per row and group of 128 inputs (64 or 32 where 128 "
        "does not divide the row). w8a8 and w4a8: the same weights, and on a CPU activations are rounded to 8 bits "
        "where they are multiplied with them, but not for experts. fp8: E4M3, one scale per row; kept so by GPUs, and "
        "dequantised on a CPU. Adapters and KV cache keep dtype. Default: weights "
        "stay as they are",
    )
    quantize_lm_head: bool = Field(
        default=False, description="quantise the output projection, too; the embeddings stay. Needs quantization"
    )
    fp8_activations: bool = Field(
        default=False,
        description="on a GPU of compute capability 8.9 or later, in bfloat16: round activations to FP8 (E4M3), each "
        "row by itself, for FP8 weights with one scale per row or tensor whose checkpoint asks for it, or that "
        "quantization fp8 makes. It costs quality, in steps of any size. Products are then of FP8 with FP8 where that "
        "is measured to be faster at the start. Adapters get activations as they are",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="dtype of keys and values in the page pool. auto: that of dtype; fp8: E4M3, one byte each, with "
        "the checkpoint's k_scale and v_scale of each layer where it has them, else 1; values beyond 448 times the "
        "scale become that",
    )
    device: str = Field(
        default="auto",
        description="where the model runs: cpu, cuda, or one of several GPUs such as cuda:1; auto: a GPU if "
        "PyTorch finds one and Triton is installed",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="TP ranks: processes that each compute a share of every layer; on GPUs each uses one, "
        "starting with the first",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="maximum tokens of a request, prompt and output together; default: the model's limit",
    )
    max_num_seqs: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="maximum sequences in one step; default: 32, on a GPU with 14 GiB 128, with 40 GiB or more 256, "
        "for quantised models 64",
    )
    max_waiting: int | None = Field(
        default=4096,
        ge=1,
        description="maximum queued sequences; beyond it requests get 429. A tenant may hold at most as many "
        "queue entries as are free for others. None: no limit",
    )
    max_num_batched_tokens: int = Field(
        default=1024,
        ge=1,
        description="maximum tokens in one step; default: 1024, on a GPU with 14 GiB 4096, with 40 GiB or more 8192",
    )
    chunked_prefill: bool = Field(default=True, description="split long prompts over several steps")
    block_tokens: int = Field(
        default=16,
        ge=1,
        description="tokens per KV page; raised if a slab of an adapter needs a larger page. A page must have room for "
        "a part of a recurrent layer's state, and must divide the chunks of Llama 4's attention; the start is refused "
        "otherwise",
    )
    memory_bytes: int | None = Field(
        default=None,
        ge=1 << 16,
        description="size of the page pool that KV cache and adapters share; default on a CPU: room for a few "
        "requests of maximum length, at most a quarter of the memory that the weights leave; on a "
        "GPU: the rest of gpu_memory_utilization",
    )
    num_pages: int | None = Field(
        default=None, ge=2, description="size of the page pool in pages, instead of memory_bytes"
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="share of a GPU's memory that weights, page pool and everything else may use",
    )
    graph_capture: Literal["ahead", "lazy", "off"] = Field(
        default="ahead",
        description="when decode steps are captured as CUDA graphs: ahead: before the first request; lazy: at "
        "the first use of a batch size; off: never",
    )
    mixed_graph_tokens: int = Field(
        default=512,
        ge=0,
        le=4096,
        description="on a GPU: maximum tokens of a step with prefill that uses piecewise CUDA graphs; such steps "
        "are padded to one of a few sizes. 0: none",
    )
    dependent_launch: Literal["auto", "off"] = Field(
        default="auto",
        description="on a GPU of compute capability 9 or later: start small kernels while the previous kernel "
        "ends (programmatic dependent launch), if Triton compiles it; or never",
    )
    attention: Literal["auto", "flashinfer", "xqa", "triton", "torch"] = Field(
        default="auto",
        description="attention backend on a GPU. auto: the first available of FlashInfer, our Triton decode "
        "kernel, and PyTorch, which captures no graphs; beside FlashInfer, decode steps use its XQA kernel where "
        "that is built ahead and measured to be faster at the start. xqa: FlashInfer, with XQA for all decode steps. "
        "A named backend that is not available stops the start. triton's decode attention is batch-invariant",
    )
    small_gemm: Literal["auto", "on", "fused", "swapped", "off"] = Field(
        default="auto",
        description="on a GPU: GEMM backend of the base weights in decode steps of up to 64 sequences, and of "
        "quantised ones in all steps. auto: measured at the start for each shape; on: our kernel; fused: our kernel "
        "with LoRA expand fused in, up to 32 sequences; swapped: on, but quantised weights by our kernel for steps of "
        "any size, which widens them in registers; off: cuBLAS, with quantised weights kept dequantised. With on or "
        "fused, results are the same for all batch sizes up to 16, and for all from 17 to 64, at every start; beyond "
        "64 sequences and in prompts they widen quantised weights in memory for cuBLAS",
    )
    max_lora_rank: int = Field(
        default=256,
        ge=1,
        le=MOST_GPU_RANK,
        description=f"largest rank of an adapter on a GPU, at most {MOST_GPU_RANK}; adapter tables are sized for it at "
        "the start. A CPU has no such limit",
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        default="auto", description="CPU kernels: auto: the native decoder if it was built and can run, else PyTorch"
    )
    host_cache_bytes: int | None = Field(
        default=None,
        ge=0,
        description="host memory for adapters, for the KV cache of preempted requests, for cached prefixes that "
        "leave the page pool, and for rows of images; what costs least to bring back for how often it is used leaves "
        "first; default: an eighth of the free memory at the start, at least 1 GiB",
    )
    host_prefix_cache: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="keep cached prefixes that leave the page pool in host memory: auto: on a CPU; on: on a GPU, too, "
        "where they are copied before they leave, which is experimental; off: nowhere",
    )
    kv_cache_dir: Path | None = Field(
        default=None,
        description="directory for cached prefixes that leave host memory, and of earlier runs; several servers of one "
        "user may share it. It must be that user's alone (mode 700). Default: prefixes are not kept in files",
    )
    kv_cache_disk_bytes: int | None = Field(
        default=None,
        ge=1 << 20,
        description="size limit of kv_cache_dir, for all servers that use it; what was used longest ago is removed",
    )
    async_scheduling: bool = Field(
        default=True,
        description="on a GPU: launch the next step before the tokens of the current one are read; off while "
        "--speculation is on, which needs these tokens",
    )
    speculation: Literal["auto", "ngram", "off"] = Field(
        default="auto",
        description="propose tokens and verify several per step; the output stays the same. ngram: what followed the "
        "last tokens earlier in the prompt or the answer; on a GPU it switches async_scheduling off. auto: ngram on a "
        "CPU with the native decoder, or with speculation_cache_tokens; else off",
    )
    speculation_cache_tokens: int = Field(
        default=0,
        ge=0,
        description="tokens of recent answers, of all adapters together, in which --speculation looks for proposals, "
        "too. A request's come from answers of its own adapter's version, tenant and cache_salt only",
    )
    preemption: Literal["auto", "swap", "recompute"] = Field(
        default="auto",
        description="what happens to the KV cache of a preempted request: swap: it moves to host memory and "
        "back; recompute: it is computed again; auto: whichever was measured to take less time. It "
        "is always recomputed if host memory is full",
    )
    eviction: Literal["cost", "lru"] = Field(
        default="cost",
        description="which pages are evicted first: cost: those that cost least to restore for how often they "
        "are used; lru: the least recently used, a baseline",
    )
    prefix_cache: bool = Field(default=True, description="reuse the KV cache of equal prompt prefixes")
    state_checkpoint_tokens: int = Field(
        default=1024,
        ge=0,
        description="models with recurrent layers: keep the recurrent state in the prefix cache at the end of a "
        "prompt, and after every so many tokens; 0: never, so that no prefix is reused",
    )
    share_prefix_cache: bool = Field(
        default=False,
        description="share the prefix cache between tenants; a tenant can then find out what another has asked. "
        "A request's cache_salt applies either way",
    )
    limit_mm_per_prompt: dict[str, Annotated[int, Field(ge=0, le=256)]] = Field(
        default={"image": 16},
        description='the most images of a request, as JSON: {"image": 4}; 0: images are refused, and the vision '
        "tower is not read",
    )
    max_image_tokens: int = Field(
        default=4096,
        ge=1,
        le=1 << 20,
        description="the most tokens of an image: a larger one is made smaller if the model's image processor has a "
        "setting for that, else it is refused",
    )
    encoder_threads: int = Field(
        default=1,
        ge=1,
        le=256,
        description="threads that encode images, beside those of steps and at a lower priority",
    )
    encoder_cache_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="host memory for rows of encoded images that requests hold and for the pixels of the one that is "
        "being encoded: requests that hold more keep others' images waiting. As many bytes of host_cache_bytes may "
        "hold rows for the next use of an image",
    )
    lookahead: int = Field(
        default=8, ge=1, description="number of waiting requests whose adapters are read into host memory ahead"
    )
    prefetch: int = Field(
        default=0,
        ge=0,
        description="number of waiting requests whose adapters are loaded into the page pool ahead, if no other "
        "request waits for the room",
    )
    max_adapters_per_step: int | None = Field(
        default=None, ge=1, description="maximum distinct adapters in a step; default: no limit"
    )
    max_overtake_seconds: float = Field(
        default=1.0, ge=0, description="how long requests with resident adapters may overtake a waiting request"
    )
    fair_by: Literal["tenant", "adapter"] = Field(
        default="tenant",
        description="fairness key: tenant or adapter; the base model counts as an adapter",
    )
    weights: dict[str, float] = Field(
        default={},
        description="shares by tenant or adapter name: weight 2 gets twice as much of a busy engine as weight 1, "
        "the default",
    )
    max_turn_seconds: float = Field(
        default=10.0,
        gt=0,
        description="longest time that a tenant or adapter waits for its turn, whatever the weights",
    )
    max_turn_steps: int = Field(default=1000, ge=1, description="longest wait for a turn, in steps")
    mode_policy: Literal["manual", "fastest", "dlora-1", "dlora-2", "dlora-3", "dlora-artifact"] = Field(
        default="manual",
        description="which adapter is merged into the weights, and which requests a step runs. manual: none, unless a "
        "program calls `Engine.merge`; fastest: the mode with the most predicted tokens per second; dlora-1, dlora-2, "
        "dlora-3: dLoRA's dynamic batching, from 2 with adaptive thresholds, at 3 with credits; dlora-artifact: as the "
        "authors' code does it. The dlora policies are baselines",
    )
    max_load_stall_seconds: float = Field(
        default=0.02,
        ge=0,
        description="how long a step may wait for adapters that are still being read; 0: a request starts only "
        "once its adapter has been read",
    )
    target_step_ms: Literal["auto"] | Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default="auto",
        description="how long steps should take, on average, while prompts of one tenant are computed beside answers "
        "of another: it bounds the prompts' tokens in a step, and leaves them out of others; auto: 5 decode steps, "
        "as measured; a number: at least 2 decode steps; 0: no bound",
    )
    adapter_read_seconds: float = Field(
        default=30.0,
        gt=0,
        description="how long an adapter read may make no progress before its requests fail; up to 32 s longer "
        "for large layers",
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of all TP ranks together; default: the number of processors"
    )
    offload_workers: int = Field(
        default=0,
        ge=0,
        le=63,
        description="CPU LoRA offload workers, each on its own processor: they compute LoRA terms of prompts "
        "while the adapter is being copied, if that is predicted to be faster. Needs the native "
        "decoder on a CPU, or a GPU with CuPy (experimental)",
    )
    seed: int | None = Field(
        default=None, description="seed from which the seeds of requests without one are generated"
    )

    @property
    def speculates(self) -> bool:
        """False for `auto`, which `completed` replaces by what it means on this machine."""
        return self.speculation == "ngram"

    @property
    def launches_ahead(self) -> bool:
        """False where steps speculate: drafts continue tokens that the host has read."""
        return self.async_scheduling and not self.speculates

    @property
    def tokenizer_dir(self) -> Path:
        """The directory of tokenizer.json."""
        return self.tokenizer or self.model

    @property
    def host_bytes(self) -> int:
        """`host_cache_bytes`, or the least default while it has not been derived from the machine's memory."""
        return LEAST_HOST_CACHE_BYTES if self.host_cache_bytes is None else self.host_cache_bytes

    @field_validator("limit_mm_per_prompt", mode="before")
    @classmethod
    def _read_limits(cls, given: Any) -> Any:
        """A text is JSON, or NAME=COUNT."""
        if not isinstance(given, str):
            return given
        if "=" in given and "{" not in given:
            given = json.dumps(dict([given.split("=", 1)]))
        try:
            return json.loads(given)
        except json.JSONDecodeError:
            raise ValueError('it must be JSON, such as {"image": 4}') from None

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _only_images(cls, limits: dict[str, int]) -> dict[str, int]:
        if others := sorted(limits.keys() - {"image"}):
            raise ValueError(f"{others[0]} is not served; only image may be limited")
        return limits

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("it may be auto, cpu, cuda, or cuda: and the number of a GPU, such as cuda:1")
        return device

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _kv_cache_dtype_by_its_other_name(cls, name: object) -> object:
        return "fp8" if name == "fp8_e4m3" else name

    @field_validator("quantization", mode="before")
    @classmethod
    def _quantization_is_no_form_of_checkpoints(cls, name: object) -> object:
        if name in _FORMS_OF_CHECKPOINTS:
            raise ValueError(f"the form of a checkpoint is read from its files; leave quantization out to serve {name}")
        return name

    @model_validator(mode="after")
    def _lm_head_is_quantised_with_the_rest(self) -> EngineConfig:
        if self.quantize_lm_head and self.quantization is None:
            raise ValueError(
                "quantize_lm_head needs quantization: set it to int8, int4, w8a8, w4a8 or fp8, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _activations_are_rounded_for_kept_weights(self) -> EngineConfig:
        if self.fp8_activations and self.small_gemm == "off":
            raise ValueError(
                "fp8_activations is true, but small_gemm is 'off', which dequantises FP8 weights; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _answers_are_cached_to_speculate(self) -> EngineConfig:
        if self.speculation_cache_tokens and self.speculation == "off":
            raise ValueError(
                f"speculation_cache_tokens is {self.speculation_cache_tokens}, but speculation is 'off'; leave out "
                "one of them"
            )
        return self

    @model_validator(mode="after")
    def _files_of_prefixes_have_a_folder_and_a_limit(self) -> EngineConfig:
        if (self.kv_cache_dir is None) != (self.kv_cache_disk_bytes is None):
            given, missing = ("kv_cache_dir", "kv_cache_disk_bytes")[:: 1 if self.kv_cache_dir is not None else -1]
            raise ValueError(f"{given} is set, but {missing} is not; set both, or leave both out")
        if self.kv_cache_dir is not None and (obstacle := self._host_prefix_obstacle):
            raise ValueError(
                f"kv_cache_dir is set, but {obstacle}: files are of cached prefixes, and go through host memory"
            )
        return self

    @model_validator(mode="after")
    def _prefixes_in_host_memory_have_room(self) -> EngineConfig:
        if self.host_prefix_cache == "on" and (obstacle := self._host_prefix_obstacle):
            raise ValueError(f"host_prefix_cache is 'on', but {obstacle}; leave out one of them")
        return self

    @property
    def _host_prefix_obstacle(self) -> str | None:
        """The setting that rules out cached prefixes in host memory; None if none does."""
        if not self.prefix_cache:
            return "prefix_cache is off"
        if self.host_cache_bytes == 0:
            return "host_cache_bytes is 0"
        return "host_prefix_cache is 'off'" if self.host_prefix_cache == "off" else None

    @field_validator("weights")
    @classmethod
    def _weights_are_shares(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if not 0.001 <= weight <= 1000:
                raise ValueError(f"the weight of {name!r} is {weight:g}; give one from 0.001 to 1000")
        return weights

    @model_validator(mode="after")
    def _budget_covers_batch(self) -> EngineConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "a decode step of all requests would not fit; raise it or lower max_num_seqs"
            )
        return self
