"""Model families from transformers, tiny and with random weights, bit for bit against plain torch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import Module, ModuleList

import scrimp
from scrimp.policy import KeepNone
from scrimp.testing import Step, assert_same_outcome, assert_same_step

Inputs = Callable[[], dict[str, Tensor]]


def tokens(length: int = 12) -> Tensor:
    """A batch of two sequences."""
    return torch.randint(3, 32, (2, length))


def text() -> dict[str, Tensor]:
    """Inputs of encoders and decoders."""
    return {"input_ids": tokens()}


def two_texts() -> dict[str, Tensor]:
    """Inputs of encoder-decoders."""
    return {"input_ids": tokens(), "decoder_input_ids": tokens(9)}


def image(side: int) -> Inputs:
    """Inputs of vision models."""
    return lambda: {"pixel_values": torch.randn(2, 3, side, side)}


@dataclass(frozen=True, slots=True)
class Family:
    """A model class and a configuration small enough for a test."""

    model: str
    config: dict[str, Any]
    inputs: Inputs = field(default=text)

    def build(self, model_type: str) -> Module:
        """The model in training mode, with the weights that the seed gives."""
        config = transformers.AutoConfig.for_model(model_type, **self.config)
        return getattr(transformers, self.model)(config).train()


SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
DECODER = SMALL | {"max_position_embeddings": 64, "attention_dropout": 0.1}
GROUPED = DECODER | {"num_key_value_heads": 2}
ENCODER = SMALL | {"max_position_embeddings": 64}
SEQ2SEQ = {
    "vocab_size": 67,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": 67,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
PATCHES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 16,
    "patch_size": 4,
}
SPEECH = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}

FAMILIES = {
    # decoders
    "llama": Family("LlamaForCausalLM", GROUPED),
    "mistral": Family("MistralForCausalLM", GROUPED | {"sliding_window": 8}),
    "qwen3": Family("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "gemma2": Family("Gemma2ForCausalLM", GROUPED | {"head_dim": 8}),
    "phi": Family("PhiForCausalLM", DECODER | {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "gpt2": Family("GPT2LMHeadModel", {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": Family("GPTNeoXForCausalLM", DECODER | {"hidden_dropout": 0.1}),
    "opt": Family("OPTForCausalLM", DECODER | {"ffn_dim": 37, "word_embed_proj_dim": 32}),
    "bloom": Family("BloomForCausalLM", {"vocab_size": 67, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": Family("FalconForCausalLM", DECODER | {"hidden_dropout": 0.1}),
    # encoders
    "bert": Family("BertForMaskedLM", ENCODER),
    "albert": Family("AlbertForMaskedLM", ENCODER | {"embedding_size": 16, "hidden_dropout_prob": 0.1}),
    "electra": Family("ElectraForMaskedLM", ENCODER | {"embedding_size": 16}),
    "deberta-v2": Family(
        "DebertaV2ForMaskedLM", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    ),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        DECODER | {"mlp_dropout": 0.1} | dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 0),
    ),
    # encoder-decoders
    "t5": Family("T5ForConditionalGeneration", T5, two_texts),
    "bart": Family("BartForConditionalGeneration", SEQ2SEQ, two_texts),
    "pegasus": Family("PegasusForConditionalGeneration", SEQ2SEQ, two_texts),
    # mixtures of experts
    "mixtral": Family("MixtralForCausalLM", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", GROUPED | EXPERTS | {"head_dim": 8, "moe_intermediate_size": 16}),
    "olmoe": Family("OlmoeForCausalLM", GROUPED | EXPERTS),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        DECODER
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
    ),
    "switch_transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        T5
        | {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        | {"num_experts": 4, "router_jitter_noise": 0.01},
        two_texts,
    ),
    # state-space and recurrent models
    "mamba": Family("MambaForCausalLM", {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
        | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "rwkv": Family(
        "RwkvForCausalLM",
        {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}
        | {"intermediate_size": 37, "context_length": 64},
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        GROUPED
        | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
        | {"mamba_n_groups": 1, "mamba_chunk_size": 8},
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaForCausalLM",
        GROUPED | {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3},
    ),
    # vision
    "vit": Family("ViTForImageClassification", PATCHES | {"hidden_dropout_prob": 0.1}, image(16)),
    "swin": Family(
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4]}
        | {"window_size": 2, "drop_path_rate": 0.1},
        image(16),
    ),
    "convnext": Family(
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "drop_path_rate": 0.1},
        image(32),
    ),
    "resnet": Family(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]},
        image(32),
    ),
    "dinov2": Family("Dinov2ForImageClassification", PATCHES | {"drop_path_rate": 0.1}, image(16)),
    "clip": Family(
        "CLIPModel",
        {
            "text_config": DECODER,
            "vision_config": PATCHES | {"attention_dropout": 0.1},
            "projection_dim": 16,
        },
        lambda: text() | image(16)(),
    ),
    # audio
    "wav2vec2": Family("Wav2Vec2ForCTC", SPEECH, lambda: {"input_values": torch.randn(2, 400)}),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        SEQ2SEQ
        | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "dropout": 0.1}
        | {"decoder_start_token_id": 2},
        lambda: {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": tokens(9)},
    ),
    "audio-spectrogram-transformer": Family(
        "ASTForAudioClassification",
        SMALL | {"max_length": 32, "num_mel_bins": 16, "hidden_dropout_prob": 0.1},
        lambda: {"input_values": torch.randn(2, 32, 16)},
    ),
}

FAST = {"llama", "mamba", "resnet"}
every_family = pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)


@every_family
def test_everything_dropped(name: str) -> None:
    """The whole model in one session that keeps nothing."""
    session = scrimp.session(policy=KeepNone())
    assert_same_step(lambda: make_step(name), lambda: session)
    assert session.statistics.replayed_operators > 0


@every_family
def test_a_random_part_dropped(name: str, random_policy: Callable[..., Any]) -> None:
    """The whole model under random decisions, with backward inside of the session and outside."""
    for seed in range(2):
        assert_same_step(
            lambda: make_step(name),
            lambda seed=seed: scrimp.session(policy=random_policy(seed)),
            backward_inside=bool(seed),
        )


@every_family
def test_every_block_checkpointed(name: str) -> None:
    """Each block of each stack as a region of its own."""
    assert_same_outcome(lambda: make_step(name), lambda: make_step(name, checkpoint_blocks))


def make_step(name: str, prepare: Callable[[Module], None] = lambda model: None) -> Step:
    """A forward pass to the logits of a random batch."""
    family = FAMILIES[name]
    model = family.build(name)
    inputs = family.inputs()
    prepare(model)
    return Step(lambda: logits_of(model(**inputs)), state=model)


def logits_of(output: Any) -> Tensor:
    """What the family's loss would be computed from."""
    return output.logits_per_image if "logits_per_image" in output else output.logits


def checkpoint_blocks(model: Module) -> None:
    """Checkpoint the members of the outermost module lists, as training frameworks do."""
    for child in model.children():
        if isinstance(child, ModuleList):
            for block in child:
                block.forward = functools.partial(scrimp.checkpoint, block.forward)
        else:
            checkpoint_blocks(child)
