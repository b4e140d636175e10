"""How vectors and scores are made: sentence-transformers' files, and fields of config.json."""

import json

import pytest

from chorus.core.model.config_json import UnsupportedModel
from chorus.core.model.pooling_config import PoolingConfig


@pytest.fixture
def write(tmp_path):
    """`write({file: content})`: a model directory with these JSON files."""

    def make(files):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return make


def modules(*kinds):
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    return [{"path": paths.get(kind, f"2_{kind}"), "type": f"sentence_transformers.models.{kind}"} for kind in kinds]


def test_without_files_the_last_token_is_normalised(tmp_path):
    config = PoolingConfig.read(tmp_path)
    assert (config.pooling, config.normalises, config.refusal, config.is_classifier) == ("last", True, None, False)


@pytest.mark.parametrize(
    ("fields", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "word_embedding_dimension": 8}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({}, "mean"),
    ],
)
def test_poolings_of_sentence_transformers(write, fields, pooling):
    files = {"modules.json": modules("Transformer", "Pooling", "Normalize"), "1_Pooling/config.json": fields}
    config = PoolingConfig.read(write(files))
    assert (config.pooling, config.normalises, config.refusal) == (pooling, True, None)


def test_vectors_keep_their_length_without_the_module_that_normalises(write):
    files = {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": {"pooling_mode": "cls"}}
    assert not PoolingConfig.read(write(files)).normalises


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules.json": modules("Transformer", "Dense")}, "modules.json has the module Dense"),
        (
            {"modules.json": modules("Pooling"), "1_Pooling/config.json": {"pooling_mode_max_tokens": True}},
            "1_Pooling/config.json asks for pooling_mode_max_tokens",
        ),
        (
            {"modules.json": modules("Pooling"), "1_Pooling/config.json": {"pooling_mode": ["cls", "mean"]}},
            "1_Pooling/config.json asks for cls, mean",
        ),
    ],
)
def test_vectors_of_another_kind_are_refused_by_name(write, files, words):
    assert words in (PoolingConfig.read(write(files)).refusal or "")


def test_fields_of_the_models_own_file(write):
    fields = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "hidden_size": 64,
        "id2label": {"0": "bad", "1": "good"},
        "problem_type": "single_label_classification",
        "matryoshka_dimensions": [16, 64],
    }
    config = PoolingConfig.read(write({"config.json": fields}))
    assert config.is_classifier and config.classifier_tokens is None and config.hidden_size == 64
    assert config.labels == {0: "bad", 1: "good"} and config.dimensions == (16, 64)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"classifier_from_token": ["false", "true"]}, ("false", "true")),
        ({"is_original_qwen3_reranker": True}, ("no", "yes")),
    ],
)
def test_a_reranker_that_answers_with_a_token_has_no_head(write, fields, tokens):
    fields = {"architectures": ["Qwen3ForSequenceClassification"], **fields}
    config = PoolingConfig.read(write({"config.json": fields}))
    assert config.classifier_tokens == tokens and not config.is_classifier


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules.json": "{"}, "modules.json: cannot be read"),
        ({"modules.json": {"a": 1}}, "modules.json: a list of objects is needed"),
        ({"modules.json": modules("Pooling")}, "1_Pooling/config.json: cannot be read"),
        ({"config.json": {"classifier_from_token": ["yes"]}}, "classifier_from_token is ['yes']"),
    ],
)
def test_broken_files_are_refused_with_their_names(write, files, words):
    with pytest.raises(UnsupportedModel) as refusal:
        PoolingConfig.read(write(files))
    assert words in str(refusal.value)
