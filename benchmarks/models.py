"""The models that scrimp is measured on, each in a tiny size for the CPU and a real one for a GPU.

    from models import MODELS
    module, make_batch = MODELS["gpt2"](tiny=True, device="cpu")
    module(*make_batch()).backward()

The module takes a batch and returns the scalar loss. The same size gives the same weights on a device, and the same
seed the same batch on every device; on "meta" both are only described.
"""

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

from architectures import Equilibrium, Llama, Mamba, Recurrent, ResNet, UNet

Batch = tuple[Tensor, ...]
Made = tuple[nn.Module, Callable[[], Batch]]
Build = Callable[..., tuple[nn.Module, Callable[..., Batch]]]

MODELS: dict[str, Build] = {}
"""By name, what makes a model: called with ``tiny`` (a bool) and ``device``, returns the module and ``make_batch``."""


def model(name: str, real_dtype: torch.dtype) -> Callable[[Callable[[bool], Made]], Build]:
    """Register what makes a module and its batches in a size."""

    def register(make: Callable[[bool], Made]) -> Build:
        def build(*, tiny: bool, device: str | torch.device = "cpu") -> tuple[nn.Module, Callable[..., Batch]]:
            dtype = torch.float32 if tiny else real_dtype
            torch.manual_seed(0)
            with torch.device(device):
                module, batch = make(tiny)

            def make_batch(seed: int = 0) -> Batch:
                with torch.device("cpu"), torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(seed)
                    made = batch()
                return tuple(t.to(device, dtype if t.is_floating_point() else None) for t in made)

            return module.to(dtype).train(), make_batch

        MODELS[name] = build
        return build

    return register


class WithLoss(nn.Module):
    """A model of transformers that is called by position and returns its loss."""

    def __init__(self, inner: nn.Module, *names: str) -> None:
        super().__init__()
        self.inner = inner
        self.names = names

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the loss for the labels in the batch."""
        loss: Tensor = self.inner(**dict(zip(self.names, batch, strict=True))).loss
        return loss


def texts(vocabulary: int, batch: int, length: int) -> Callable[[], Batch]:
    """Tokens, and the same as labels: causal language models shift them."""

    def make() -> Batch:
        tokens = torch.randint(vocabulary, (batch, length))
        return tokens, tokens

    return make


def images(batch: int, side: int, classes: int) -> Callable[[], Batch]:
    """Pictures and their classes."""
    return lambda: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,)))


# -- from transformers --


@model("gpt2", torch.bfloat16)
def gpt2(tiny: bool) -> Made:
    width, heads, vocabulary, batch, length = (64, 4, 512, 4, 64) if tiny else (768, 12, 50257, 16, 1024)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=12, n_head=heads,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    inner = transformers.GPT2LMHeadModel(config)
    return WithLoss(inner, "input_ids", "labels"), texts(vocabulary, batch, length)


@model("bert_large", torch.bfloat16)
def bert_large(tiny: bool) -> Made:
    layers, width, heads, vocabulary, batch, length = (4, 64, 4, 512, 4, 64) if tiny else (24, 1024, 16, 30522, 16, 512)
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=length,
    )  # fmt: skip
    inner = transformers.BertForMaskedLM(config)
    return WithLoss(inner, "input_ids", "labels"), texts(vocabulary, batch, length)


@model("vit_l", torch.bfloat16)
def vit_l(tiny: bool) -> Made:
    layers, width, heads, patch, side, batch, classes = (
        (4, 64, 4, 8, 32, 4, 10) if tiny else (24, 1024, 16, 16, 224, 64, 1000)
    )
    config = transformers.ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
        image_size=side, patch_size=patch, num_labels=classes,
    )  # fmt: skip
    inner = transformers.ViTForImageClassification(config)
    return WithLoss(inner, "pixel_values", "labels"), images(batch, side, classes)


@model("t5", torch.bfloat16)
def t5(tiny: bool) -> Made:
    layers, width, heads, vocabulary, batch, lengths = (
        (3, 64, 4, 512, 4, (48, 24)) if tiny else (24, 1024, 16, 32128, 16, (512, 256))
    )
    config = transformers.T5Config(
        vocab_size=vocabulary, d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=layers, num_heads=heads,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    inner = transformers.T5ForConditionalGeneration(config)

    def make() -> Batch:
        source, target = (torch.randint(2, vocabulary, (batch, length)) for length in lengths)
        return source, target

    return WithLoss(inner, "input_ids", "labels"), make


@model("mixtral", torch.bfloat16)
def mixtral(tiny: bool) -> Made:
    layers, width, heads, vocabulary, batch, length = (2, 64, 4, 512, 4, 32) if tiny else (8, 1024, 16, 32000, 4, 2048)
    config = transformers.MixtralConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, num_local_experts=4 if tiny else 8,
        num_experts_per_tok=2, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    inner = transformers.MixtralForCausalLM(config)
    return WithLoss(inner, "input_ids", "labels"), texts(vocabulary, batch, length)


# -- by hand --


def next_tokens(vocabulary: int, batch: int, length: int) -> Callable[[], Batch]:
    """Tokens, and the next ones as targets."""

    def make() -> Batch:
        tokens = torch.randint(vocabulary, (batch, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


@model("llama", torch.bfloat16)
def llama(tiny: bool) -> Made:
    layers, width, heads, inner, vocabulary, batch, length = (
        (4, 64, 4, 176, 512, 4, 64) if tiny else (12, 2048, 16, 5632, 32000, 4, 4096)
    )
    return Llama(layers, width, heads, inner, vocabulary, length), next_tokens(vocabulary, batch, length)


@model("resnet50", torch.float32)
def resnet50(tiny: bool) -> Made:
    width, batch, side, classes = (8, 4, 64, 10) if tiny else (64, 128, 224, 1000)
    return ResNet((3, 4, 6, 3), width, classes), images(batch, side, classes)


@model("unet", torch.bfloat16)
def unet(tiny: bool) -> Made:
    depth, width, batch, side = (3, 8, 2, 32) if tiny else (4, 64, 16, 512)

    def make() -> Batch:
        return torch.randn(batch, 3, side, side), torch.randn(batch, 3, side, side)

    return UNet(depth, width), make


@model("mamba", torch.bfloat16)
def mamba(tiny: bool) -> Made:
    layers, width, heads, state, chunk, vocabulary, batch, length = (
        (3, 32, 4, 8, 16, 512, 2, 64) if tiny else (24, 1024, 32, 64, 128, 32000, 4, 4096)
    )
    return Mamba(layers, width, heads, state, chunk, vocabulary), next_tokens(vocabulary, batch, length)


@model("lstm", torch.float32)
def lstm(tiny: bool) -> Made:
    layers, width, vocabulary, batch, length = (2, 32, 256, 4, 32) if tiny else (4, 1024, 32000, 64, 256)
    return Recurrent(layers, width, vocabulary), next_tokens(vocabulary, batch, length)


@model("deq", torch.float32)
def deq(tiny: bool) -> Made:
    width, batch, side, classes = (64, 8, 32, 10) if tiny else (1024, 64, 256, 1000)
    return Equilibrium(width, classes), images(batch, side, classes)


def main() -> None:
    for name, build in MODELS.items():
        module, _ = build(tiny=False, device="meta")
        parameters = sum(parameter.numel() for parameter in module.parameters())
        print(f"{name:12} {parameters / 1e6:8.1f} M parameters")


if __name__ == "__main__":
    main()
