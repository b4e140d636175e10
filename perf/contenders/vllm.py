"""vLLM for CPUs, offline and in-process: its own engine, stepped as its `LLM` class does."""

from __future__ import annotations

import os
import time
from typing import Any

from ..cpu.workload import Job

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes for `max_lora_rank`


class Contender:
    """One engine with LoRA on or off, as the job says; a process can't hold both."""

    def open(self, job: dict[str, Any]) -> dict[str, Any]:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm
        from vllm.lora.request import LoRARequest

        self._job = Job.from_json(job)
        self._serial = 0
        workload = self._job.workload
        lora: dict[str, Any] = {}
        if self._job.lora:
            count = len(self._job.adapters)
            lora = {
                "enable_lora": True,
                "max_lora_rank": min(rank for rank in _RANKS if rank >= max(workload.ranks)),
                "max_loras": count,
                "max_cpu_loras": 4 * count,
            }
        self._loras = [
            LoRARequest(name, index + 1, path) for index, (name, path) in enumerate(self._job.adapters.items())
        ]
        self._params = vllm.SamplingParams(
            temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True, detokenize=False
        )
        self._engine = vllm.LLM(
            model=self._job.model, skip_tokenizer_init=True, dtype=workload.dtype, seed=workload.seed,
            max_model_len=min(1024, workload.geometry.positions), max_num_seqs=workload.requests,
            max_num_batched_tokens=workload.max_batched_tokens, enable_prefix_caching=False,
            disable_log_stats=True, **lora, **self._job.options,
        ).llm_engine  # fmt: skip
        return {"version": f"vllm {vllm.__version__}"}

    def run(self, case: str) -> dict[str, Any]:
        workload = self._job.workload
        tokens: dict[str, list[int]] = {}
        began = time.perf_counter()
        for prompt, adapter in zip(workload.prompts(), workload.assignment(case), strict=True):
            self._serial += 1
            tokens[str(self._serial)] = []
            self._engine.add_request(
                str(self._serial), {"prompt_token_ids": prompt}, self._params,
                lora_request=None if adapter is None else self._loras[adapter],
            )  # fmt: skip
        first = 0.0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens[output.request_id.partition("-")[0]] = list(output.outputs[0].token_ids)
            if not first and all(tokens.values()):
                first = time.perf_counter()
        ended = time.perf_counter()
        return {"seconds": ended - began, "prefill_seconds": first - began, "tokens": list(tokens.values())}

    def close(self) -> None:
        pass
