"""Fields that transformers writes are known."""

from __future__ import annotations

import json

import pytest
import transformers

from chorus.core.model.checkpoints.quantization.registry import read_format
from chorus.core.model.config_json import ConfigJson

from .integer_forms import compressed

CONFIGS = {
    "awq": lambda: transformers.AwqConfig(),
    "bitsandbytes 4 bits": lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes 8 bits": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True),
    "fp8": lambda: transformers.FineGrainedFP8Config(),
    "fbgemm": lambda: transformers.FbgemmFp8Config(),
    "mxfp4": lambda: transformers.Mxfp4Config(),
    "gptq": lambda: transformers.GPTQConfig(bits=4, desc_act=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_read(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"quantization_config": CONFIGS[name]().to_dict()}))
    found = read_format(ConfigJson.read(path))
    assert found is not None and found.title.lower().startswith(name.split()[0])


def test_a_method_that_is_not_known_is_refused_by_name(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ValueError, match="quant_method is 'hqq': not supported; supported: awq, bitsandbytes"):
        read_format(ConfigJson.read(path))


def test_the_older_name_of_the_description_is_read(tmp_path):
    path = tmp_path / "config.json"
    how = compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64})
    path.write_text(json.dumps({"compression_config": how}))
    found = read_format(ConfigJson.read(path))
    assert found is not None and found.title == "compressed-tensors pack-quantized, 4 bits, groups of 64"
