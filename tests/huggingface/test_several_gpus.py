"""A model in `DataParallel`: several GPUs in one process. Replicas give what the model gives by itself.

Here the replicas share a processor; `make gpu` runs the same with replicas that share a GPU.
"""

import collections
import contextlib
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DataParallel

from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.huggingface import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from tests.huggingface.runs import (
    AnyKeyword,
    NoisyRows,
    Regression,
    Rows,
    StopAt,
    Tokens,
    everything,
    make_arguments,
    make_trainer,
    without_speed,
)
from tests.huggingface.texts import tiny_classifier, tiny_llama
from tests.huggingface.translations import sentences, tiny_translator
from tests.support.replicas import CpuParallel, replicated
from tests.support.resuming import assert_same

pytestmark = pytest.mark.usefixtures("_process_without_a_trainer")
Pair = collections.namedtuple("Pair", "outputs nothing")


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    state = PartialState(cpu=request.param == "cpu")
    if request.param == "gpu":
        state.device = torch.device("cuda", 0)  # that one alone
    return request.param


class Wide(Rows):
    """Rows in float64, some of whose labels don't count."""

    def __init__(self, size: int, ignored: tuple[int, ...] = (1, 2, 7)) -> None:
        super().__init__(size)
        self.x, self.labels = self.x.double(), self.labels.double()
        self.labels[[index for index in ignored if index < size]] = -100


class Masked(Regression):
    """A mean over the labels that count, which is 0 / 0 without any, whatever it is told."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.linear(x)
        if labels is None:
            return {"logits": outputs}
        counts = (labels != -100).to(x.dtype)
        loss = ((outputs - labels) ** 2 * counts).sum() / counts.sum()
        return {"loss": loss, "logits": outputs, "extra": (outputs * 2, [Pair(outputs * 3, None)]), "none": None}


MODELS = {
    "mean of rows": (Regression, ()),
    "dict": (lambda: Regression(returns_dict=True), ()),
    "mean of labels": (Masked, (1, 2, 7)),
    "divided by the number of items": (Tokens, (1, 2, 7)),
    "takes the number and ignores it": (AnyKeyword, ()),
}


def trainer_of(folder: Path, model: nn.Module, device: str, *callbacks: Any, **arguments: Any) -> Trainer:
    parts = arguments.pop("parts", {})
    ignored = arguments.pop("ignored", ())
    rows = {"train_dataset": Wide(11, ignored), "eval_dataset": Wide(7, ignored)}
    return make_trainer(
        folder,
        *callbacks,
        kind=arguments.pop("kind", Trainer),
        parts={**rows, "model": model, **parts},
        **{
            "use_cpu": device == "cpu",
            "per_device_train_batch_size": 5,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_grad_norm": 1.0,
            "num_train_epochs": 3,
            **arguments,
        },
    )


def results(trainer: Trainer, rows: Any) -> dict[str, Any]:
    predicted = trainer.predict(rows)
    history = without_speed(trainer.state.log_history)
    return {
        "model": {name.removeprefix("module."): value.cpu() for name, value in trainer.model.state_dict().items()},
        "history": [{name: value for name, value in entry.items() if name != "total_flos"} for entry in history],
        "predicted": predicted.predictions,
        "labels": predicted.label_ids,
        "loss": (predicted.metrics or {})["test_loss"],
    }


# ----------------------------------------------------------------------------------------------------- one batch


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_gradients_and_outputs_are_those_of_the_whole_batch(
    kind: str, size: int, device: str, tmp_path: Path
) -> None:
    make, ignored = MODELS[kind]
    batch = next(iter(torch.utils.data.DataLoader(Wide(size, ignored), batch_size=size)))
    alone, inside = make().double(), make().double()
    trainer = trainer_of(tmp_path, replicated(inside, device), device)
    expected = alone(**batch)
    found = trainer.model(**{name: value.to(trainer.args.device) for name, value in batch.items()})
    losses = [each["loss"] if isinstance(each, dict) else each[0] for each in (expected, found)]
    for loss in losses:
        loss.backward()
    gradients = [[_on_cpu(each.grad) for each in model.parameters()] for model in (alone, inside)]
    assert_same(gradients[1], gradients[0], tolerance=1e-12)
    assert losses[1].shape == ()
    torch.testing.assert_close(_on_cpu(found), expected, rtol=1e-12, atol=1e-14)


def _on_cpu(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _on_cpu(value) for name, value in data.items()}
    if isinstance(data, (tuple, list)):
        parts = [_on_cpu(value) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return data.cpu() if isinstance(data, torch.Tensor) else data


def test_a_number_of_items_of_the_update_is_divided_among_the_replicas(device: str, tmp_path: Path) -> None:
    batch = next(iter(torch.utils.data.DataLoader(Wide(7), batch_size=7)))
    alone, inside = Tokens().double(), Tokens().double()
    trainer = trainer_of(tmp_path, replicated(inside, device), device)
    for items in (9, torch.tensor(9)):
        expected = alone(**batch, num_items_in_batch=items)[0]
        found = trainer.model(
            **{name: each.to(trainer.args.device) for name, each in batch.items()}, num_items_in_batch=items
        )
        torch.testing.assert_close(found[0].cpu(), expected, rtol=1e-7, atol=0)


def test_a_second_trainer_of_a_wrapped_model_counts_its_own_items(device: str, tmp_path: Path) -> None:
    class Counting(Trainer):
        def count_items(self, batch: Any) -> Any:
            return batch["x"][:, 0].sum()  # any number will do

    class Summing(Regression):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            return self.linear.weight.sum() * 0 + x[:, 1].sum(), x

    first = trainer_of(tmp_path, replicated(Summing(), device, 2), device)
    second = trainer_of(tmp_path, first.model, device, kind=Counting)
    x = torch.tensor([[1.0, 8.0], [3.0, 16.0]], device=first.args.device)
    assert first.model(x=x)[0].item() == 12
    assert second.model(x=x)[0].item() == 14
    assert second.model.module is first.model.module


class Odd(nn.Module):
    """Takes lists, texts, single numbers and arrays, and says what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: Any, boxes: Any = None, texts: Any = None, scale: Any = 1, table: Any = None) -> Any:
        self.calls.append({"x": len(x), "boxes": boxes and len(boxes), "texts": texts, "table": table})
        sums = [] if boxes is None else [each["at"].sum() for each in boxes]
        outputs = (x * self.weight * scale).sum(1)
        return {
            "outputs": outputs,
            "sums": torch.stack(sums) if sums else None,
            "rows": torch.tensor(len(x)),
            "text": "a",
        }


