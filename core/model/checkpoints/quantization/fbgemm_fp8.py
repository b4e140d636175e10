"""FP8 checkpoints of FBGEMM, such as Meta's of Llama 3.1 405B: a scale per output channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config_json import ConfigJson
from .format import UniformFormat
from .fp8 import Fp8Scheme
from .read_fields import check_known, read_modules
from .rounded_inputs import Float8Inputs

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint


class FbgemmFp8(UniformFormat):
    """`quant_method: fbgemm_fp8`. Scales of activations have no upper bound, whatever `activation_scale_ub` says."""

    def __init__(self, fields: ConfigJson) -> None:
        check_known(fields, {"quant_method", "modules_to_not_convert"}, {"activation_scale_ub"})
        super().__init__(Fp8Scheme(inputs=Float8Inputs()), read_modules(fields, "modules_to_not_convert"))
        self.title = f"FBGEMM {self.title}"

    def left_out(self, checkpoint: Checkpoint, name: str) -> bool:
        return name.endswith(".input_scale_ub") or super().left_out(checkpoint, name)
