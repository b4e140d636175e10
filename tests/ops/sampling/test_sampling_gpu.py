"""The kernels that draw tokens on a GPU against the torch path on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from chorus.ops.sampling.sampling import RowSamplingParams, sample_into

from .test_sampling import make_logits
from .test_sampling_triton import check, check_bans, check_broken_rows, check_company, check_narrow_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def some_row_params(rng: random.Random) -> RowSamplingParams:
    return RowSamplingParams(
        temperature=rng.choice([0.0, 1e-40, 0.3, 0.7, 1.0, 1.0, 2.0, 100.0]),
        u=rng.random(),
        top_k=rng.choice([0, 0, 0, 1, 5, 50, 700]),
        top_p=rng.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.95, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.05, 0.5]),
    )


@pytest.mark.parametrize(("vocab", "rows", "rounds"), [(600, 64, 2), (32_000, 32, 2), (128_256, 16, 4)])
def test_tokens_are_the_cpus(vocab, rows, rounds):
    """Flat and peaked rows, ties such as those of bf16, missing tokens, and all that a row may ask for."""
    rng = random.Random(vocab)
    for seed in range(rounds):
        parts = [
            make_logits(vocab, 10 * seed + index, spread, kind, rows // 4)
            for index, (spread, kind) in enumerate([(1.3, "plain"), (4.0, "plain"), (2.0, "ties"), (3.0, "holes")])
        ]
        logits = torch.cat(parts)
        logits[::2] = logits[::2].bfloat16().float()
        check(logits, [some_row_params(rng) for _ in range(rows)], "cuda")


def test_all_logits_equal():
    row_params = [
        RowSamplingParams(1.0, 0.7, top_p=0.5),
        RowSamplingParams(1.0, 0.3, top_k=1000),
        RowSamplingParams(1.0, 0.9),
        RowSamplingParams(0.0, 0.0),
    ]
    check(torch.zeros(4, 128_256), row_params, "cuda")


def test_broken_rows():
    check_broken_rows("cuda")


def test_rows_do_not_depend_on_company():
    check_company("cuda")
    check_bans("cuda")
    check_narrow_logits("cuda")


def test_nothing_is_waited_for():
    """While the device works, the host has made all its launches; the next launches can use the tokens."""
    logits = make_logits(128_256, 3, 2.0, "plain", 8).cuda()
    row_params = [RowSamplingParams(1.0, 0.1 * index, top_p=0.9 if index % 2 else 1.0) for index in range(8)]
    tokens = torch.zeros(2, 8, dtype=torch.long, device="cuda")
    sample_into(tokens, logits, range(8), row_params)  # compiles
    want = tokens.clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 29)  # noqa: SLF001
    begun = torch.cuda.Event()
    begun.record()
    sample_into(tokens.zero_(), logits, range(8), row_params)
    assert not begun.query(), "the host waited for what came before"
    assert torch.equal(tokens, want)
