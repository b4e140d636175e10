"""Architectures that are refused, each with the reason that the error names: transformers' own that no family serves.

Tests: tests/core/model/specs/test_auto_classes.py
"""

from __future__ import annotations

from collections.abc import Mapping

_REASONS: dict[str, tuple[str, ...]] = {
    "its layers attend to the output of an encoder, and models with an encoder are not served": (
        "BartForCausalLM",
        "BigBirdPegasusForCausalLM",
        "BlenderbotForCausalLM",
        "BlenderbotSmallForCausalLM",
        "Florence2ForConditionalGeneration",
        "MarianForCausalLM",
        "MBartForCausalLM",
        "MvpForCausalLM",
        "PegasusForCausalLM",
        "Pix2StructForConditionalGeneration",
        "PLBartForCausalLM",
        "PPFormulaNetForConditionalGeneration",
        "T5Gemma2ForConditionalGeneration",
        "TrOCRForCausalLM",
        "UdopForConditionalGeneration",
        "VisionEncoderDecoderModel",
        "WhisperForCausalLM",
    ),
    "it predicts several tokens by streams of its decoder, whose layers attend to the output of an encoder": (
        "ProphetNetForCausalLM",
    ),
    "its decoder reads and writes codes of sound, several in a step": (
        "MoshiForCausalLM",
        "MusicgenForCausalLM",
        "MusicgenMelodyForCausalLM",
    ),
    "its embeddings, layers and head are those of an encoder like BERT, which are not computed": (
        "BertLMHeadModel",
        "BertGenerationDecoder",
        "BigBirdForCausalLM",
        "BlipForConditionalGeneration",
        "CamembertForCausalLM",
        "Data2VecTextForCausalLM",
        "ElectraForCausalLM",
        "ErnieForCausalLM",
        "GitForCausalLM",
        "MegatronBertForCausalLM",
        "RemBertForCausalLM",
        "RobertaForCausalLM",
        "RobertaPreLayerNormForCausalLM",
        "RoCBertForCausalLM",
        "RoFormerForCausalLM",
        "XLMRobertaForCausalLM",
        "XLMRobertaXLForCausalLM",
        "XmodForCausalLM",
    ),
    "norms behind additions, with embeddings of languages before them, are not computed": ("XLMWithLMHeadModel",),
    "a norm within its feed-forward parts, and its sinusoids of positions, are not computed": (
        "Kosmos2ForConditionalGeneration",
        "Kosmos2_5ForConditionalGeneration",
    ),
    "its recurrence is not computed": ("RwkvForCausalLM", "xLSTMForCausalLM"),
    "lightning attention is not computed": ("MiniMaxForCausalLM",),
    "keys that are compressed over windows, and experts that a table of tokens chooses, are not computed": (
        "DeepseekV4ForCausalLM",
    ),
    "weighted means of the sums of earlier layers, and sinks by query, are not computed": (
        "Inkling2ForCausalLM",
        "Inkling2ForConditionalGeneration",
        "Inkling2LoopForCausalLM",
        "Inkling2LoopForConditionalGeneration",
    ),
    "gates of attention with a bias of each head are not computed": ("BeamForCausalLM",),
    "masks of attention that depend on values are not computed": ("DogeForCausalLM",),
    "hidden states on a sphere, in layers that run several times, are not computed": ("DoryForCausalLM",),
    "layers that run several times are not computed": ("HrmTextForCausalLM",),
    "biases of scores by learned distances are not computed": ("CpmAntForCausalLM",),
    "its sinusoids of positions are not computed": ("CTRLLMHeadModel",),
    "patches of bytes are not computed": ("BltForCausalLM",),
    "attention by hashes is not computed": ("ReformerModelWithLMHead",),
    "attention over permutations is not computed": ("XLNetLMHeadModel",),
    "a head of two layers is not computed": ("ModernBertDecoderForCausalLM",),
    "a window that spares an image's tokens is not computed": ("UnlimitedOcrForConditionalGeneration",),
    "LayerNorms of heads with weights and biases of their own are not computed": ("ChameleonForConditionalGeneration",),
    "each of its prompts has an image, and its tower is not served": (
        "Blip2ForConditionalGeneration",
        "InstructBlipForConditionalGeneration",
        "InstructBlipVideoForConditionalGeneration",
        "IdeficsForVisionText2Text",
    ),
    "each of its prompts has a protein, which is not encoded": ("EvollaForProteinText2Text",),
    "it gives actions of a robot, not tokens": ("PI0ForConditionalGeneration",),
    "it drafts for another model, whose keys and values it reads": (
        "Gemma4AssistantForCausalLM",
        "Gemma4UnifiedAssistantForCausalLM",
    ),
    "it makes blocks of tokens by diffusion": ("DiffusionGemmaForBlockDiffusion",),
    "each of its prompts has sound, which is not encoded": ("MossTranscribeDiarizeForConditionalGeneration",),
    "adapters on its embeddings gave other tokens than PEFT's": ("DeepseekOcr2ForConditionalGeneration",),
}

UNSERVED: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}
"""An architecture → why it is refused."""
