"""Tiny models that translate, their rows, and a metric of what they generate."""

from typing import Any

import numpy as np
import torch

from tests.huggingface.texts import WORDS


def tiny_translator(kind: str = "T5") -> Any:
    """With an encoder and a decoder, without dropout, from fixed weights; its rows end at different lengths."""
    import transformers

    torch.manual_seed(1)
    make_config: Any = getattr(transformers, f"{kind}Config")
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1}
    if kind == "T5":
        config = make_config(
            **tokens, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
        )
        config.initializer_factor = 5.0
        return transformers.T5ForConditionalGeneration(config).eval()
    layers = {"layers": 1, "ffn_dim": 16, "attention_heads": 2}
    config = make_config(
        **tokens,
        **{f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in layers.items()},
        d_model=16,
        dropout=0.0,
        max_position_embeddings=32,
        init_std=1.0,
        bos_token_id=2,
        decoder_start_token_id=1 if kind == "Bart" else 0,
        forced_eos_token_id=None if kind == "Bart" else 1,
    )
    return getattr(transformers, {"Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel"}[kind])(
        config
    ).eval()


def sentences(size: int, *, ragged: bool = False) -> list[dict[str, torch.Tensor]]:
    """Rows of five words and their translation, which is as long or, if `ragged`, up to two words shorter."""
    words = torch.randint(2, len(WORDS), (size, 5), generator=torch.Generator().manual_seed(0))
    return [
        {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "labels": row.flip(0)[: len(row) - (index % 3 if ragged else 0)],
        }
        for index, row in enumerate(words)
    ]


def share_of_right_tokens(prediction: Any) -> dict[str, float]:
    """The share of labels that are generated in their place, and the mean length of what is generated."""
    tokens = np.where(prediction.predictions == -100, 0, prediction.predictions)[:, 1:]
    labels = prediction.label_ids
    counts = labels > 1
    placed = np.zeros_like(labels)
    width = min(labels.shape[1], tokens.shape[1])
    placed[:, :width] = tokens[:, :width]
    return {"right": float((placed == labels)[counts].mean()), "length": float((tokens > 1).sum(axis=1).mean())}
