"""Configuration of an engine. One schema: the server's settings extend it with flags, environment and file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

LEAST_HOST_CACHE_BYTES = 1 << 30


class EngineConfig(BaseModel):
    """Model, memory and batching limits of one engine."""

    model_config = ConfigDict(extra="forbid")

    model: Path = Field(description="directory of a Hugging Face checkpoint (config.json, *.safetensors)")
    adapters: Path | None = Field(
        default=None, description="directory of PEFT adapters: each sub-directory with one is served under its name"
    )
    tokenizer: Path | None = Field(
        default=None,
        description="directory of the tokenizer (tokenizer.json and its configuration); default: the model's",
    )
    strict_adapters: bool = Field(
        default=False,
        description="an adapter of --adapters or --lora-modules that can't be served stops the start; by default it is "
        "listed with the reason and the others are served",
    )
    adapter_load_seconds: float = Field(
        default=30.0, gt=0, description="how long reading and checking an adapter may take before it is given up"
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="the base model's name in the API; default: its directory's name"
    )
    strict_base: bool = Field(
        default=False,
        description="refuse an adapter if its base_model_name_or_path names another base model than this one's "
        "directory, origin or served name; by default that is logged and listed",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="dtype of weights, KV cache and adapters; auto: the checkpoint's own"
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="auto: the checkpoint's weights; dummy: random ones, to measure a model from its config.json alone",
    )
    device: str = Field(
        default="auto",
        description="where the model runs: cpu, cuda, or one of several GPUs such as cuda:1; auto: a GPU where PyTorch "
        "finds one and Triton is installed",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes that compute each layer together, each a share of its heads and MLP; on GPUs each takes "
        "one, from the first on",
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="most tokens of one request, prompt and output; default: the model's limit"
    )
    max_num_seqs: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="most requests in one step; default: 32, on a GPU of 14 GiB 128, of 40 GiB and more 256",
    )
    max_waiting: int | None = Field(
        default=4096,
        ge=1,
        description="most generations that wait for a seat; what comes beyond is refused, and of a client that is "
        "known what goes beyond the room that is left to others. None: no limit",
    )
    max_num_batched_tokens: int = Field(
        default=1024,
        ge=1,
        description="most tokens in one step; default: 1024, on a GPU of 14 GiB 4096, of 40 GiB and more 8192",
    )
    chunked_prefill: bool = Field(default=True, description="split long prompts over steps")
    block_tokens: int = Field(default=16, ge=1, description="tokens per KV page; grown when an adapter slab needs it")
    memory_bytes: int | None = Field(
        default=None,
        ge=1 << 16,
        description="size of the arena that KV cache and adapters share; default: on a CPU room for a few "
        "requests of the greatest length, within a quarter of the memory that the weights leave; on a GPU what is left "
        "of gpu_memory_utilization",
    )
    num_pages: int | None = Field(default=None, ge=2, description="size of the arena in pages, instead of memory_bytes")
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of a GPU's memory that weights, arena and all else may take"
    )
    graph_capture: Literal["ahead", "lazy", "off"] = Field(
        default="ahead",
        description="when decode steps are captured as CUDA graphs: before the first request, at a batch size's first "
        "use, or never",
    )
    mixed_graph_tokens: int = Field(
        default=512,
        ge=0,
        le=4096,
        description="on a GPU: steps of prompts, and decode rows among them, of up to so many tokens in all are padded "
        "to one of a few sizes, and what lies between two layers' attentions is captured, as graph_capture says; "
        "0: no such step is",
    )
    dependent_launch: Literal["auto", "off"] = Field(
        default="auto",
        description="on a GPU of compute capability 9 and later: kernels of norms, LoRA and the like begin while the "
        "one before them ends (programmatic dependent launch), where Triton compiles it; or never",
    )
    attention: Literal["auto", "flashinfer", "triton", "torch"] = Field(
        default="auto",
        description="on a GPU: the attention backend. auto: FlashInfer; where it can't serve, our Triton kernel for "
        "decode rows and torch for prompts; where that can't either, torch alone, which captures nothing. A named "
        "backend that can't serve stops the start. With triton a decode row's attention has the same bits in any "
        "company",
    )
    small_gemm: Literal["auto", "on", "fused", "off"] = Field(
        default="auto",
        description="on a GPU: the kernel of products with the base weights in decode steps of up to 64 rows. auto: "
        "ours or cuBLAS's, product by product and batch size by batch size, whichever takes the device less time at "
        "the start, with adapters and without; on: our kernel; fused: our kernel, with adapters expanded in it up to "
        "32 rows; off: cuBLAS. With on or fused a row's products have the same bits in all batch sizes up to 16, and "
        "in all from there to 64, at every start",
    )
    max_lora_rank: int = Field(
        default=256, ge=1, le=256, description="largest rank of an adapter on a GPU; its tables are made for it once"
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        default="auto", description="CPU operators: the native decoder where it was built and can run, or torch's"
    )
    host_cache_bytes: int | None = Field(
        default=None,
        ge=0,
        description="host memory for adapters read from disk and for KV of preempted requests, least recently used "
        "out; default: an eighth of what the machine has left at the start, at least 1 GiB",
    )
    async_scheduling: bool = Field(
        default=True,
        description="launch the next step before the last one's tokens are read, where the device computes "
        "beside the host (a GPU)",
    )
    preemption: Literal["auto", "swap", "recompute"] = Field(
        default="auto",
        description="what becomes of a request's KV when others need its pages: it goes to host memory and comes back, "
        "or it is computed again; auto: whichever was measured to take less time. It is computed again wherever host "
        "memory has no room",
    )
    eviction: Literal["cost", "lru"] = Field(
        default="cost",
        description="what gives up its pages first: what costs least to bring back for how often it is used and is not "
        "waited for, or what was used least recently, to compare with",
    )
    prefix_cache: bool = Field(default=True, description="start from cached KV of equal prompt beginnings")
    share_prefix_cache: bool = Field(
        default=False,
        description="let requests of different tenants start from each other's cached KV; then one can tell what "
        "another has asked. A request's cache salt is honoured either way",
    )
    lookahead: int = Field(default=8, ge=1, description="adapters are read ahead for this many waiting requests")
    prefetch: int = Field(
        default=0,
        ge=0,
        description="adapters are loaded into the arena for this many waiting requests before they may run, where "
        "there is room that no other request waits for",
    )
    max_adapters_per_step: int | None = Field(
        default=None, ge=1, description="most distinct adapters in a step; default: no limit"
    )
    max_overtake_seconds: float = Field(
        default=1.0, ge=0, description="how long a waiting request may be overtaken by others with resident adapters"
    )
    fair_by: Literal["tenant", "adapter"] = Field(
        default="tenant",
        description="what takes turns: tenants, or adapters; the base model counts as an adapter",
    )
    weights: dict[str, float] = Field(
        default={},
        description="shares of tenants, or of adapters, by name: one of weight 2 gets twice as much of a busy engine "
        "as one of weight 1, which is every other's",
    )
    max_turn_seconds: float = Field(
        default=10.0,
        gt=0,
        description="how long a tenant, or adapter, may wait for its turn, whatever its weight and others' shares",
    )
    max_turn_steps: int = Field(default=1000, ge=1, description="the same in steps")
    mode_policy: Literal["manual", "fastest", "dlora-1", "dlora-2", "dlora-3", "dlora-artifact"] = Field(
        default="manual",
        description="which adapter is merged into a step's weights, and which requests the step runs: manual: none "
        "unless it is merged by hand; fastest: whatever is predicted to compute most tokens a second; dlora-1, 2, 3: "
        "the paper's dynamic batching, with adaptive thresholds from 2 on, with credits at 3; dlora-artifact: all of "
        "these as the authors' code has them, which tunes thresholds at mode switches only. These are to compare with",
    )
    max_load_stall_seconds: float = Field(
        default=0.02,
        ge=0,
        description="how long a step may wait for adapters that are still being read; 0: no request starts before "
        "its adapter has been read",
    )
    adapter_read_seconds: float = Field(
        default=30.0,
        gt=0,
        description="how long an adapter's read may bring nothing before it is given up and its requests fail; up to "
        "32 s more for large layers, so that a slow disk may take its time",
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads, of all ranks together; default: as many as there are processors"
    )
    offload_workers: int = Field(
        default=0,
        ge=0,
        le=63,
        description="processes, each on a processor of its own, that compute LoRA products of prompts with an adapter "
        "that is still being copied to its pages (CPU-assisted prefill), where that is predicted to pay; with "
        "the native decoder on a CPU, or on a GPU with CuPy, where it is untried",
    )
    seed: int | None = Field(default=None, description="seed of the seeds drawn for requests that bring none")

    @property
    def tokenizer_dir(self) -> Path:
        """The directory of tokenizer.json."""
        return self.tokenizer or self.model

    @property
    def host_bytes(self) -> int:
        """`host_cache_bytes`, or the least default while it has not been derived from the machine's memory."""
        return LEAST_HOST_CACHE_BYTES if self.host_cache_bytes is None else self.host_cache_bytes

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("it may be auto, cpu, cuda, or cuda: and the number of a GPU, such as cuda:1")
        return device

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
