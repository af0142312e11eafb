"""A tiny language model that reads Python's own help texts byte by byte.

Rows are paragraphs of different lengths. With ``gradient_accumulation_steps``, every byte of an update has the same
weight, no matter how the paragraphs are distributed over batches and processes: the loss receives
``num_items_in_batch``, the number of bytes in the whole update.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from pytorch_accelerated.huggingface import Trainer, TrainingArguments, set_seed

PADDING = 0  # a byte that occurs in no text
LONGEST = 128


def load_paragraphs(size):
    """Paragraphs as rows of bytes; every tenth one is held out."""
    paragraphs = [part.strip() for name in sorted(topics) for part in topics[name].split("\n\n")]
    rows = [{"input_ids": list(part.encode()[:LONGEST])} for part in paragraphs if len(part) > 20][:size]
    held_out = rows[::10]
    del rows[::10]
    return rows, held_out


def collate(rows):
    """A padded batch of paragraphs. Padding has the label -100, which the loss ignores."""
    tokens = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=PADDING)
    is_text = tokens != PADDING
    return {"input_ids": tokens, "attention_mask": is_text.long(), "labels": tokens.masked_fill(~is_text, -100)}


def make_model():
    """A model with random weights. With `from_pretrained` you would use a trained model and its tokenizer instead of
    bytes.
    """
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LONGEST,
            pad_token_id=PADDING,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def main(num_epochs, size, batch_size):
    set_seed(42)
    train_set, eval_set = load_paragraphs(size)
    arguments = TrainingArguments(
        "outputs/tiny_language_model",
        num_train_epochs=num_epochs,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        weight_decay=0.1,
        logging_steps=10,
        eval_strategy="epoch",
        eval_on_start=True,
        save_strategy="no",
    )
    trainer = Trainer(make_model(), arguments, data_collator=collate, train_dataset=train_set, eval_dataset=eval_set)
    trainer.train()

    if trainer.is_world_process_zero():
        size = trainer.get_num_trainable_parameters()
        print(f"{len(train_set)} paragraphs, {len(eval_set)} held out; {size:,} parameters")
        print(f"{'epoch':>6}{'step':>6}{'loss':>8}{'perplexity':>12}")
        for entry in trainer.state.log_history:
            if "eval_loss" in entry:
                loss = entry["eval_loss"]
                print(f"{entry['epoch']:6g}{entry['step']:6}{loss:8.4f}{math.exp(loss):12.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=800, help="paragraphs, of which a tenth is held out")
    parser.add_argument("--batch-size", type=int, default=8, help="paragraphs per batch; an update has two batches")
    main(**vars(parser.parse_args()))
