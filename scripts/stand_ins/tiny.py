"""Tiny random models with a tokenizer, and data files, for scripts that take them from folders."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    *("the", "a", "cat", "dog", "bird", "fish", "sat", "ran", "flew", "swam"),
    *("far", "away", "once", "more", "home", "tree", "question:", "context:", "up", "down"),
]
_SIZES: dict[str, Any] = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0}
_ENDS = {"bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}


def make_model(kind: str, folder: Path) -> Path:
    """Write a model without dropout, from fixed weights, with its tokenizer or image processor; returns the folder."""
    import transformers

    torch.manual_seed(0)
    model = _MODELS[kind](transformers)
    model.save_pretrained(folder)
    if kind == "vit":
        size = {"height": 8, "width": 8}
        transformers.ViTImageProcessor(size=size).save_pretrained(folder)
    else:
        _tokenizer(transformers).save_pretrained(folder)
    return folder


def make_data(kind: str, rows: Mapping[str, int], folder: Path) -> list[str]:
    """Write a file, or a folder of images, for each split; returns the arguments that name them."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    arguments = []
    for split, count in rows.items():
        if kind == "images":
            if split != "test":
                arguments += [f"--{split}_dir", str(_write_images(folder / split, count))]
            continue
        path = folder / f"{split}.json"
        split_rows = [_ROWS[kind](draw, index) for index in range(count)]
        # The scripts for questions read the field "data", as in the files of SQuAD; the others read a row per line.
        lines = [{"data": split_rows}] if kind == "questions" else split_rows
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        if split != "test" or kind not in ("texts", "endings"):
            arguments += [f"--{split}_file", str(path)]
    return arguments


def _tokenizer(transformers: Any) -> Any:
    """Splits at spaces; "[CLS] a [SEP]" and "[CLS] a [SEP] b [SEP]"."""
    import tokenizers

    ids = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{name}_token": token for name, token in zip(names, SPECIAL, strict=True)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="[CLS]", eos_token="[SEP]", model_max_length=64, **special
    )


def _bert(transformers: Any) -> Any:
    config = transformers.BertConfig(
        **_SIZES,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )
    return transformers.BertForPreTraining(config)


def _gpt2(transformers: Any) -> Any:
    dropouts = {f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")}
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "bos_token_id": 2, "eos_token_id": 3}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=_SIZES["vocab_size"], initializer_range=0.3, **dropouts, **sizes)
    )


def _t5(transformers: Any) -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**_SIZES, **sizes, dropout_rate=0.0, eos_token_id=3, decoder_start_token_id=0)
    )


def _encoder_and_decoder(kind: str) -> Callable[[Any], Any]:
    def make(transformers: Any) -> Any:
        parts = ("encoder", "decoder")
        sizes = {f"{part}_{name}": size for part in parts for name, size in (("layers", 1), ("attention_heads", 2))}
        widths = {f"{part}_ffn_dim": 16 for part in parts}
        config = getattr(transformers, f"{kind}Config")(
            **{**_SIZES, **_ENDS, **sizes, **widths},
            d_model=16,
            dropout=0.0,
            max_position_embeddings=64,
            init_std=0.3,
            forced_eos_token_id=3,
        )
        names = {"Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel"}
        return getattr(transformers, names[kind])(config)

    return make


def _vit(transformers: Any) -> Any:
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


_MODELS: dict[str, Callable[[Any], Any]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "bart": _encoder_and_decoder("Bart"),
    "marian": _encoder_and_decoder("Marian"),
    "vit": _vit,
}


def _words(draw: random.Random, count: int) -> list[str]:
    return draw.choices(WORDS[:16], k=count)


def _text(draw: random.Random) -> str:
    return " ".join(_words(draw, draw.randint(3, 9)))


def _question(draw: random.Random, index: int) -> dict[str, Any]:
    words = _words(draw, 9)
    first = draw.randrange(7)
    answer = " ".join(words[first : first + 2])
    start = len(" ".join([*words[:first], ""])) if first else 0
    answers = {"text": [answer], "answer_start": [start]}
    return {"id": f"row{index}", "question": _text(draw), "context": " ".join(words), "answers": answers}


def _entities(draw: random.Random, index: int) -> dict[str, Any]:
    words = _words(draw, draw.randint(3, 9))
    return {
        "id": index,
        "tokens": words,
        "ner_tags": ["B-ANIMAL" if WORDS.index(word) in range(2, 6) else "O" for word in words],
    }


def _translation(draw: random.Random, index: int) -> dict[str, Any]:
    text = _text(draw)
    return {"translation": {"en": text, "xx": " ".join(reversed(text.split()))}}


def _summary(draw: random.Random, index: int) -> dict[str, Any]:
    text = _text(draw)
    return {"text": text, "summary": " ".join(text.split()[:2])}


_ROWS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "pairs": lambda draw, index: {"sentence1": _text(draw), "sentence2": _text(draw), "label": index % 3},
    "topics": lambda draw, index: {"sentence": _text(draw), "label": ["animal", "tree", "home"][index % 3]},
    "entities": _entities,
    "texts": lambda draw, index: {"text": _text(draw)},
    "endings": lambda draw, index: {
        **{name: _text(draw) for name in ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3")},
        "label": index % 4,
    },
    "questions": _question,
    "translations": _translation,
    "summaries": _summary,
}


def _write_images(folder: Path, count: int) -> Path:
    from PIL import Image

    draw = np.random.default_rng(0)
    for index in range(count):
        path = folder / ("cats" if index % 2 else "dogs") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(path)
    return folder
