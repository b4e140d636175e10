"""An adapter on its way from its host image into its pages, layer by layer, where both are the same memory: a CPU."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..host.image import HostImage
from ..host.layer_stream import LayerStream
from ..pages.adapter_layout import AdapterLayout

if TYPE_CHECKING:
    import numpy as np
    import torch


class StreamedCopy:
    """Copies layers as soon as they are read, on the reading thread; `arrived` says how many are in the pages."""

    def __init__(self, image: HostImage, layout: AdapterLayout, pages: list[int], arena: np.ndarray) -> None:
        """pages: of `arena`, `[num_pages, page_elems]`, bits of its elements, in the order of the image's."""
        self.arrived = LayerStream()
        self._image: HostImage | None = image  # until there is nothing more to copy
        self._layout = layout
        self._pages = pages
        self._arena = arena
        self._lock = threading.Lock()
        self._copied = 0
        image.follow(self.advance)
        try:
            self.advance()
        except BaseException:
            self.cancel()
            raise

    @property
    def address(self) -> int:
        """Address of the number of layers that have arrived, an int32."""
        return self.arrived.address

    def advance(self) -> None:
        """Copy the layers that have been read; from any thread."""
        with self._lock:
            image = self._image
            if image is None:
                return
            ready, data = image.stream.num_ready, image.data
            if ready == LayerStream.FAILED or (ready > self._copied and data is None):  # it fails this very moment
                self.arrived.fail()
                self._let_go()
                return
            if ready > self._copied:
                bits = bits_of(data).reshape(-1)
                for begin, end in self._layout.ranges(range(self._copied, ready)):
                    self._copy(bits, begin, end)
                self._copied = ready
                self.arrived.publish(ready)
            if self.is_done():
                self._let_go()

    def wait_layer(self, layer: int, timeout: float) -> bool:
        """Sleep until `layer` is in its pages, at most `timeout` seconds; whether it is."""
        return self.arrived.wait(layer, timeout)

    def is_done(self) -> bool:
        """True if every layer is in its pages."""
        return self.arrived.num_ready == self._layout.num_layers

    def has_failed(self) -> bool:
        return self.arrived.num_ready == LayerStream.FAILED

    def cancel(self) -> None:
        """Stop; nothing is written to the pages once this has returned."""
        with self._lock:
            self._let_go()

    def is_quiet(self) -> bool:
        """True if the pages may be given to others after `cancel`."""
        return True

    def _let_go(self) -> None:
        """Neither refers to the other any more; the caller holds the lock."""
        if self._image is not None:
            self._image.unfollow(self.advance)
            self._image = None

    def _copy(self, data: np.ndarray, begin: int, end: int) -> None:
        page_elems = self._arena.shape[1]
        while begin < end:
            index, at = divmod(begin, page_elems)
            count = min(end - begin, page_elems - at)
            self._arena[self._pages[index], at : at + count] = data[begin : begin + count]
            begin += count


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as integers: a copy of torch's may be shared among threads that the step needs."""
    import torch

    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()
