"""Weights of a decoder layer.

Tests: tests/core/model/weights/test_weight_loader.py
"""

from __future__ import annotations

from typing import Any

#: One decoder layer's weights by slot; see `slots`. Each is a tensor, a matrix as it is kept (packed, narrow), or the
#: weights of a recurrent mixer or of a mixture of experts. A slot that the layer does not have is absent.
LayerWeights = dict[str, Any]
