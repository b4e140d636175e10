"""The race of two backends of decode attention, over the layers of families whose mixers have further ops."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from chorus.core.executors import cpu_setup
from chorus.core.executors.cuda_attention_choice import choose_decode_attention
from chorus.ops.attention.attention_backend import paged_kind

from ..test_families import executor_of
from ..tiny_families import save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: Layers with an indexer of blocks, of which no request has more than are chosen; differences of heads; experts of
#: queries; another mixer in the layer; narrow values; keys of earlier layers; relative states.
FAMILIES = ["minimax-m3", "diffllama", "jetmoe", "falcon-h1", "zamba-2", "mimo-v2-flash", "gemma-4-inputs", "inkling"]


@pytest.fixture(autouse=True)
def computes_in_bfloat16(monkeypatch):
    """Decoders compute as on a GPU, also where this machine's processor is slow in bfloat16."""
    monkeypatch.setattr(cpu_setup, "has_fast_gemms", lambda name: True)


def decoder_of(path, family):
    """A decoder whose pages are full of some keys and values."""
    save_family(family, path)
    executor = executor_of(path, dtype="bfloat16", cpu_kernels="torch", max_model_len=10)
    executor.arena.pages.normal_(generator=torch.Generator().manual_seed(0))
    return executor.decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_faster_backend_with_the_same_values_is_chosen(tmp_path, caplog, family):
    decoder = decoder_of(tmp_path, family)
    first, other = decoder.new_attention(), decoder.new_attention()
    device = SimpleNamespace(torch_device=torch.device("cpu"), failure=lambda: None)
    planned = []

    def plan(bucket, attention):
        planned.append(attention)
        attention.plan([0, 1, 2], torch.ones(bucket, 8, dtype=torch.long), [3, 5])

    with caplog.at_level(logging.INFO):
        chosen = choose_decode_attention(
            {2: first}, {2: other}, ("usual", "rival"), decoder, device, plan=plan,
            seconds=lambda _: 1e-3 if planned[-1] is first else 5e-4,
        )  # fmt: skip
    assert chosen == {2: other}, caplog.text


def test_a_backend_with_other_values_is_told(tmp_path, caplog):
    decoder = decoder_of(tmp_path, "minimax-m3")
    first, other = decoder.new_attention(), decoder.new_attention()
    device = SimpleNamespace(torch_device=torch.device("cpu"), failure=lambda: None)
    for group in range(len(decoder.heads)):
        own, attend = other.of(group), paged_kind(None, blocks=False)._attend  # noqa: SLF001 - a wrong one
        own._attend = lambda *it, own=own, attend=attend: (attend(own, *it), it[2].mul_(2))  # noqa: SLF001

    def plan(bucket, attention):
        attention.plan([0, 1, 2], torch.ones(bucket, 8, dtype=torch.long), [3, 5])

    chosen = choose_decode_attention(
        {2: first}, {2: other}, ("usual", "rival"), decoder, device, plan=plan, seconds=lambda _: 1e-3
    )
    assert chosen == {2: first}
    assert "attention of 2 rows is not by rival: it differs by" in caplog.text
