"""A server of ranks that wait for each other for two seconds: `python -m tests.server.ranks_server KIND FLAGS…`.

KIND is `cpu`, or `gloo`: ranks as on GPUs, but with kernels that are interpreted, and torch.distributed's gloo.
"""

from __future__ import annotations

import sys

from chorus.core.executors import choice, cuda_ranks, ranks
from chorus.core.executors.cuda_rank_memory import RankDevices
from chorus.server.cli import command

PATIENCE_SECONDS = 2.0


def main(kind: str, *flags: str) -> None:
    if kind == "gloo":
        from ..core.executors import test_cuda_ranks_interpreted as interpreted

        of_cpu = RankDevices(interpreted.late_device, interpreted.no_driver, interpreted.gloo_collectives)
        cuda_ranks.RankDevices = lambda: of_cpu
        cuda_ranks.check_gpus = lambda config: None
        choice.uses_gpu = lambda device: True
        choice.gpu_bytes = lambda device: 0
        cuda_ranks.CudaRanksExecutor.__init__.__defaults__ = (None, PATIENCE_SECONDS)
    ranks.RanksExecutor.__init__.__defaults__ = (PATIENCE_SECONDS,)
    sys.exit(command.main(["serve", *flags]))


if __name__ == "__main__":
    main(*sys.argv[1:])
