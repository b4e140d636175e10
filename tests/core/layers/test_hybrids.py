"""The decoder computes models with recurrent mixers as transformers does, with states that go from step to step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from chorus.core.model.batch import BY_LIBRARY, StepBatch
from chorus.core.model.decoder import DecoderModel
from chorus.core.model.program.torch_step import Residual
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.dummy_weights import DummyWeights
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.weight_loader import WeightLoader
from chorus.memory.files.format import inspect_adapter
from chorus.memory.pages.arena import Arena
from chorus.memory.pages.layout import PageLayout

from ...greedy import MIN_MARGIN
from ..tiny_families import ATTENTION, HYBRIDS, LINEAR, MLP, QWEN3_5, randomise, save_family
from .plain_states import PlainStates

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

BLOCK, PAGES = 16, 24

BF16_ERROR = 5e-2
"""Relative L2 error of bfloat16 logits that is taken for rounding; measured: at most 3.3e-2 (transformers: 7.4e-2)."""


@dataclass
class Sequence:
    """A sequence under test, with pages of its own."""

    name: str
    tokens: list[int]
    pages: list[int]
    computed: int = 0


class Runner:
    """Runs steps of sequences on the torch decoder."""

    def __init__(self, model: Path, piecewise: bool = False, max_model_len: int = 256) -> None:
        self.config = read_model_config(model)
        layout = PageLayout(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, BLOCK, 4)
        self.arena = Arena(layout, PAGES, torch.float32, "cpu")
        with open_weights(model, self.config, torch.float32) as weights:
            self.decoder = DecoderModel(self.config, weights, self.arena, max_model_len, torch.float32)
        self.states = PlainStates(self.config)
        self.free = list(range(1, PAGES))
        self.piecewise = piecewise

    def sequence(self, name: str, prompt: list[int]) -> Sequence:
        return Sequence(name, list(prompt), [self.free.pop() for _ in range(6)])

    def step(self, *parts: tuple[Sequence, int]) -> torch.Tensor:
        """Compute so many tokens of each; returns the logits of the last one of each."""
        ids, positions, indptr = [], [], [0]
        for sequence, count in parts:
            ids += sequence.tokens[sequence.computed : sequence.computed + count]
            positions += range(sequence.computed, sequence.computed + count)
            sequence.computed += count
            indptr.append(len(ids))
        position = torch.tensor(positions)
        pages = [
            sequence.pages[at // BLOCK]
            for (sequence, count) in parts
            for at in range(sequence.computed - count, sequence.computed)
        ]
        attention = self.decoder.new_attention()
        attention.plan(
            indptr,
            torch.tensor([sequence.pages for sequence, _ in parts]),
            [sequence.computed for sequence, _ in parts],
        )
        batch = StepBatch(
            token_ids=torch.tensor(ids),
            positions=position,
            offset=position % BLOCK,
            page=torch.tensor([pages]),
            attention=attention,
            lora=None,
            logit_tokens=torch.tensor(indptr[1:]) - 1,
            backends=BY_LIBRARY,
            states=self.states.step([sequence.name for sequence, _ in parts], indptr),
        )
        with torch.inference_mode():
            return self._in_pieces(batch) if self.piecewise else self.decoder.forward(batch)

    def _in_pieces(self, batch: StepBatch[Any, Any]) -> torch.Tensor:
        """Pieces are of a bucket that is wider than the step, as captured ones; mixers have the step's tokens alone."""
        decoder, count, tokens = self.decoder, len(self.decoder.layers_of_mixers), len(batch.token_ids)
        flow = decoder.new_flow(tokens + 3)
        flow.pad(tokens)
        columns = {name: pad(getattr(batch, name), (0, 3)) for name in ("token_ids", "positions", "offset", "page")}
        bucket = replace(batch, **columns)  # page 0 belongs to no sequence
        for index in range(count):
            decoder.piece(index, bucket, flow)
            decoder.mix(index, bucket, batch.states, flow.of(tokens))
        decoder.piece(count, bucket, flow)
        return decoder.compute_logits(Residual(flow.x), batch)

    def greedy(self, prompt: list[int], chunk: int, count: int) -> list[int]:
        sequence = self.sequence(f"{prompt}", prompt)
        while sequence.computed < len(prompt):
            logits = self.step((sequence, min(chunk, len(prompt) - sequence.computed)))
        while True:
            sequence.tokens.append(int(logits[0].argmax()))
            if len(sequence.tokens) == len(prompt) + count:
                return sequence.tokens[len(prompt) :]
            logits = self.step((sequence, 1))


