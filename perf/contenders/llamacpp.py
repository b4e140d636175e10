"""llama.cpp's server over HTTP on this machine.

Requests of a case go out at once from as many threads, as its clients would send them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from ..cpu.workload import Job

START_SECONDS = 120.0


class Contender:
    """One server with all adapters loaded, or with none, as the job says.

    options: `server`, the binary; `model` and `adapters`, the converted files (adapters in the workload's order).
    """

    def open(self, job: dict[str, Any]) -> dict[str, Any]:
        self._job = Job.from_json(job)
        workload, options = self._job.workload, self._job.options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, trust_env=False)
        context = workload.requests * (workload.prompt_tokens + workload.output_tokens + 64)
        flags = {
            "-m": options["model"], "--host": "127.0.0.1", "--port": port, "-np": workload.requests,
            "-c": context, "-t": workload.threads, "-tb": workload.threads, "-b": workload.max_batched_tokens,
            "-ub": workload.max_batched_tokens,
        }  # fmt: skip
        if workload.dtype == "float32":
            flags |= {"-fa": "off", "-ctk": "f32", "-ctv": "f32"}
        if self._job.lora:
            flags["--lora"] = ",".join(options["adapters"])
        command = [str(part) for flag in flags.items() for part in flag]
        command += ["--no-cache-prompt", *(["--lora-init-without-apply"] if self._job.lora else [])]
        self._process = subprocess.Popen([options["server"], *command], stdout=sys.stderr, stderr=sys.stderr)
        self._await_server()
        self._pool = ThreadPoolExecutor(workload.requests)
        properties = self._call("GET", "/props")
        return {"version": f"llama.cpp {properties.get('build_info', 'of unknown build')}"}

    def run(self, case: str) -> dict[str, Any]:
        workload = self._job.workload
        bodies = [
            self._body(prompt, adapter)
            for prompt, adapter in zip(workload.prompts(), workload.assignment(case), strict=True)
        ]
        began = time.perf_counter()
        answers = list(self._pool.map(lambda body: self._call("POST", "/completion", body), bodies))
        ended = time.perf_counter()
        tokens = [answer["tokens"] for answer in answers]
        if any(len(row) != workload.output_tokens for row in tokens):
            raise RuntimeError(f"wanted {workload.output_tokens} tokens each, got {[len(row) for row in tokens]}")
        prefill = None  # it takes one adapter after another, so that there is no one prefill in a mixed batch
        if len(set(workload.assignment(case))) == 1:
            prefill = max(answer["timings"]["prompt_ms"] for answer in answers) / 1e3
        return {"seconds": ended - began, "prefill_seconds": prefill, "tokens": tokens}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=15)

    def _body(self, prompt: list[int], adapter: int | None) -> dict[str, Any]:
        body = {
            "prompt": prompt, "n_predict": self._job.workload.output_tokens, "temperature": 0.0, "ignore_eos": True,
            "cache_prompt": False, "return_tokens": True, "samplers": ["top_k"], "top_k": 1,
        }  # fmt: skip
        if self._job.lora:  # an empty list would apply them all
            count = len(self._job.adapters)
            body["lora"] = [{"id": index, "scale": float(index == adapter)} for index in range(count)]
        return body

    def _await_server(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                self._call("GET", "/health")
                return
            except (httpx.TransportError, RuntimeError):
                time.sleep(0.2)
        raise RuntimeError("llama-server did not start; see its log")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        response = self._http.request(method, path, json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.status_code} {response.text[:500]!r}")
        return response.json()
