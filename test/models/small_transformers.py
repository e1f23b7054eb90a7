"""transformers' architectures, small and with random weights: tensors in, tensors out.

Each function returns a module in evaluation mode and a function that makes its inputs from a seed.
`attention` is transformers' attn_implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[int], tuple[Tensor, ...]]
WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 64, 4, 2, 200, 12


class First(nn.Module):
    """Calls the model with keyword arguments and returns its first output."""

    def __init__(self, model: nn.Module, *names: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.fixed = model, names, fixed

    def forward(self, *args: Tensor) -> Any:
        named = dict(zip(self.names, args, strict=True))
        return self.model(**named, **self.fixed, return_dict=False)[0]


def tokens(seed: int) -> tuple[Tensor, ...]:
    """Two sentences, the second one padded at its end."""
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, LENGTH // 2 :] = 0
    return ids, mask


def pictures(*shape: int) -> Inputs:
    return lambda seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)),)


def bert(attention: str) -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        attn_implementation=attention,
    )
    return First(BertModel(config), "input_ids", "attention_mask"), tokens


def gpt2(attention: str) -> tuple[nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=64,
        attn_implementation=attention,
    )
    return First(GPT2Model(config), "input_ids", "attention_mask", use_cache=False), tokens


def t5_encoder(attention: str) -> tuple[nn.Module, Inputs]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        attn_implementation=attention,
    )
    return First(T5EncoderModel(config), "input_ids", "attention_mask"), tokens


def vit(attention: str) -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        image_size=32,
        patch_size=8,
        attn_implementation=attention,
    )
    return First(ViTModel(config, add_pooling_layer=False), "pixel_values"), pictures(2, 3, 32, 32)


def whisper_encoder(attention: str) -> tuple[nn.Module, Inputs]:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=WIDTH,
        encoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        num_mel_bins=20,
        max_source_positions=15,
        attn_implementation=attention,
    )
    return First(WhisperEncoder(config), "input_features"), pictures(2, 20, 30)


def llama(attention: str) -> tuple[nn.Module, Inputs]:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    return First(LlamaModel(config), "input_ids", "attention_mask", use_cache=False), tokens


ARCHITECTURES = {f.__name__: f for f in (bert, gpt2, t5_encoder, vit, whisper_encoder, llama)}