class Model:
    """A checkpoint, and what transformers makes of it."""

    def __init__(self, family: str, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        save_family(family, path)
        self.path = path
        self.reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def case(self, length: int, count: int = 8) -> tuple[list[int], list[int]]:
        """A random prompt and transformers' greedy tokens, all clear choices."""
        for seed in range(100):
            prompt = torch.randint(3, 150, (1, length), generator=torch.Generator().manual_seed(seed))
            found = self.reference.generate(
                prompt,
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            best = torch.cat(found.logits).topk(2).values
            if float((best[:, 0] - best[:, 1]).min()) >= MIN_MARGIN:
                return prompt[0].tolist(), found.sequences[0, length:].tolist()
        raise AssertionError("no clear choices")


@pytest.fixture(scope="module", params=[*HYBRIDS, "zaya"])
def model(request, tmp_path_factory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("piecewise", [False, True], ids=["forward", "pieces"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_greedy_tokens_are_those_of_transformers(model, chunk, piecewise):
    prompt, want = model.case(80)
    assert Runner(model.path, piecewise).greedy(prompt, chunk, len(want)) == want


def test_pages_may_go_on_behind_the_longest_sequence(model):
    prompt, want = model.case(80)
    assert Runner(model.path, max_model_len=88).greedy(prompt, 100, len(want)) == want


def test_sequences_share_steps(model):
    """A prompt in chunks, next to decoding sequences."""
    runner, cases = Runner(model.path), [model.case(length) for length in (70, 9, 30)]
    long, one, other = (runner.sequence(str(index), prompt) for index, (prompt, _) in enumerate(cases))
    steps = [((one, 9), (other, 1)), ((other, 29),), *(((long, chunk), (one, 1), (other, 1)) for chunk in (25, 44))]
    steps += [((long, 1), (one, 1), (other, 1))] * 5
    for parts in steps:
        for (sequence, _), row in zip(parts, runner.step(*parts), strict=True):
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(int(row.argmax()))
    for sequence, (prompt, want), count in zip((long, one, other), cases, (5, 8, 8), strict=True):
        assert sequence.tokens[len(prompt) :] == want[:count]


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_part_of_a_model_that_sees_is_computed(tmp_path, caplog, name):
    """Its vision tower's tensors and its draft layer's are left out, and told."""
    import transformers
    from safetensors.torch import load_file, save_file

    text = {
        "vocab_size": 150,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
        **QWEN3_5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    }
    if name == "Qwen3_5Moe":
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=tower)
    reference: Any = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomise(reference)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "mtp.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors", {"format": "pt"})
    prompt = torch.randint(3, 150, (1, 50))
    want = reference.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)[0, 50:]
    with caplog.at_level("INFO"):
        runner = Runner(tmp_path)
    seen = sum(".visual." in name for name in tensors)
    assert f"{seen + 1} tensors of the checkpoint (visual.*, model.visual.*, mtp.*) have no effect" in caplog.text
    assert runner.greedy(prompt[0].tolist(), 16, 8) == want.tolist()


def test_dummy_weights_have_the_shapes_of_a_checkpoints(model):
    config = read_model_config(model.path)
    found = WeightLoader(model.path, config, torch.bfloat16)
    for made, read in zip(DummyWeights(config, torch.bfloat16).layers(), found.layers(), strict=True):
        assert made["qkv"].shape == read["qkv"].shape
        assert made["o"].shape == read["o"].shape
        assert made.keys() == read.keys()
        for field in fields(read["recurrent"]) if "recurrent" in read else ():
            one, other = (getattr(each["recurrent"], field.name) for each in (made, read))
            if not isinstance(one, torch.Tensor):
                assert one == other
                continue
            assert one.shape == other.shape
            assert one.dtype == other.dtype == torch.float32
            assert one.isfinite().all()


def test_a_step_without_states_is_refused(model):
    runner = Runner(model.path)
    runner.states.step = lambda *_: None
    with pytest.raises(RuntimeError, match="has a recurrent mixer, and the step has no states for it"):
        runner.step((runner.sequence("a", [5, 6]), 2))


RECURRENT = ["in_proj", "out_proj"]
PARTED = [*(f"{name}@linear" for name in ATTENTION[:3]), *LINEAR[1:]]
SHARED = [f"shared_expert.{name}" for name in MLP]


@pytest.mark.parametrize(
    ("family", "targets", "found"),
    [
        ("qwen3.5", "all-linear", {(0, 1, 2, 3, 4): MLP, (0, 1, 3, 4): LINEAR, (2,): ATTENTION}),
        ("qwen3.5", r".*\.(q|v)_proj", {(2,): ["q_proj", "v_proj"]}),
        ("qwen3.5", ["in_proj_qkv", "q_proj"], {(0, 1, 3, 4): ["in_proj_qkv"], (2,): ["q_proj"]}),
        ("qwen3.5", r".*\.layers\.[01]\..*_proj.*", {(0, 1): LINEAR + MLP}),
        ("lfm2", "all-linear", {(0, 1, 2, 3, 4): MLP, (0, 1, 3, 4): RECURRENT, (2,): ATTENTION}),
        ("lfm2", ["out_proj", "w1"], {(0, 1, 2, 3, 4): ["gate_proj"], (0, 1, 3, 4): ["out_proj"], (2,): ["o_proj"]}),
        ("granite-4-h", "all-linear", {(0, 1, 2, 3, 4): MLP, (0, 1, 3, 4): RECURRENT, (2,): ATTENTION}),
        ("granite-4-h-moe", "all-linear", {(0, 1, 2, 3, 4): SHARED, (0, 1, 3, 4): RECURRENT, (2,): ATTENTION}),
        ("lfm2-moe", ["in_proj", "w2"], {(0,): ["down_proj"], (0, 2, 3): ["in_proj"]}),
        ("lfm3-plain", "all-linear", {(0,): [*ATTENTION[:3], "g_proj", "o_proj"], (0, 1): MLP, (1,): RECURRENT}),
        ("olmo-hybrid", "all-linear", {(0, 1, 2): PARTED, (0, 1, 2, 3): MLP, (3,): ATTENTION}),
        ("olmo-hybrid", ["q_proj", "g_proj"], {(0, 1, 2): ["q_proj@linear", "in_proj_z"], (3,): ["q_proj"]}),
    ],
    ids=str,
)
def test_what_peft_targets(tmp_path, family, targets, found):
    """A part for each set of layers that have the same targets."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    save_family(family, tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    it = get_peft_model(base, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    it.save_pretrained(tmp_path / "adapter")
    manifest = inspect_adapter(tmp_path / "adapter", read_model_config(tmp_path / "model").module_paths)
    assert {part.layers: list(part.targets) for part in manifest.parts} == found