def test_entries_of_lists_follow_their_rows(device: str, tmp_path: Path) -> None:
    model = Odd()
    trainer = trainer_of(tmp_path, replicated(model, device), device)
    x = torch.arange(10.0).reshape(5, 2).to(trainer.args.device)
    boxes = [{"at": torch.arange(size).to(x.device)} for size in range(5)]
    outputs = trainer.model(x, boxes=boxes, texts=list("abcde"), scale=torch.tensor(2.0))
    assert sorted((call["x"], "".join(call["texts"])) for call in model.calls) == [(1, "e"), (2, "ab"), (2, "cd")]
    assert outputs["outputs"].tolist() == (x * 2).sum(1).tolist()
    assert outputs["sums"].tolist() == [0, 0, 1, 3, 6]
    assert (outputs["rows"].tolist(), outputs["text"]) == ([2, 2, 1], "a")


def test_a_batch_that_cannot_be_cut_by_rows_is_computed_as_a_whole(device: str, tmp_path: Path) -> None:
    model = Odd()
    trainer = trainer_of(tmp_path, replicated(model, device), device)
    x = torch.arange(10.0).reshape(5, 2).to(trainer.args.device)
    outputs = trainer.model(x, table=torch.ones(1, 2))
    assert [call["x"] for call in model.calls] == [5]
    assert outputs["outputs"].tolist() == x.sum(1).tolist()
    assert trainer.model(x=x[:0])["outputs"].tolist() == []


