"""A trained model as a file that others load, computing what `predict` does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ConfigurationError, DataError, PytorchAcceleratedError

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3


def trained() -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.ReLU(), nn.Linear(8, 3))
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=(), seed=1)
    trainer.train((INPUTS, LABELS), 2, (INPUTS, LABELS))
    return trainer


def facts_of(path: Path) -> Any:
    if path.suffix == ".onnx":
        import onnxruntime

        return json.loads(onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["pytorch_accelerated"])
    if path.suffix == ".pt2":
        files = {"pytorch_accelerated.json": ""}
        torch.export.load(path, extra_files=files)
        return json.loads(files["pytorch_accelerated.json"])
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["pytorch_accelerated"])


def outputs_of(path: Path, **inputs: torch.Tensor) -> torch.Tensor:
    """What the file computes, with nothing of ours."""
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        names = [each.name for each in session.get_inputs()]
        values = [each.numpy() for each in inputs.values()]
        return torch.from_numpy(session.run(None, dict(zip(names, values, strict=True)))[0])
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return module(**inputs) if len(inputs) > 1 else module(*inputs.values())
    from safetensors.torch import load_model

    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.ReLU(), nn.Linear(8, 3)).eval()
    load_model(model, path)
    return model(*inputs.values())


@pytest.mark.parametrize("ending", [".onnx", ".pt2", ".safetensors"])
def test_an_exported_model_computes_what_predict_does_for_any_number_of_rows(ending: str, tmp_path: Path) -> None:
    if ending == ".onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    trainer = trained()
    path = trainer.export(tmp_path / "models" / f"model{ending}", (INPUTS, LABELS))
    for rows in (1, 5, 24):
        torch.testing.assert_close(
            outputs_of(path, inputs=INPUTS[:rows]), trainer.predict(INPUTS[:rows]), rtol=1e-4, atol=1e-6
        )
    facts = facts_of(path)
    assert facts["epoch"] == 2
    assert facts["updates"] == trainer.run_history.updates_done
    assert facts["metrics"]["eval_loss_epoch"] == trainer.run_history.get_latest_metric("eval_loss_epoch")
    assert facts["seed"] == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
def test_a_model_of_named_inputs_takes_texts_of_any_length(ending: str, tmp_path: Path) -> None:
    if ending == ".onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 2)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            mask = attention_mask.unsqueeze(-1).float()
            return {"logits": self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))}

    torch.manual_seed(0)
    model = Text()
    trainer = Trainer(model, None, torch.optim.AdamW(model.parameters()), callbacks=())
    data = {"input_ids": torch.arange(48).reshape(8, 6), "attention_mask": torch.ones(8, 6, dtype=torch.int64)}
    path = trainer.export(tmp_path / f"text{ending}", data)
    longer = {"input_ids": torch.arange(33).reshape(3, 11), "attention_mask": torch.ones(3, 11, dtype=torch.int64)}
    found: Any = outputs_of(path, **longer)
    logits = found["logits"] if isinstance(found, dict) else found
    torch.testing.assert_close(logits, trainer.predict(longer)["logits"], rtol=1e-4, atol=1e-6)


def test_what_cannot_be_exported_says_why_and_leaves_the_earlier_file(tmp_path: Path) -> None:
    trainer = trained()
    path = tmp_path / "model.pt2"
    path.write_text("earlier")
    with pytest.raises(ConfigurationError, match=r"must end in \.onnx, \.pt2, \.safetensors"):
        trainer.export(tmp_path / "model.pkl", (INPUTS, LABELS))
    with pytest.raises(DataError, match="at least two rows"):
        trainer.export(path, (INPUTS[:1], LABELS[:1]))

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(inputs) + self.calls

    changing = Counting()
    odd = Trainer(changing, nn.CrossEntropyLoss(), torch.optim.AdamW(changing.parameters()), callbacks=())
    with pytest.raises(PytorchAcceleratedError, match="computes something else than"):
        odd.export(path, (INPUTS, LABELS))

    class Around(Trainer):
        def calculate_predict_batch_outputs(self, batch: Any) -> Any:
            return self.model[0](batch[0])

    around = Around(trainer.model, nn.CrossEntropyLoss(), trainer.optimizer, callbacks=())
    with pytest.raises(ConfigurationError, match="did not call the model itself"):
        around.export(path, (INPUTS, LABELS))
    assert path.read_text() == "earlier"
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0].mean(1))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.randn(16, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.embed(tokens) + self.positions[: tokens.shape[1]]).mean(1)


@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
@pytest.mark.parametrize("kind", [Recurrent, Positions])
@pytest.mark.filterwarnings("ignore:The tensor attributes self.recurrent._flat_weights")  # of torch, about its own GRU
def test_the_sizes_that_a_file_takes_are_printed_and_in_its_facts(
    kind: type[nn.Module], ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if ending == ".onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    trainer = Trainer(kind(), None, None, callbacks=())
    path = trainer.export(tmp_path / f"model{ending}", torch.arange(63).reshape(9, 7) % 20)
    length = "7" if kind is Recurrent else "any up to 16"
    assert f"{path} takes tokens (any, {length}) int64." in capsys.readouterr().out
    assert facts_of(path)["inputs"] == [f"tokens (any, {length}) int64"]
    trainer.export(tmp_path / "model.safetensors", torch.arange(63).reshape(9, 7) % 20)
    assert "takes" not in capsys.readouterr().out


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) if inputs.sum() > 0 else -self.inner(inputs)


@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
def test_a_model_that_cannot_be_written_or_run_says_what_to_do(ending: str, tmp_path: Path) -> None:
    if ending == ".onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    path = tmp_path / f"model{ending}"
    with pytest.raises(PytorchAcceleratedError, match=r"decides by values of a tensor.*torch\.where.*\.safetensors"):
        Trainer(Branching(), None, None, callbacks=()).export(path, INPUTS)
    half = Trainer(nn.Linear(4, 3).bfloat16(), None, None, callbacks=())
    if ending == ".onnx":
        with pytest.raises(PytorchAcceleratedError, match=r"bfloat16.*`\.float\(\)`.*\.pt2"):
            half.export(path, INPUTS.bfloat16())
        assert list(tmp_path.iterdir()) == []
    else:
        half.export(path, INPUTS.bfloat16())
        torch.testing.assert_close(outputs_of(path, inputs=INPUTS.bfloat16()), half.predict(INPUTS.bfloat16()))


class Softmax(Trainer):
    def calculate_predict_batch_outputs(self, batch: Any) -> Any:
        return super().calculate_predict_batch_outputs(batch).softmax(1)


class Twice(Trainer):
    def calculate_predict_batch_outputs(self, batch: Any) -> Any:
        return (super().calculate_predict_batch_outputs(batch) + super().calculate_predict_batch_outputs(batch)) / 2


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", [Trainer, Softmax, Twice])
def test_the_file_has_the_model_also_of_a_run_in_bfloat16_and_says_what_it_has_not(
    kind: type[Trainer], precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    trainer = kind(model, nn.CrossEntropyLoss(), None, callbacks=(), mixed_precision=precision)
    path = trainer.export(tmp_path / "model.pt2", (INPUTS, LABELS))
    with torch.no_grad():
        torch.testing.assert_close(outputs_of(path, inputs=INPUTS), model(INPUTS))
    lines = {Softmax: "makes something else of its outputs.", Twice: "calls it 2 times."}
    printed = capsys.readouterr().out
    assert ("has the model alone" in printed) == (kind in lines)
    assert f"the model alone: `predict` {lines.get(kind, '')}" in printed or kind is Trainer
