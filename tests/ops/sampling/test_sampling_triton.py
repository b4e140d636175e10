"""The kernels that draw tokens, without a GPU: in Triton's interpreter against the torch path, and an offline compile;
a process for each.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chorus.ops.sampling.sampling import RowSamplingParams, TorchSampling, ban, sampling_rows, uniform

from ...processes import run_python
from .test_sampling import make_logits, may_be_drawn, reference

pytestmark = pytest.mark.triton

VOCABS = [1, 2, 7, 33, 600, 9001]

shapes = st.tuples(
    st.sampled_from(VOCABS),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.1, 1.0, 5.0, 1000.0]),
    st.sampled_from(["plain", "ties", "holes", "one"]),
)
limits = st.builds(
    RowSamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 1e-40, 1e-3, 0.3, 1.0, 1.0, 2.0, 100.0]),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2**-53])),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 50, 700, 1 << 40]),
    top_p=st.sampled_from([1.0, 1.0, 1e-12, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
)


def draw(logits: torch.Tensor, rows: list[int], row_params: list[RowSamplingParams]) -> torch.Tensor:
    """Tokens `[2, rows]` that the kernels write; -7 in rows that nothing is drawn in."""
    from chorus.ops.sampling import sampling_triton

    tokens = torch.full((2, len(logits)), -7, dtype=torch.long, device=logits.device)
    draws, num_limited = sampling_rows(rows, row_params, logits.shape[1])
    sampling_triton.sample(tokens, logits, torch.from_numpy(draws).to(logits.device), num_limited)
    return tokens.cpu()


def check(logits: torch.Tensor, row_params: list[RowSamplingParams], device: str) -> None:
    """Every row's token is the CPU's. Sums in another order may differ in their last bits, which can move a token next
    to a border. There the token must have the number in its share.
    """
    tokens = draw(logits.to(device), list(range(len(row_params))), row_params)
    want = TorchSampling().sample(logits, range(len(row_params)), row_params)
    for row, token, other, one in zip(logits, tokens[0].tolist(), want, row_params, strict=True):
        if token != other:
            assert one.temperature, (token, other, one)
            assert may_be_drawn(token, reference(row.numpy(), one), one.u), (token, other, one)
    assert torch.equal(tokens[1], tokens[0].clamp(min=0))


def check_broken_rows(device: str) -> None:
    """A row with NaN or +inf, or of nothing but -inf, gets -1, and the others the same token as without it."""
    logits = make_logits(5000, 1, 1.0, "plain", 7)
    ways = [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}]
    rows = [5, 1, 2, 3, 6]
    for way in ways:
        row_params = [RowSamplingParams(**{"temperature": 1.0, "u": uniform(4, row), **way}) for row in rows]
        sick = logits.clone()
        sick[1, 4097], sick[3, 77], sick[2] = torch.nan, torch.inf, -torch.inf
        tokens = draw(sick.to(device), rows, row_params)
        want = TorchSampling().sample(logits, [5, 6], [row_params[0], row_params[4]])
        assert tokens[0].tolist() == [-7, -1, -1, -1, -7, *want]
        assert tokens[1].tolist() == [-7, 0, 0, 0, -7, *want]


def check_company(device: str) -> None:
    """The same tokens alone, and at another place among others."""
    logits = make_logits(9001, 5, 3.0, "ties", 6)
    ways = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01, "top_p": 0.8}, {"temperature": 50.0, "top_p": 0.99}]
    row_params = [
        RowSamplingParams(**{"temperature": 1.0, "u": uniform(3, i), **ways[i % len(ways)]}) for i in range(6)
    ]
    values = logits.to(device)
    together = draw(values, list(range(6)), row_params)[0].tolist()
    assert together == [int(draw(values, [i], [row_params[i]])[0, i]) for i in range(6)]
    assert together == TorchSampling().sample(logits, range(6), row_params)


def check_bans(device: str) -> None:
    """Banned logits are -inf, whichever rows have masks, and all others as they were."""
    from chorus.ops.sampling import sampling_triton

    for vocab in VOCABS:
        logits = make_logits(vocab, 2, 1.0, "plain", 4)
        masks = np.random.default_rng(vocab).integers(-(2**31), 2**31, (2, 2 + vocab // 32), np.int32)
        masks[:, 0] = 3, 1
        want, found = logits.clone(), logits.to(device)
        ban(want, masks)
        sampling_triton.ban(found, torch.from_numpy(masks).to(device))
        assert torch.equal(found.cpu(), want)
        assert torch.equal(want[[0, 2]], logits[[0, 2]]) and (vocab < 33 or want[1].isinf().any())


def check_narrow_logits(device: str) -> None:
    """Logits in bf16 and fp16 give the tokens of their copy in float32."""
    ways = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.01, "top_p": 0.8}, {"temperature": 0.0}]
    row_params = [RowSamplingParams(**{"temperature": 1.0, "u": uniform(8, i), **way}) for i, way in enumerate(ways)]
    for dtype, kind in ((torch.bfloat16, "plain"), (torch.bfloat16, "holes"), (torch.float16, "ties")):
        logits = make_logits(9001, 3, 3.0, kind, len(ways)).to(dtype).to(device)
        got, want = (draw(each, list(range(len(ways))), row_params) for each in (logits, logits.float()))
        assert torch.equal(got, want)


def interpret() -> None:
    """Run in a process of its own."""

    @settings(max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(shape=shapes, row_params=st.lists(limits, min_size=1, max_size=3))
    @example(
        (9001, 1, 0.0, "plain"),
        [RowSamplingParams(1.0, 0.7, top_p=0.5), RowSamplingParams(1.0, 0.3, top_k=50, top_p=0.5)],
    )
    @example(
        (600, 3, 1.0, "ties"),
        [RowSamplingParams(1.0, 0.999, top_k=5), RowSamplingParams(0.5, 0.99, top_p=0.9, min_p=0.05)],
    )
    @example(
        (9001, 4, 1.0, "plain"),
        [RowSamplingParams(1.0, 0.6, top_k=8000, top_p=0.99), RowSamplingParams(1.0, 0.2, top_k=9001)],
    )
    @example((9001, 5, 0.1, "ties"), [RowSamplingParams(1.0, 0.6, top_p=0.5), RowSamplingParams(1.0, 0.2, top_k=9000)])
    def equals_the_torch_path(shape: tuple[int, int, float, str], row_params: list[RowSamplingParams]) -> None:
        check(make_logits(*shape, len(row_params)), row_params, "cpu")

    equals_the_torch_path()
    check_zeros_of_both_signs()
    check_broken_rows("cpu")
    check_company("cpu")
    check_bans("cpu")
    check_narrow_logits("cpu")


def check_zeros_of_both_signs() -> None:
    """They are equal, so that the first is kept."""
    logits = torch.tensor([[-1.0, 0.0, -0.0, -2.0], [-1.0, -0.0, 0.0, -2.0]])
    check(logits, [RowSamplingParams(1.0, 0.9, top_k=1)] * 2, "cpu")


@pytest.mark.slow
def test_tokens_equal_the_torch_path():
    result = run_python("-m", "tests.ops.sampling.test_sampling_triton", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_compiles_for_a_gpu_that_is_not_there():
    only = "find_peaks|weigh_blocks|pick_tokens"
    result = run_python("-m", "chorus.perf.kernels", "--compile", "sm_90", "--only", only, "--workers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(result.stdout.splitlines()[-1])["compile"]
    assert {line["group"] for line in lines} == {"peaks", "weights", "tokens"}
    assert not any(line["spill_bytes"] for line in lines)
    assert all(line["wide_loads"] for line in lines)


if __name__ == "__main__":
    interpret()
