"""Batch sizes that decode steps are captured for."""

from __future__ import annotations

from bisect import bisect_left


class DecodeBuckets:
    """1, 2, 4, 8, 16, 24, … ending exactly at `max_num_seqs`."""

    def __init__(self, max_num_seqs: int) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}; at least 1 is needed")
        ladder = [1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs]
        self.sizes = tuple(sorted({size for size in ladder if size <= max_num_seqs}))

    def pick(self, num_rows: int) -> int:
        """The smallest bucket that holds `num_rows` rows. ValueError above the largest."""
        index = bisect_left(self.sizes, num_rows)
        if num_rows < 1 or index == len(self.sizes):
            raise ValueError(f"no bucket holds {num_rows} rows; buckets end at {self.sizes[-1]}")
        return self.sizes[index]
