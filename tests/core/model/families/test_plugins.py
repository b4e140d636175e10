"""A family of another distribution: the example's, which is served as its README says."""

from __future__ import annotations

import json
import tomllib
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chorus.core.model.families.plugins import GROUP, plugin, plugins
from chorus.core.model.families.registry import FAMILIES
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.server.cli import command as cli

from ...merging.test_merged import merge
from ...paths.asked import answers, check_variety, told
from ...tiny_families import ADAPTERS, Tiny

EXAMPLE = Path(__file__).parents[4] / "examples" / "family"
ARCHITECTURE = "TanhLlamaForCausalLM"
PROJECT = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
GATE_RANK, GATES = 6, ("gates_down", "gates_up")
ENTRIES = PROJECT["project"]["entry-points"][GROUP]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs distributions with these entry points, as pip leaves them."""

    def installed(entries: dict[str, str], name: str = "chorus-tanh") -> None:
        about = tmp_path / "site" / f"{name.replace('-', '_')}-0.1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        lines = (f"{key} = {value}\n" for key, value in entries.items())
        (about / "entry_points.txt").write_text(f"[{GROUP}]\n{''.join(lines)}")
        monkeypatch.syspath_prepend(tmp_path / "site")

    monkeypatch.syspath_prepend(EXAMPLE)
    return installed


class Tanh(torch.nn.Module):
    """The paper's formula, and gates of such a rank."""

    def __init__(self, hidden: int, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        if rank:
            self.gates_down = torch.nn.Linear(hidden, rank, bias=False)
            self.gates_up = torch.nn.Linear(rank, hidden, bias=False)
        self.alpha = torch.nn.Parameter(torch.rand(1) + 0.5)
        self.weight = torch.nn.Parameter(torch.rand(hidden) + 0.5)
        self.bias = torch.nn.Parameter(torch.randn(hidden) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.weight * torch.tanh(self.alpha * x) + self.bias
        return n * torch.sigmoid(self.gates_up(self.gates_down(n))) if self.rank else n


def transformers_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=160, num_key_value_heads=2, initializer_range=0.2, **sizes)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = Tanh(64, GATE_RANK), Tanh(64)
    model.model.norm = Tanh(64)
    return model.eval()


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of it, and adapters that PEFT made."""
    from peft import LoraConfig, get_peft_model

    root, model = tmp_path / "saved", transformers_model()
    (root / "model").mkdir(parents=True)
    config = {**model.config.to_dict(), "architectures": [ARCHITECTURE], "dtype": "float32", "gate_rank": GATE_RANK}
    (root / "model" / "config.json").write_text(json.dumps(config))
    save_file(
        {name: each.contiguous() for name, each in model.state_dict().items()}, root / "model" / "model.safetensors"
    )
    modules = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    for seed, (name, (rank, alpha, targets)) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        here = sorted(modules & {*targets, *GATES})
        lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=here, init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(deepcopy(model), lora).save_pretrained(root / name)
    return Tiny(root / "model", {name: root / name for name in ADAPTERS}, load)


def load(path: Path, adapters: dict[str, Path]):
    from peft import PeftModel

    del path
    model = transformers_model()
    for name, each in adapters.items():
        if isinstance(model, PeftModel):
            model.load_adapter(each, adapter_name=name)
        else:
            model = PeftModel.from_pretrained(model, each, adapter_name=name)
    return model.eval()


@pytest.mark.parametrize("kernels", ["torch"])
def test_the_example_gives_the_tokens_of_transformers_and_peft(install, saved, drive):
    install(ENTRIES)
    check_variety(saved)
    driver = drive(saved, block_tokens=4, max_num_batched_tokens=16, max_num_seqs=8)
    want = answers(saved, driver, 8, seed=1)
    assert told(driver, want) == want


@pytest.mark.parametrize("kernels", ["torch"])
def test_adapters_on_products_of_its_own_are_merged(install, saved, drive):
    install(ENTRIES)
    driver = drive(saved, block_tokens=4, max_num_batched_tokens=16, max_num_seqs=8)
    want = answers(saved, driver, 4, seed=2)
    for name in saved.adapters:
        assert {*GATES} <= {*driver.engine.store.get(name).manifest.targets}
        merge(driver, name)
        assert told(driver, want) == want


def test_its_layers_are_shown(install, saved, capsys):
    install(ENTRIES)
    assert cli.main(["models", str(saved.model), "--program"]) == 0
    out = capsys.readouterr().out
    assert "n = attention_norm_weight · tanh(attention_norm_alpha · x) + attention_norm_bias" in out
    assert "tanh(last_alpha · x)" in out
    assert "l ← gemm[tanh_gates_down] n" in out and "64 → 6: gates_down" in out
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        *["Llama", "with", "a", "dynamic", "tanh", ARCHITECTURE],
        *["on", "CPUs", "by", "PyTorch's", "operators"],
    ]


def test_without_it_the_architecture_is_refused(saved):
    with pytest.raises(UnsupportedModel, match=f"architecture {ARCHITECTURE} is not supported; supported: "):
        read_model_config(saved.model)


def test_a_classifier_is_of_its_family(install, saved):
    install(ENTRIES)
    fields = json.loads((saved.model / "config.json").read_text())
    path = saved.model / "config.json"
    path.write_text(json.dumps({**fields, "architectures": ["TanhLlamaForSequenceClassification"]}))
    assert read_model_config(saved.model).is_classifier


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (
            {"MineForCausalLM": "chorus_none:X"},
            r"MineForCausalLM = chorus_none:X of mine 0.1.0 can't be loaded: .*chorus_none",
        ),
        (
            {"MineForCausalLM": "json:dumps"},
            r"MineForCausalLM = json:dumps of mine 0.1.0 is function: a Family is needed",
        ),
        (
            {"MineForCausalLM": ENTRIES[ARCHITECTURE]},
            f"has the architectures {ARCHITECTURE}, and MineForCausalLM is not",
        ),
    ],
)
def test_a_broken_family_is_refused_by_the_name_of_its_distribution(install, entries, why, capsys):
    install(entries, "mine")
    with pytest.raises(UnsupportedModel, match=why):
        plugin("MineForCausalLM")
    assert cli.main(["models"]) == 0
    assert "is not used: the entry point MineForCausalLM" in capsys.readouterr().out


def test_two_of_one_architecture_are_refused(install):
    install(ENTRIES)
    install(ENTRIES, "another")
    with pytest.raises(
        UnsupportedModel, match=r"of (chorus-tanh|another) .* and .* both provide TanhLlama.*uninstall one"
    ):
        plugin(ARCHITECTURE)


def test_chorus_own_families_take_precedence(install, tmp_path):
    install({"LlamaForCausalLM": ENTRIES[ARCHITECTURE]})
    assert dict(plugins(FAMILIES)) == {
        "LlamaForCausalLM": "is not used: Chorus has a family of its own for this architecture"
    }
