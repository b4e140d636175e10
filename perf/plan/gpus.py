"""GPUs by name, with what their makers publish of them."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PlanError

_PCIE_5, _PCIE_4 = 64e9, 32e9  # 16 lanes, one way


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures: bytes of memory, its bytes per second, dense bf16 FLOP/s, bytes per second from the host.

    note: what a reader of a prediction has to know of this one.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    source: str
    note: str = ""


GPUS = {
    "h100": Gpu("NVIDIA H100 SXM 80 GB", 80e9, 3.35e12, 989.4e12, _PCIE_5, "NVIDIA H100 datasheet"),
    "h200": Gpu("NVIDIA H200 SXM 141 GB", 141e9, 4.8e12, 989.4e12, _PCIE_5, "NVIDIA H200 datasheet"),
    "a100": Gpu("NVIDIA A100 SXM 80 GB", 80e9, 2.039e12, 312e12, _PCIE_4, "NVIDIA A100 datasheet"),
    "l40s": Gpu("NVIDIA L40S 48 GB", 48e9, 864e9, 362e12, _PCIE_4, "NVIDIA L40S datasheet"),
    "l4": Gpu("NVIDIA L4 24 GB", 24e9, 300e9, 121e12, _PCIE_4, "NVIDIA L4 datasheet, half of its rate with sparsity"),
    "b200": Gpu("NVIDIA B200 180 GB", 180e9, 8e12, 2250e12, _PCIE_5, "NVIDIA DGX B200 datasheet, an eighth of it"),
    "mi300x": Gpu(
        "AMD MI300X 192 GB", 192e9, 5.3e12, 1307.4e12, _PCIE_5, "AMD MI300X datasheet",
        "Chorus has no kernels for AMD GPUs: this is what they would take at the efficiency measured on an H100",
    ),
}  # fmt: skip


def gpu_named(name: str) -> Gpu:
    """Raises PlanError, with the names that there are."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        known = ", ".join(GPUS)
        raise PlanError(
            f"--gpu is {name!r}; use one of {known}, or profile:FILE with a profile that `chorus profile` measured"
        ) from None
