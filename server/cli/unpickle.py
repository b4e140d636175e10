"""The process that reads a pickle of tensors: `python -m chorus.server.cli.unpickle FILE SAFETENSORS`.

Its memory limit is proportional to the file's size, so a small file can't use up the machine's memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ...memory.host.child_python import limit_memory

BESIDE_BYTES = 512 << 20
"""Memory in addition to the tensors, which are held twice: as read, and as written."""

MAX_TENSORS = 1 << 16
"""Far more than adapters have: those on each expert of a mixture have up to 36,864."""


class UnpickleRefused(Exception):
    """The file does not hold an adapter's weights; the text gives the reason."""


def main(pickle: Path, weights: Path) -> None:
    """Write the tensors of a pickle as safetensors. Raises Refused."""
    import torch
    from safetensors.torch import save_file

    from ..machine_faults import fault_of

    size = pickle.stat().st_size
    limit_memory(BESIDE_BYTES + 3 * size)
    try:
        found = torch.load(pickle, map_location="cpu", weights_only=True)
    except MemoryError:
        raise UnpickleRefused(f"takes more memory than {3 * size} bytes, three times its size, to read") from None
    except Exception as error:  # the library may raise anything for a malicious file
        raise UnpickleRefused(f"is not read as weights only: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(found, dict) or len(found) > MAX_TENSORS:
        raise UnpickleRefused(f"does not hold a mapping of at most {MAX_TENSORS} tensors")
    tensors: dict[str, torch.Tensor] = {}
    left = size
    for name, value in found.items():
        if not isinstance(name, str) or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise UnpickleRefused(f"holds {type(value).__name__} under {name!r:.80}, not a tensor under its name")
        left -= value.numel() * value.element_size()
        if left < 0:
            raise UnpickleRefused("has tensors that are larger than the file, of the same bytes several times")
        tensors[name] = value.detach().contiguous().clone()
    try:
        save_file(tensors, weights, {"format": "pt"})
    except Exception as error:
        if (fault := fault_of(error, weights)) is None:
            raise
        raise UnpickleRefused(fault) from None


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except (UnpickleRefused, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
