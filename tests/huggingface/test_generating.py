"""The example of the documentation: metrics of what a model generates."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import make_trainer

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def trainer_of_the_page() -> type[Trainer]:
    (code,) = re.findall(r"```python\n([^`]*class GeneratingTrainer[^`]*)```", PAGE.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(code, names)
    kind = names["GeneratingTrainer"]
    assert issubclass(kind, Trainer)
    return kind


def tiny_translator() -> Any:
    """With an encoder and a decoder, without dropout, from fixed weights."""
    import transformers

    torch.manual_seed(1)
    make_config: Any = transformers.T5Config
    config = make_config(
        vocab_size=8,
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    config.initializer_factor = 5.0  # so that rows end at different lengths
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.fact("Evaluating: an overridden prediction_step makes metrics of what is generated")
def test_predictions_are_what_each_row_alone_generates(tmp_path: Path) -> None:
    model = tiny_translator()
    rows = [
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.flip(0)}
        for tokens in torch.randint(2, 8, (7, 5), generator=torch.Generator().manual_seed(0))
    ]
    seen: list[Any] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"rows": len(prediction.predictions)}

    trainer = make_trainer(
        tmp_path,
        kind=trainer_of_the_page(),
        parts={"model": model, "eval_dataset": rows, "compute_metrics": compute_metrics},
        per_device_eval_batch_size=1,
    )
    metrics = trainer.evaluate()
    alone = [model.generate(input_ids=row["input_ids"][None], max_new_tokens=32)[0].tolist() for row in rows]
    assert len({len(tokens) for tokens in alone}) > 1
    for tokens, expected in zip(seen[0], alone, strict=True):
        np.testing.assert_array_equal(tokens[: len(expected)], expected)
        assert set(tokens[len(expected) :]) <= {-100}
    usual = make_trainer(tmp_path, parts={"model": model, "eval_dataset": rows}, per_device_eval_batch_size=1)
    assert metrics["eval_loss"] == usual.evaluate()["eval_loss"]
