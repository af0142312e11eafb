"""Tiny models and a tokenizer of transformers, for texts that we make."""

from typing import Any

import torch

WORDS = ["[PAD]", "[UNK]", "the", "a", "cat", "dog", "sat", "ran", "far", "away", "once", "more", "home"]


def tiny_tokenizer() -> Any:
    """Splits at spaces."""
    import tokenizers
    import transformers

    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def tiny_llama() -> Any:
    """A language model whose class says that its loss is about the next token."""
    import transformers

    torch.manual_seed(0)
    make_config: Any = transformers.LlamaConfig
    config = make_config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def tiny_classifier() -> Any:
    """Of two classes, without dropout, from fixed weights."""
    import transformers

    torch.manual_seed(0)
    make_config: Any = transformers.DistilBertConfig
    config = make_config(
        vocab_size=len(WORDS), dim=8, hidden_dim=16, n_layers=1, n_heads=2, max_position_embeddings=16, num_labels=2
    )
    config.initializer_range = 0.5
    config.dropout = config.attention_dropout = config.seq_classif_dropout = 0.0
    return transformers.DistilBertForSequenceClassification(config)


def tiny_language_model() -> Any:
    """With tied weights, without dropout, from fixed weights."""
    import transformers

    torch.manual_seed(0)
    make_config: Any = transformers.GPT2Config
    config = make_config(
        n_layer=1,
        n_head=2,
        n_embd=8,
        vocab_size=len(WORDS),
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )
    return transformers.GPT2LMHeadModel(config)
