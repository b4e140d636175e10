"""transformers with PEFT: `generate`, with `adapter_names` where requests differ in their adapter."""

from __future__ import annotations

import time
from typing import Any

import peft
import torch
import transformers

from ..cpu.workload import Job


class Contender:
    """The plain model for `base_plain`, a PeftModel with every adapter loaded for the other cases."""

    def open(self, job: dict[str, Any]) -> dict[str, Any]:
        self._job = Job.from_json(job)
        workload = self._job.workload
        torch.set_num_threads(workload.threads)
        transformers.utils.logging.set_verbosity_error()
        self._prompts = torch.tensor(workload.prompts())
        self._plain = self._load()
        model: Any = self._load()
        for name, path in self._job.adapters.items():
            options = {"adapter_name": name, "autocast_adapter_dtype": False}
            if isinstance(model, peft.PeftModel):
                model.load_adapter(path, **options)
            else:
                model = peft.PeftModel.from_pretrained(model, path, **options)
        self._model = model.eval()
        return {
            "version": f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
        }

    def run(self, case: str) -> dict[str, Any]:
        workload, names = self._job.workload, list(self._job.adapters)
        with torch.inference_mode():
            if case == "base_plain":
                return self._generate(self._plain)
            if case == "base":
                with self._model.disable_adapter():
                    return self._generate(self._model)
            if case == "one":
                self._model.set_adapter(names[workload.one_adapter])
                return self._generate(self._model)
            return self._generate(self._model, adapter_names=[names[index] for index in workload.assignment(case)])

    def close(self) -> None:
        pass

    def _load(self) -> Any:
        dtype = getattr(torch, self._job.workload.dtype)
        return transformers.AutoModelForCausalLM.from_pretrained(
            self._job.model, dtype=dtype, attn_implementation="sdpa"
        ).eval()

    def _generate(self, model: Any, **more: Any) -> dict[str, Any]:
        count = self._job.workload.output_tokens
        stamps = _Stamps()
        began = time.perf_counter()
        output = model.generate(
            input_ids=self._prompts, attention_mask=self._prompts.new_ones(self._prompts.shape), do_sample=False,
            min_new_tokens=count, max_new_tokens=count, pad_token_id=0, stopping_criteria=[stamps], **more,
        )  # fmt: skip
        ended = time.perf_counter()
        return {
            "seconds": ended - began,
            "prefill_seconds": stamps.first - began,
            "tokens": output[:, self._prompts.shape[1] :].tolist(),
        }


class _Stamps:
    """A stopping criterion that stops nothing and notes when the first token was there."""

    def __init__(self) -> None:
        self.first = 0.0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.first = self.first or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)
