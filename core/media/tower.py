"""A vision tower with its projector: transformers' own modules, loaded without the text part.

Tests: tests/core/media/test_served_images.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...memory.files.tokens.torchvision import mend_torchvision
from ..model.checkpoints.checkpoint import Checkpoint
from ..model.read_config import read_model_config
from ..model.specs.vision import VisionSpec
from ..model.weights.tensor_parts import sources
from .linear import TowerChanges, make_adaptable


class Tower:
    """Makes rows of an image, for one adapter at a time. Not safe to use from several threads at once."""

    def __init__(
        self,
        directory: Path,
        architecture: str,
        spec: VisionSpec,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Read the tower of a checkpoint. Raises ValueError if it lacks any of the tower's tensors."""
        self._spec, self._dtype, self._device = spec, dtype, torch.device(device)
        whole = _without_text(directory, architecture, spec, dtype)
        self._base: Any = whole.model.to(self._device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._adaptable = {}
        for name in spec.modules:
            inner = make_adaptable(getattr(self._base, name))
            self._adaptable |= {f"{name}.{path}" if path else name: each for path, each in inner.items()}
        self._matrices = {each.rpartition(".")[0]: each for each in spec.matrices}

    def encode(
        self,
        tensors: Mapping[str, torch.Tensor],
        changes: TowerChanges | None = None,
        marks: Sequence[int] = (),
    ) -> torch.Tensor:
        """The rows `[rows, parts · hidden]` of one image, in host memory: see `MediaRows`. tensors: of the image
        processor. changes: an adapter's. marks: see `Prepared`.

        On a GPU it runs on a stream of its own, beside steps.
        """
        given = {name: tensors[name] for name in self._spec.arguments if name in tensors}
        given = {name: value.to(self._dtype) if value.is_floating_point() else value for name, value in given.items()}
        beside = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), beside, self._changed(changes):
            found = self._base.get_image_features(**{name: value.to(self._device) for name, value in given.items()})
            return rows_of(found, self._spec, marks).cpu()

    @contextmanager
    def _changed(self, changes: TowerChanges | None) -> Iterator[None]:
        """Use an adapter."""
        if changes is None:
            yield
            return
        own = {f"{name}.{rest}": value for name in self._spec.modules for rest, value in _parameters(self._base, name)}
        matrices = {self._matrices[name]: each for name, each in changes.modules.items() if name in self._matrices}
        kept = {name: own[name].data for name in (*changes.copies, *matrices)}
        adapted = [name for name in changes.modules if name not in self._matrices]
        try:
            for name in adapted:
                self._adaptable[name].change = changes.modules[name].to(self._dtype, self._device)
            for name, value in changes.copies.items():
                own[name].data = value.to(self._device, self._dtype)
            for name, change in matrices.items():
                own[name].data = own[name].data + change.to(self._dtype, self._device).delta
            yield
        finally:
            for name in adapted:
                self._adaptable[name].change = None
            for name, value in kept.items():
                own[name].data = value


def rows_of(found: Any, spec: VisionSpec, marks: Sequence[int] = ()) -> torch.Tensor:
    """Rows `[rows, parts · hidden]` of what `get_image_features` returns: see `MediaRows`. marks: see `Prepared`."""
    if spec.marks:
        return _with_marks(_rows(found.pooler_output), found.visual_indicator_features, marks)
    if not spec.has_layers:
        parts = [found.pooler_output, *(found.deepstack_features if spec.additions else ())]
        return torch.cat([_rows(each) for each in parts], 1)
    by_layer = {layer: _rows(features) for layer, features in found.deepstack_features}
    first = by_layer.pop(0, None)
    added = [by_layer[layer] for layer in sorted(by_layer)]
    return torch.cat([torch.zeros_like(added[0]) if first is None else first, *added], 1)


def _with_marks(rows: torch.Tensor, of_marks: torch.Tensor, marks: Sequence[int]) -> torch.Tensor:
    """An image's rows, with those of marks between them. of_marks: a row for each mark."""
    kinds = torch.tensor(marks, dtype=torch.long, device=rows.device)
    is_row = kinds < 0
    if len(rows) != (places := int(is_row.sum())):
        raise RuntimeError(f"the tower gives {len(rows)} rows, the text has placeholders for {places}")
    found = of_marks[kinds.clamp(min=0)]
    found[is_row] = rows
    return found


def _rows(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Features of an image as `[rows, hidden]`: some towers give them by tile."""
    rows = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    return rows.reshape(-1, rows.shape[-1])  # pyright: ignore[reportAttributeAccessIssue]


def _parameters(base: Any, name: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return getattr(base, name).named_parameters()


def _without_text(directory: Path, architecture: str, spec: VisionSpec, dtype: torch.dtype) -> Any:
    """The model with a text part of no layers, all but the tower dropped. No other tensors are read."""
    mend_torchvision()
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    _leave_out_text(config)
    _leave_out_quantisation(config)
    kind = getattr(transformers, architecture)
    with _quiet(), _beside_text(directory) as tensors:
        whole, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # of what depends on the number of layers; the tower's are looked at below
        )
    begins = tuple(f"model.{name}." for name in (*spec.modules, *spec.parameters))
    lacking = sorted(name for name in info["missing_keys"] if f"{name}.".startswith(begins))
    lacking += sorted(str(each) for each in info["mismatched_keys"] if f"{each[0]}.".startswith(begins))
    if lacking:
        raise ValueError(f"{directory} has no {lacking[0]}, which its tower needs, nor {len(lacking) - 1} others")
    for name in [each for each, _ in whole.model.named_children() if each not in spec.modules]:
        setattr(whole.model, name, None)
    whole.lm_head = None
    return whole.eval().requires_grad_(False)


@contextmanager
def _beside_text(directory: Path) -> Iterator[dict[str, Any]]:
    """The tensors of a checkpoint that are not of its text part, by name; each is read where it is sliced."""
    checkpoint, model = Checkpoint(directory), read_model_config(directory)
    text, names = {source.name for source in sources(model, checkpoint).values()}, model.tensors.of(checkpoint)
    layers = tuple(f"{prefix}{names.layers}." for prefix in names.prefixes)  # which may be quantised
    others = (name for name in checkpoint.names() if name not in text and not name.startswith(layers))
    paths = {name: checkpoint[name].path for name in others}
    with ExitStack() as opened:
        files = {path: opened.enter_context(safe_open(path, "pt")) for path in dict.fromkeys(paths.values())}
        yield {name: files[path].get_slice(name) for name, path in paths.items()}


def _leave_out_text(config: Any) -> None:
    """Have a configuration's text part have no layers and one token, and the model no tower of sound."""
    text = config.get_text_config()
    text.num_hidden_layers = 0
    text.vocab_size, text.pad_token_id = 1, 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    if getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = 0
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None


def _leave_out_quantisation(config: Any) -> None:
    """Have a configuration describe plain weights, as those of the tower are."""
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            part.__dict__.pop(name, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a progress bar, and the reports of the text part's tensors, which are left out on purpose."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    logger, shows_progress = logging.getLogger("transformers"), is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shows_progress:
            enable_progress_bar()


def skeleton(directory: Path, architecture: str, spec: VisionSpec) -> torch.nn.Module:
    """The same without weights: names and shapes of the modules that adapters may change."""
    mend_torchvision()
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    _leave_out_text(config)
    with torch.device("meta"):
        whole = getattr(transformers, architecture)(config)
    for name in [each for each, _ in whole.model.named_children() if each not in spec.modules]:
        setattr(whole.model, name, None)
    return whole.model
