"""Each form of adapter on one projection at a time, of every family: transformers' and peft's log-probabilities."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.choice import open_executor
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.memory.files.error import AdapterFormatError
from chorus.perf.inline_reads import InlineReads

from ...conftest import quiet
from ...kept import kept_files
from ..tiny_families import EVERY, load_model, logits, save_family, train_vectors, without_conversion

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

FORMS = {"plain": {}, "lora-bias": {"lora_bias": True}, "dora": {"use_dora": True}}

PROMPT = torch.randint(3, 150, (26,), generator=torch.Generator().manual_seed(7)).tolist()

TOWER = re.compile(r"vision|visual|audio")

LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")

TOLERANCE = 5e-3

REFUSED = {
    *("mamba.dt_proj", "mixer.dt_proj", "mlp.router.classifier"),
    *(f"cross_attn.{each}_proj" for each in "qkvo"),
    *("altup.modality_router", "altup.prediction_coefs", "altup.correction_coefs"),
}
"""Projections whose weights transformers multiplies by itself, those that text never reaches, and those of streams."""


@quiet()
@without_conversion()
def _save(family: str, root: Path) -> None:
    """A model, an adapter of each form on each projection, and the reference's log-probabilities of the next token."""
    from peft import LoraConfig, get_peft_model

    save_family(family, root / "model")
    base, wanted = load_model(root / "model", dtype=torch.float32).eval(), {}
    names: dict[str, list[str]] = {}
    for name, module in base.named_modules():
        is_linear = type(module) in (torch.nn.Linear, Conv1D) and not TOWER.search(name)
        if is_linear and (found := LAYER.search(name)):
            names.setdefault(name[found.end() :], []).append(name)
    for path, targets in names.items():
        for form, fields in FORMS.items():
            name = f"{path} {form}"
            torch.manual_seed(len(wanted))
            lora = LoraConfig(
                r=2,
                lora_alpha=6,
                target_modules=targets,
                init_lora_weights=False,
                task_type="CAUSAL_LM",
                **fields,
            )
            try:
                trained = get_peft_model(base, lora)
            except ValueError:  # of parameters that are no modules: PEFT has no such form
                base = getattr(base, "unload", lambda found=base: found)()
                continue
            train_vectors(trained)
            trained.save_pretrained(root / name.replace("/", "_"))
            with torch.inference_mode():
                wanted[name] = logits(trained, PROMPT)[-1].float().log_softmax(-1).tolist()
            base = trained.unload()
    (root / "wanted.json").write_text(json.dumps(wanted))


@pytest.mark.parametrize("family", EVERY)
def test_each_form_on_one_projection_is_computed_as_by_peft_or_refused(family):
    root = kept_files(f"forms alone {family}", lambda root: _save(family, root))
    wanted = json.loads((root / "wanted.json").read_text())
    settings = EngineConfig(
        model=root / "model", dtype="float32", memory_bytes=8 << 20, threads=1, device="cpu", max_num_batched_tokens=64
    )
    engine = Engine(settings, open_executor(settings), reads=InlineReads())
    served: list[str] = []
    for name in wanted:
        try:
            engine.store.register(name, root / name)
        except AdapterFormatError:
            continue
        served.append(name)
        params = RequestParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
        engine.add_request(Request(name, PROMPT, params, name))
    found: dict[str, dict[int, float]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            for each in output.logprobs:
                found[output.request_id] = dict(each.top)
    engine.close()
    faults = {}
    for name in served:
        most = max(abs(logprob - wanted[name][token]) for token, logprob in found[name].items())
        if most > TOLERANCE:
            faults[name] = most
    assert not faults
    refused = {name.rpartition(" ")[0] for name in wanted} - {name.rpartition(" ")[0] for name in served}
    assert refused <= REFUSED