@pytest.mark.parametrize(
    "outputs",
    [
        lambda x: (x,) * len(x),
        lambda x: [x, None][len(x) % 2],
        lambda x: [None, x][len(x) % 2],
        lambda x: {"x": x, "rows": len(x)},
        lambda x: SimpleNamespace(x=x),
    ],
)
def test_replicas_whose_outputs_cannot_be_joined_are_refused(outputs: Any, tmp_path: Path) -> None:
    class Fickle(Regression):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            return outputs(x)

    trainer = trainer_of(tmp_path, CpuParallel(Fickle(), 2), "cpu")
    with pytest.raises(HookOutputError, match="cannot be joined.*torchrun"):
        trainer.model(torch.ones(3, 2))


# ------------------------------------------------------------------------------------------------------------ runs


def mean_of_two(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    errors = ((outputs[0] - labels) ** 2).sum()
    return errors / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in MODELS},
    "one batch per update": ("mean of labels", {"gradient_accumulation_steps": 1}),
    "more replicas than rows": ("mean of rows", {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 1}),
    "loss function": ("takes the number and ignores it", {"parts": {"compute_loss_func": mean_of_two}}),
    "metrics": ("dict", {"parts": {"compute_metrics": lambda each: {"mean": float(each.predictions.mean())}}}),
    "metrics batch by batch": (
        "dict",
        {
            "batch_eval_metrics": True,
            "parts": {"compute_metrics": lambda each, compute_result: {"last": float(each.predictions.sum())}},
        },
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_that_of_the_model_alone(run: str, device: str, tmp_path: Path) -> None:
    kind, arguments = RUNS[run]
    make, ignored = MODELS[kind]
    found = []
    for wraps in (True, False):
        inside = make().double()
        model = replicated(inside, device) if wraps else inside
        trainer = trainer_of(tmp_path / str(wraps), model, device, ignored=ignored, **arguments)
        trainer.train()
        assert trainer.evaluate()["eval_loss"] == trainer.state.log_history[-1]["eval_loss"]
        found.append(results(trainer, Wide(7, ignored)))
    assert found[0]["labels"].shape == (7, 1)
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["classifier", "language model", "smoothed labels", "checkpointed activations"])
def test_models_of_transformers_train_as_alone(kind: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arguments: dict[str, dict[str, Any]] = {
        "smoothed labels": {"label_smoothing_factor": 0.1},
        "checkpointed activations": {"gradient_checkpointing": True},
    }
    rows = Texts(11, is_language=kind != "classifier")
    found = []
    for wraps in (True, False):
        inside = (tiny_classifier() if kind == "classifier" else tiny_llama()).double()
        model = replicated(inside, device) if wraps else inside
        parts = {"train_dataset": rows, "eval_dataset": Texts(7, is_language=kind != "classifier")}
        trainer = trainer_of(tmp_path / str(wraps), model, device, parts=parts, optim="sgd", **arguments.get(kind, {}))
        trainer.train()
        found.append(results(trainer, rows))
    # The models compute their losses in float32.
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


class Texts(torch.utils.data.Dataset[Any]):
    """Rows of tokens with a class, or with labels that count in different numbers."""

    def __init__(self, size: int, *, is_language: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = []
        for index in range(size):
            ids = torch.randint(2, 13, (6,), generator=generator)
            label = torch.where(torch.arange(6) < index % 6, -100, ids) if is_language else index % 2
            mask = (torch.arange(6) < 4 + index % 3).long()
            self.rows.append({"input_ids": ids, "attention_mask": mask, "labels" if is_language else "label": label})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def test_where_parts_are_of_a_size_a_run_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Theirs(transformers.Trainer):  # type: ignore[name-defined, misc]
        def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            return CpuParallel(model, 2)

    histories, weights = [], []
    for library, make in ((transformers, Theirs), (None, Trainer)):
        quiet = make_arguments(tmp_path).to_dict()
        given = {name: quiet[name] for name in ("learning_rate", "num_train_epochs", "train_sampling_strategy")}
        given |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "eval_strategy": "epoch"}
        given |= {"gradient_accumulation_steps": 2, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
        kind = TrainingArguments if library is None else library.TrainingArguments
        args: Any = kind(str(tmp_path), disable_tqdm=True, report_to=[], **given)
        args._n_gpu = 2
        model: nn.Module = Regression()
        if library is None:
            model = CpuParallel(model, 2)
        with pytest.warns(UserWarning, match="torchrun") if library is None else contextlib.nullcontext():
            trainer = make(model=model, args=args, train_dataset=Rows(16), eval_dataset=Rows(8))
        trainer.callback_handler.callbacks.pop()
        trainer.train()
        assert trainer.args.train_batch_size == 4
        histories.append(without_speed(trainer.state.log_history[:-1]))
        weights.append([value.detach() for value in trainer.model.parameters()])
    assert len(histories[0]) == 6
    torch.testing.assert_close(histories[1], histories[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-7)


def test_a_wrapped_model_generates(device: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig(max_length=6, num_beams=2, pad_token_id=0, eos_token_id=1)
    config.decoder_start_token_id = 0
    found = []
    for wraps in (True, False):
        model = tiny_translator()
        args = Seq2SeqTrainingArguments(
            str(tmp_path),
            use_cpu=device == "cpu",
            predict_with_generate=True,
            generation_config=config,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Seq2SeqTrainer(replicated(model, device) if wraps else model, args, eval_dataset=sentences(9))
        predicted = trainer.predict(sentences(9))
        assert model.generation_config.num_beams == 2
        found.append((predicted.predictions.tolist(), (predicted.metrics or {})["test_loss"]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


# --------------------------------------------------------------------------------------------- what is kept of a run


def test_a_run_is_resumed_within_an_epoch_to_the_bit(device: str, tmp_path: Path) -> None:
    def run(folder: str, *callbacks: Any, resume: bool = False) -> Trainer:
        trainer = trainer_of(
            tmp_path / folder,
            replicated(Regression(), device),
            device,
            *callbacks,
            parts={"train_dataset": NoisyRows(11), "eval_dataset": Rows(5)},
            train_sampling_strategy="random",
            gradient_accumulation_steps=1,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole")
    run("stopped", StopAt(4))
    assert_same(everything(run("stopped", resume=True)), everything(whole))


def test_files_have_the_names_of_the_model_alone_and_fit_it(device: str, tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}

    def run(wraps: bool, folder: Path, resume: Any = None, **arguments: Any) -> Trainer:
        model: nn.Module = Regression()
        model = replicated(model, device) if wraps else model
        trainer = trainer_of(
            folder, model, device, parts={"train_dataset": Rows(11), "eval_dataset": Rows(5)}, **saves, **arguments
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    inside = run(True, tmp_path / "inside", max_steps=2)
    alone = run(False, tmp_path / "alone", max_steps=2)
    for folder in ("inside", "alone"):
        weights = load_file(tmp_path / folder / "checkpoint-2" / "model.safetensors")
        assert sorted(weights) == ["linear.bias", "linear.weight"]
    inside.save_model(str(tmp_path / "model"))
    Regression().load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    swapped = [
        run(wraps, tmp_path / str(wraps), resume=str(tmp_path / folder / "checkpoint-2"), max_steps=6)
        for wraps, folder in ((True, "alone"), (False, "inside"))
    ]
    torch.testing.assert_close(
        [each.cpu() for each in swapped[0].model.parameters()], [each.cpu() for each in swapped[1].model.parameters()]
    )
    assert alone.state.global_step == 2


def test_a_pretrained_model_is_saved_as_alone(device: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trainer = trainer_of(
        tmp_path,
        replicated(tiny_classifier(), device),
        device,
        parts={"train_dataset": Texts(6, is_language=False), "eval_dataset": Texts(5, is_language=False)},
        save_strategy="epoch",
    )
    trainer.train()
    trainer.save_model()
    trainer.model.module.save_pretrained(tmp_path / "by hand")  # as scripts do that wrap it themselves
    for folder in (tmp_path, tmp_path / "by hand", tmp_path / "checkpoint-3"):
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        assert_same(
            {name: value.cpu() for name, value in loaded.state_dict().items()},
            {name: value.cpu() for name, value in trainer.model.module.state_dict().items()},
        )


def test_buffers_are_those_of_the_first_replica(device: str, tmp_path: Path) -> None:
    class Normed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return super().forward(self.norm(x), labels)

    model = Normed()
    trainer = trainer_of(
        tmp_path,
        replicated(model, device),
        device,
        parts={"train_dataset": Rows(8), "eval_dataset": Rows(5)},
        max_steps=1,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=1,
        eval_strategy="no",
    )
    trainer.train()
    expected = nn.BatchNorm1d(2)
    expected(Rows(8).x[:2])  # two of the six rows
    assert_same({name: each.cpu() for name, each in model.norm.named_buffers()}, dict(expected.named_buffers()))


# ------------------------------------------------------------------------------------------- precision, compilation


class Telling(Regression):
    """Says in which type its layer has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.linear(x)
        self.types.append(outputs.dtype)
        return ((outputs - labels) ** 2).float().mean(), outputs


def test_replicas_compute_in_bfloat16(device: str, tmp_path: Path) -> None:
    model = Telling()
    parts = {"train_dataset": Rows(11), "eval_dataset": Rows(5)}
    trainer = trainer_of(tmp_path, replicated(model, device), device, parts=parts, bf16=True)
    trainer.train()
    trainer.evaluate()
    assert len(model.types) > 12
    assert set(model.types) == {torch.bfloat16}
    assert trainer.predict(Rows(5)).predictions.dtype == np.float32
    before = torch.get_autocast_dtype(device.replace("gpu", "cuda"))
    model(Rows(5).x.to(trainer.args.device), Rows(5).labels.to(trainer.args.device))
    assert model.types[-1] == torch.float32
    assert torch.get_autocast_dtype(device.replace("gpu", "cuda")) == before


@pytest.mark.gpu
def test_replicas_scale_losses_in_float16(tmp_path: Path) -> None:
    model = Telling()
    parts = {"train_dataset": Rows(11), "eval_dataset": Rows(5)}
    trainer = trainer_of(tmp_path, replicated(model, "gpu"), "gpu", parts=parts, fp16=True)
    trainer.train()
    assert set(model.types) == {torch.float16}
    assert all(np.isfinite(each["loss"]) for each in trainer.state.log_history if "loss" in each)


def test_compiled_replicas_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, CpuParallel(Regression()), "cpu", torch_compile=True)
    with pytest.raises(ConfigurationError, match="DataParallel, but its replicas would all call the one"):
        trainer.train()


def test_a_forward_of_the_wrapper_is_refused(tmp_path: Path) -> None:
    class Doubling(CpuParallel):
        def forward(self, *inputs: Any, **named: Any) -> Any:
            return {name: 2 * value for name, value in super().forward(*inputs, **named).items()}

    with pytest.raises(ConfigurationError, match="Doubling.forward would not be called.*Override those, or the"):
        trainer_of(tmp_path, Doubling(Regression()), "cpu").train()


# ---------------------------------------------------------------------------------------------- wrapped by the trainer


def test_a_process_with_several_gpus_wraps_the_model_and_advises_processes(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looking(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((type(model), isinstance(model, DataParallel), len(inputs["x"]), model.module is self.model))
            return super().compute_loss(model, inputs, *args, **kwargs)

    args: Any = make_arguments(tmp_path, per_device_eval_batch_size=2, save_strategy="epoch", eval_strategy="epoch")
    args._n_gpu = 3  # as scripts do; here none of them is there
    model = Regression()
    with pytest.warns(UserWarning, match="3 devices by DataParallel.*torchrun --nproc-per-node 3"):
        trainer = Looking(model, args, train_dataset=Rows(12), eval_dataset=Rows(7))
    trainer.callback_handler.callbacks.pop()
    assert trainer.model is trainer.model_wrapped is model
    trainer.train()
    assert trainer.state.global_step == 4
    assert [size for *_, size, _ in seen] == [6, 6, 6, 1] * 2
    assert {(wrapped, inner) for _, wrapped, _, inner in seen} == {(True, True)}
    assert trainer.state.train_batch_size == 6
    seen.clear()
    trainer.evaluate()
    assert len(trainer.predict(Rows(7)).predictions) == 7
    assert [each[1:] for each in seen] == [(True, 6, True), (True, 1, True)] * 2
    assert trainer.model is trainer.model_wrapped is model
    assert list(torch.nn.Module.state_dict(trainer.model)) == ["linear.weight", "linear.bias"]


def test_a_callback_may_leave_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    class Watched(Regression):
        modes: list[bool] = []

        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            self.modes.append(self.training)
            return super().forward(x, labels)

    class Evaluating(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.eval()

    args: Any = make_arguments(tmp_path)
    args._n_gpu = 2
    with pytest.warns(UserWarning, match="torchrun"):
        trainer = Trainer(Watched(), args, train_dataset=Rows(8), callbacks=[Evaluating()])
    trainer.callback_handler.callbacks.pop()
    trainer.train()
    assert Watched.modes == [True] * 4


def test_a_model_that_has_its_place_uses_one_device(tmp_path: Path) -> None:
    model = Regression()
    model.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    args: Any = make_arguments(tmp_path)
    args._n_gpu = 4
    trainer = Trainer(model, args, train_dataset=Rows(4))
    trainer.callback_handler.callbacks.pop()
    trainer.train()
    assert (args.n_gpu, args.train_batch_size, trainer.state.global_step) == (1, 2, 4)


@pytest.mark.gpu
def test_all_gpus_that_are_seen_train_as_one(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    assert TrainingArguments().n_gpu == count
    if count < 2:
        pytest.skip("needs two GPUs")
    found = []
    for few in (False, True):
        args: Any = make_arguments(tmp_path, use_cpu=False, per_device_train_batch_size=2, max_grad_norm=1.0)
        if few:
            args._n_gpu, args.per_device_train_batch_size = 1, 2 * count
        model = Masked().double()
        with contextlib.nullcontext() if few else pytest.warns(UserWarning, match="torchrun"):
            trainer = Trainer(model, args, train_dataset=Wide(4 * count + 3), eval_dataset=Wide(7))
        trainer.callback_handler.callbacks.pop()
        trainer.train()
        found.append([trainer.evaluate()["eval_loss"], [each.cpu() for each in model.parameters()]])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------ wrapped by the script


def test_what_scripts_do_with_a_model_that_they_wrapped(device: str, tmp_path: Path) -> None:
    model = replicated(Regression(), device)
    own: list[Any] = []

    class Script(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            own.append(isinstance(model, nn.DataParallel))
            outputs = model(**inputs)
            loss = outputs[0].mean()  # of one for each GPU
            return (loss, outputs) if return_outputs else loss

    trainer = trainer_of(
        tmp_path, model, device, kind=Script, parts={"train_dataset": Rows(11), "eval_dataset": Rows(5)}
    )
    trainer.train()
    assert own
    assert all(own)
    assert isinstance(trainer.model, nn.DataParallel)
    inner = trainer.model.module if hasattr(trainer.model, "module") else trainer.model
    assert inner is model.module
    assert trainer.get_num_trainable_parameters() == 3
    trainer.model = nn.DataParallel(model.module, model.device_ids) if device == "gpu" else CpuParallel(model.module)
    assert trainer.evaluate()["eval_loss"] > 0
    torch.save(trainer.model.module.state_dict(), tmp_path / "weights.pt")
    assert list(torch.load(tmp_path / "weights.pt")) == ["linear.weight", "linear.bias"]
    torch.save(trainer.model, tmp_path / "whole.pt")
    for whole in (torch.load(tmp_path / "whole.pt", weights_only=False), copy.deepcopy(trainer.model)):
        assert type(whole) is (CpuParallel if device == "cpu" else DataParallel)
        assert_same(whole.module.state_dict(), model.module.state_dict())


def test_a_wrapped_model_may_come_from_model_init(device: str, tmp_path: Path) -> None:
    rows = {"train_dataset": Rows(11), "eval_dataset": Rows(5)}
    made = {"model": None, "model_init": lambda: replicated(Regression(), device)}
    trainer = trainer_of(tmp_path, None, device, parts={**rows, **made})  # type: ignore[arg-type]
    trainer.train()
    first = [each.detach().clone() for each in trainer.model.parameters()]
    trainer.train()
    assert isinstance(trainer.model, DataParallel)
    assert_same([each.detach() for each in trainer.model.parameters()], first)
