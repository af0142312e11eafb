"""Training: losses, gradients, schedules and steps, against what is computed by hand."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, DataError
from pytorch_accelerated.huggingface import Trainer, TrainerCallback, TrainOutput, set_seed
from tests.huggingface.runs import Regression, Rows, StopAt, Stream, Tokens, losses, make_arguments, make_trainer


def bare_loop(batches: list[list[int]], *, lr: float = 0.1, steps: int | None = None) -> tuple[nn.Module, list[float]]:
    """SGD by hand on groups of rows, one update each, with a linear schedule and clipping at 1."""
    model, rows = Regression(), Rows(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    total = len(batches) if steps is None else steps
    seen = []
    for step, group in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (total - step) / total
        loss, _ = model(rows.x[group], rows.labels[group])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return model, seen


def groups(size: int, epochs: int = 1, rows: int = 10) -> list[list[int]]:
    return [list(range(start, min(start + size, rows))) for _ in range(epochs) for start in range(0, rows, size)]


@pytest.mark.fact("Training: Accumulating k batches of n gives the same gradients and logged loss as one batch of k*n")
@pytest.mark.parametrize(("batch", "accumulation"), [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (1, 3)])
def test_a_run_equals_a_hand_written_loop(batch: int, accumulation: int, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, optim="sgd"
    )
    output = trainer.train()
    model, expected = bare_loop(groups(batch * accumulation, epochs=2))
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)
    assert output.training_loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    torch.testing.assert_close(trainer.model.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.fact("Differences: In a short last group with unequal batches, the mean is over rows")
def test_a_short_last_group_of_unequal_batches_is_the_mean_over_its_rows(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2, optim="sgd", num_train_epochs=1
    )
    trainer.train()
    _, expected = bare_loop([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]])
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)


@pytest.mark.fact("Training: Updates per epoch = ceil(batches / accumulation); a short group counts as one")
@pytest.mark.fact("Training: Fractional epochs stop in the middle; max_steps overrides epochs and starts new passes")
@pytest.mark.parametrize(
    ("arguments", "steps", "epoch", "epochs"),
    [
        ({"num_train_epochs": 1}, 5, 1.0, 1),
        ({"num_train_epochs": 1.5}, 8, 1.6, 2),
        ({"num_train_epochs": 0.2}, 1, 0.2, 1),
        ({"num_train_epochs": 2, "gradient_accumulation_steps": 2}, 6, 2.0, 2),
        ({"num_train_epochs": 1, "gradient_accumulation_steps": 9}, 1, 1.0, 1),
        ({"num_train_epochs": 1, "max_steps": 12}, 12, 2.4, 3),
        ({"num_train_epochs": 9, "max_steps": 3}, 3, 0.6, 1),
    ],
)
def test_the_number_of_steps(arguments: dict[str, Any], steps: int, epoch: float, epochs: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **arguments)
    output = trainer.train()
    assert output.global_step == trainer.state.global_step == trainer.state.max_steps == steps
    assert trainer.state.epoch == pytest.approx(epoch)
    assert trainer.state.num_train_epochs == epochs
    assert len(losses(trainer)) == steps


@pytest.mark.fact("Training: A loader without .dataset works")
def test_a_custom_loader_may_be_any_iterable(tmp_path: Path) -> None:
    class OwnLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            rows = Rows(10)
            return [{"x": rows.x[group], "labels": rows.labels[group]} for group in groups(2)]

    own = make_trainer(tmp_path, kind=OwnLoader)
    own.train()
    usual = make_trainer(tmp_path)
    usual.train()
    assert losses(own) == losses(usual)


@pytest.mark.fact(
    "Training: Iterable datasets are trained on for max_steps over repeated passes; their loader is a DataLoader"
)
def test_a_stream_is_read_again_until_max_steps(tmp_path: Path) -> None:
    streamed = make_trainer(tmp_path, parts={"train_dataset": Stream(10)}, max_steps=7)
    assert type(streamed.get_train_dataloader()) is torch.utils.data.DataLoader
    streamed.train()
    sized = make_trainer(tmp_path, max_steps=7)
    sized.train()
    assert losses(streamed) == losses(sized)
    assert streamed.state.epoch == pytest.approx(1 + 2 / 7)


@pytest.mark.fact("Training: An iterable dataset that yields nothing in a later pass ends the run with a warning")
def test_a_stream_that_is_used_up_ends_the_run_with_a_warning(tmp_path: Path) -> None:
    class OnePass(Trainer):
        def get_train_dataloader(self) -> Any:
            rows = Rows(10)
            return iter([{"x": rows.x[group], "labels": rows.labels[group]} for group in groups(2)])

    trainer = make_trainer(tmp_path, kind=OnePass, max_steps=8)
    with pytest.warns(UserWarning, match="nothing more to yield, so the run ends after 5 of 8 steps"):
        output = trainer.train()
    assert output.global_step == 5


@pytest.mark.fact("Training: An iterable dataset that yields nothing at all ends the run with a warning")
def test_a_stream_of_nothing_ends_the_run_with_a_warning(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"train_dataset": Stream(0)}, max_steps=8)
    with pytest.warns(UserWarning, match="nothing more to yield, so the run ends after 0 of 8 steps"):
        output = trainer.train()
    assert (output.global_step, output.training_loss) == (0, 0.0)


@pytest.mark.fact("Trainer: A training set without a length needs max_steps; otherwise it is a ValueError")
def test_a_stream_without_max_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a Stream, has no length.*set `max_steps`"):
        make_trainer(tmp_path, parts={"train_dataset": Stream(10)})


@pytest.mark.fact("Training: AdamW has two groups, with weight decay for all parameters except biases and norm layers")
def test_the_optimizer_has_a_group_without_weight_decay(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, weight_decay=0.3)
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, torch.optim.AdamW)
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert decayed["params"] == [trainer.model.linear.weight]
    assert spared["params"] == [trainer.model.linear.bias]
    assert (decayed["betas"], decayed["eps"]) == ((0.9, 0.999), 1e-8)


@pytest.mark.fact("Training: The logged learning_rate is the one used in that step; the schedule steps once per update")
@pytest.mark.fact("Training: grad_norm is the norm before clipping, even if nothing is clipped")
@pytest.mark.parametrize("limit", [0.0, 0.01])
def test_learning_rate_and_gradient_norm_are_those_of_the_step(limit: float, tmp_path: Path) -> None:
    class Watch(TrainerCallback):
        rates: list[float] = []
        norms: list[float] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])
            gradients = [parameter.grad for parameter in kwargs["model"].parameters()]
            self.norms.append(torch.nn.utils.get_total_norm(gradients).item())

    trainer = make_trainer(tmp_path, watch := Watch(), max_grad_norm=limit, warmup_steps=2)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["learning_rate"] for entry in entries] == watch.rates
    assert watch.rates[:4] == [0.0, 0.05, 0.1, pytest.approx(0.1 * 7 / 8)]
    if limit:
        assert watch.norms == pytest.approx([limit] * 10, rel=1e-3)  # clipped by then
        assert all(entry["grad_norm"] > 10 * limit for entry in entries)
    else:
        assert [entry["grad_norm"] for entry in entries] == watch.norms


@pytest.mark.fact('Training: Model outputs are a tuple that begins with the loss, or a dict with "loss"')
def test_tuples_and_dicts_give_the_same(tmp_path: Path) -> None:
    runs = [make_trainer(tmp_path, parts={"model": Regression(returns_dict)}) for returns_dict in (False, True)]
    for trainer in runs:
        trainer.train()
    assert losses(runs[0]) == losses(runs[1])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "`train_dataset` is empty, so there is nothing to train on"),
        ({"train": Rows(2), "test": Rows(2)}, "`train_dataset` is a dict of 'train', 'test', which has no rows"),
    ],
)
def test_a_dataset_without_rows_is_rejected(dataset: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        make_trainer(tmp_path, parts={"train_dataset": dataset}).train()


@pytest.mark.parametrize("arguments", [{"learning_rate": 0.1}, "results"])
def test_arguments_of_another_class_are_refused(arguments: Any) -> None:
    with pytest.raises(TypeError, match="`args` is of the class builtins"):
        Trainer(Regression(), arguments)


class PassesOn(Trainer):
    """With a constructor as people write it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.fact(
    "Trainer: An unknown argument is an error with the remedy, for example: tokenizer is now processing_class"
)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("tokenizer", "It was renamed: pass it as `processing_class`"),
        ("learning_rate", "It is one of the TrainingArguments"),
        ("train_datset", "Did you mean `train_dataset`"),
        ("zzz", "It takes model, args, data_collator"),
    ],
)
@pytest.mark.parametrize("kind", [Trainer, PassesOn])
def test_arguments_of_other_names_are_refused(kind: Any, name: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentTypeError, match=rf"The Trainer got `{name}`, but has no argument of that name. {remedy}"
    ):
        kind(Regression(), make_arguments(tmp_path), **{name: object()})


class Weighted(Regression):
    """Needs more than rows usually have."""

    def forward(self, x: torch.Tensor, labels: Any = None, *, weight: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x * weight, labels)


@pytest.mark.fact(
    "Training: An input of forward that is missing from the batch is an error that names it and the batch's entries"
)
@pytest.mark.parametrize("arguments", [{}, {"bf16": True}, {"torch_compile_backend": "eager"}], ids=str)
def test_a_missing_input_is_named(arguments: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"model": Weighted()}, **arguments)
    unlabelled = [{"x": x} for x in Rows(2).x]
    for run, has in ((trainer.train, "'x', 'labels'"), (lambda: trainer.predict(unlabelled), "'x'")):
        with pytest.raises(DataError, match=f"forward of Weighted needs 'weight', but the batch has {has}. Either"):
            run()
    weighted = [{**Rows(2)[index], "weight": torch.ones(2)} for index in range(2)]
    assert trainer.evaluate(weighted)["eval_loss"] > 0


def test_labels_that_a_loss_function_takes_may_not_be_needed_by_forward(tmp_path: Path) -> None:
    class Labelled(Regression):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x, labels)

    parts = {"model": Labelled(), "compute_loss_func": lambda *args, **kwargs: None}
    with pytest.raises(DataError, match="needs 'labels'.*where `compute_loss_func` .* takes it: give it the default"):
        make_trainer(tmp_path, parts=parts).train()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda model, x: model.linear(), "missing 1 required positional argument: 'input'"),
        (lambda model, x: x + "1", "unsupported operand"),
    ],
    ids=["call", "operation"],
)
def test_type_errors_inside_of_forward_go_up_as_they_are(mistake: Any, message: str, tmp_path: Path) -> None:
    class Mistaken(Weighted):
        def forward(self, x: torch.Tensor, labels: Any = None, *, weight: Any) -> Any:  # type: ignore[override]
            return mistake(self, x)

    trainer = make_trainer(tmp_path, parts={"model": Mistaken()})
    # What the batch does not have, a hook can give.
    trainer.model.register_forward_pre_hook(lambda _, args, given: (args, {**given, "weight": 1}), with_kwargs=True)
    with pytest.raises(TypeError, match=message) as caught:
        trainer.train()
    assert type(caught.value) is TypeError


@pytest.mark.fact("Training: Batches of a custom loader may be tuples if compute_loss handles them")
def test_batches_may_be_tuples(tmp_path: Path) -> None:
    class OnTuples(Trainer):
        def get_train_dataloader(self) -> Any:
            return [(row["x"][None], row["labels"][None]) for row in (Rows(10)[index] for index in range(10))]

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            return super().compute_loss(model, dict(zip(("x", "labels"), inputs, strict=True)), return_outputs)

    runs = [make_trainer(tmp_path, kind=kind, per_device_train_batch_size=1) for kind in (Trainer, OnTuples)]
    for trainer in runs:
        trainer.train()
    assert losses(runs[0]) == losses(runs[1])


@pytest.mark.fact("Training: A dict of outputs without a loss is an error that names the keys")
def test_outputs_without_a_loss_are_named(tmp_path: Path) -> None:
    class NoLoss(Regression):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            return {"logits": self.linear(x), "hidden": x}

    with pytest.raises(DataError, match="no loss, only 'logits', 'hidden'.*inputs were 'x', 'labels'"):
        make_trainer(tmp_path, parts={"model": NoLoss()}).train()


@pytest.mark.fact("Training: compute_loss is the override point, also for evaluation")
def test_an_own_loss_is_trained_and_evaluated(tmp_path: Path) -> None:
    class Tripled(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            return (3 * loss, outputs) if return_outputs else 3 * loss

    tripled, usual = make_trainer(tmp_path, kind=Tripled), make_trainer(tmp_path)
    assert tripled.evaluate()["eval_loss"] == pytest.approx(3 * usual.evaluate()["eval_loss"])
    tripled.train()
    usual.train()
    assert losses(tripled)[0] == pytest.approx(3 * losses(usual)[0])


@pytest.mark.fact("Training: compute_loss_func receives outputs, labels and the number of labels in the update")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_function_divides_by_the_labels_of_the_update(accumulation: int, tmp_path: Path) -> None:
    numbers: list[Any] = []

    def mean_by_number(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        numbers.append(num_items_in_batch)
        errors = (outputs[0] - labels) ** 2
        return errors.mean() if num_items_in_batch is None else errors.sum() / num_items_in_batch

    trainer = make_trainer(
        tmp_path,
        parts={"compute_loss_func": mean_by_number},
        gradient_accumulation_steps=accumulation,
        optim="sgd",
        num_train_epochs=1,
    )
    trainer.train()
    model, expected = bare_loop(groups(2 * accumulation))
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)
    assert numbers == ([2] * 5 if accumulation == 1 else [4, 4, 4, 4, 2])
    trainer.evaluate()
    assert numbers[-1] == 5  # of the evaluated batch
    torch.testing.assert_close(trainer.model.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.fact(
    "Training: A model that takes num_items_in_batch receives the number of labels other than -100 in the whole update"
)
def test_unequal_numbers_of_labels_weigh_as_in_one_batch(tmp_path: Path) -> None:
    rows = Rows(8)
    rows.labels[[0, 1, 2, 6]] = -100  # so the batches of the first update have 0 labels, then 1 and so on

    class Told(Tokens):
        numbers: list[int] = []

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():  # else it is found out whether the loss divides
                self.numbers.append(kwargs["num_items_in_batch"])
            return super().forward(x, labels, **kwargs)

    small, large = (
        make_trainer(
            tmp_path,
            parts={"model": Told(), "train_dataset": rows},
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=4 // batch,
            optim="sgd",
        )
        for batch in (1, 4)
    )
    for trainer in (small, large):
        trainer.train()
    assert Told.numbers == [1, 1, 1, 1, 3, 3, 3, 3] * 2 + [1, 3] * 2
    error = Regression()(rows.x[3:4], rows.labels[3:4])[0].item()
    assert losses(large)[0] == pytest.approx(error, rel=1e-5)
    assert losses(small) == pytest.approx(losses(large), rel=1e-5)
    torch.testing.assert_close(small.model.state_dict(), large.model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.fact("Training: optimizers=(optimizer, schedule) are used unchanged")
def test_given_optimizers_are_used(tmp_path: Path) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    trainer = make_trainer(tmp_path, parts={"model": model, "optimizers": (optimizer, schedule)}, num_train_epochs=1)
    trainer.train()
    assert (trainer.optimizer, trainer.lr_scheduler) == (optimizer, schedule)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == [0.3, 0.3, 0.15, 0.15, 0.075]


@pytest.mark.fact("Training: ReduceLROnPlateau steps at evaluations, with metric_for_best_model")
def test_a_plateau_schedule_steps_at_evaluations(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        parts={"compute_metrics": lambda prediction: {"constant": 1.0}},
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="constant",
        greater_is_better=False,
        num_train_epochs=1.6,
    )
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025]


@pytest.mark.fact("Training: train() starts with a new state: step 0 and an empty log history")
@pytest.mark.fact("Training: train returns TrainOutput(global_step, training_loss, metrics)")
def test_training_again_begins_a_new_history(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    first = trainer.train()
    assert isinstance(first, TrainOutput)
    history = trainer.state.log_history
    assert first.metrics == {name: value for name, value in history[-1].items() if name != "step"}
    trainer.train()
    assert trainer.state.log_history is not history
    assert len(trainer.state.log_history) == len(history)
    assert trainer.state.global_step == 10


@pytest.mark.fact("Trainer: model_init is called again, after seeding, in every train()")
def test_model_init_makes_every_training_the_same(tmp_path: Path) -> None:
    class Unseeded(Regression):
        def __init__(self) -> None:
            super().__init__(dropout=0.5)
            self.linear = nn.Linear(2, 1)  # from whatever seed there is

    def new_model() -> nn.Module:
        model = Unseeded.__new__(Unseeded)
        nn.Module.__init__(model)
        model.linear, model.dropout, model.returns_dict = nn.Linear(2, 1), nn.Dropout(0.5), False
        return model

    trainer = make_trainer(tmp_path, parts={"model_init": new_model}, train_sampling_strategy="random")
    trainer.train()
    first, first_model = losses(trainer), trainer.model
    torch.manual_seed(99)
    trainer.train()
    assert losses(trainer) == first
    assert trainer.model is not first_model
    trainer.args.seed = 7
    trainer.train()
    assert losses(trainer) != first


@pytest.mark.fact("Trainer: The constructor seeds everything with args.seed; the same seed gives the same bits")
def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    def run(seed: int) -> list[float]:
        torch.manual_seed(seed + 100)
        trainer = make_trainer(
            tmp_path, parts={"model": Regression(dropout=0.5)}, seed=seed, train_sampling_strategy="random"
        )
        trainer.train()
        return losses(trainer)

    assert run(3) == run(3)
    assert run(3) != run(4)


@pytest.mark.fact("Trainer: Creating a trainer seeds the generators of torch, numpy and random")
def test_a_trainer_seeds_all_generators_when_it_is_made(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), np.random.rand(), random.random()

    set_seed(7)
    expected = draw()
    make_trainer(tmp_path, seed=8)
    assert draw() != expected
    make_trainer(tmp_path, seed=7)
    assert draw() == expected


@pytest.mark.fact("Arguments: data_seed seeds only the order of the rows")
def test_the_order_of_rows_follows_from_the_data_seed(tmp_path: Path) -> None:
    def run(**seeds: Any) -> list[float]:
        trainer = make_trainer(tmp_path, train_sampling_strategy="random", **seeds)
        trainer.train()
        return losses(trainer)

    assert run(seed=1, data_seed=5) == run(seed=2, data_seed=5) == run(seed=5)
    assert run(seed=1, data_seed=5) != run(seed=1, data_seed=6)


@pytest.mark.fact("Trainer: Exactly one of model and model_init must be given")
@pytest.mark.parametrize("parts", [{"model": None}, {"model": Regression(), "model_init": Regression}])
def test_exactly_one_of_model_and_model_init_is_needed(parts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="either `model` or `model_init`, but (both are|neither is) given"):
        make_trainer(tmp_path, parts=parts)


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="not an nn.Module"):
        make_trainer(tmp_path, parts={"model": Regression})


@pytest.mark.fact("Trainer: model_init cannot be combined with optimizers")
def test_model_init_and_optimizers_exclude_each_other(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(Regression().parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="`model_init` makes another one for each training"):
        make_trainer(tmp_path, parts={"model_init": Regression, "optimizers": (optimizer, None)})


@pytest.mark.fact("Trainer: A subclass with a method that would never be called is an error that names the hook to use")
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("_inner_training_loop", "Override `training_step`"),
        ("_wrap_model", "Use accelerate's configuration"),
        ("_maybe_log_save_evaluate", "Override `log`, `evaluate`"),
        ("_rotate_checkpoints", "Override `_save_checkpoint`"),
        ("get_batch_samples", "Override `get_train_dataloader`, or `count_items`"),
    ],
)
def test_a_hook_that_does_not_exist_is_refused(name: str, remedy: str, tmp_path: Path) -> None:
    custom = type("Custom", (Trainer,), {name: lambda self: None})
    with pytest.raises(ConfigurationError, match=f"Custom defines `{name}`.*never be called. {remedy}"):
        make_trainer(tmp_path, kind=custom)


@pytest.mark.fact("Trainer: An eval_strategy without an evaluation set is a ValueError if there is a training set")
def test_evaluations_without_an_evaluation_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`eval_strategy` is 'epoch', but there is no `eval_dataset`"):
        make_trainer(tmp_path, parts={"eval_dataset": None}, eval_strategy="epoch")
    trainer = make_trainer(tmp_path, parts={"eval_dataset": None, "train_dataset": None}, eval_strategy="epoch")
    assert len(trainer.predict(Rows(3)).predictions) == 3
    trainer.train_dataset = Rows(4)
    with pytest.raises(ValueError, match="there is no `eval_dataset`"):
        trainer.train()


@pytest.mark.fact("Arguments: Training does not change the arguments")
def test_training_leaves_the_arguments_unchanged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, logging_steps=0.2, eval_strategy="steps", save_strategy="steps", save_steps=0.5)
    before = trainer.args.to_dict()
    trainer.train()
    assert trainer.args.to_dict() == before
    assert (trainer.state.logging_steps, trainer.state.save_steps) == (2, 5)


@pytest.mark.fact(
    "Training: With logging_nan_inf_filter, NaN is reported and counted, and the running mean is logged instead"
)
@pytest.mark.fact("Training: Without logging_nan_inf_filter, NaN is logged")
@pytest.mark.parametrize("filters", [True, False])
def test_a_nan_is_never_out_of_sight(filters: bool, tmp_path: Path) -> None:
    class Sometimes(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = super().training_step(model, inputs, num_items_in_batch)
            return loss * math.nan if self.state.global_step in (1, 2) else loss

    trainer = make_trainer(
        tmp_path, kind=Sometimes, logging_steps=4, logging_nan_inf_filter=filters, num_train_epochs=1.6
    )
    usual = make_trainer(tmp_path, num_train_epochs=1.6)
    usual.train()
    if not filters:
        trainer.train()
        assert math.isnan(losses(trainer)[0])
        assert losses(trainer)[1] == pytest.approx(sum(losses(usual)[4:]) / 4)
        return
    with pytest.warns(UserWarning, match="2 of the last 4 losses were NaN or infinite"):
        trainer.train()
    finite = losses(usual)
    assert losses(trainer) == pytest.approx([(finite[0] + finite[3]) / 2, sum(finite[4:]) / 4])
    assert [entry.get("non_finite_losses") for entry in trainer.state.log_history[:2]] == [2, None]


@pytest.mark.fact("Training: A NaN loss that was never logged is reported at the end of the run")
@pytest.mark.parametrize("arguments", [{"logging_strategy": "no"}, {"logging_steps": 500}])
def test_a_nan_that_no_log_covers_is_reported_at_the_end(arguments: dict[str, Any], tmp_path: Path) -> None:
    class Always(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            return super().training_step(model, inputs, num_items_in_batch) * math.nan

    with pytest.warns(UserWarning, match="10 of the last 10 losses were NaN or infinite"):
        output = make_trainer(tmp_path, kind=Always, **arguments).train()
    assert math.isnan(output.training_loss)


def test_label_smoothing_equals_its_formula(tmp_path: Path) -> None:
    from pytorch_accelerated.huggingface.models.smoothing import LabelSmoother

    logits, labels = torch.randn(4, 3, 5), torch.randint(5, (4, 3))
    labels[0, :2] = -100
    counted = labels != -100
    log_probabilities = logits.log_softmax(-1)[counted]
    own = log_probabilities.gather(1, labels[counted][:, None]).mean()
    expected = -(0.9 * own + 0.1 * log_probabilities.mean())
    torch.testing.assert_close(LabelSmoother(0.1)({"logits": logits}, labels), expected)
    shifted = LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=True)
    torch.testing.assert_close(shifted, LabelSmoother(0.1)((logits[:, :-1],), labels[:, 1:]))


@pytest.mark.fact("Training: label_smoothing_factor gives the mean over labels other than -100")
def test_smoothed_labels_are_trained_on(tmp_path: Path) -> None:
    class Classifier(Regression):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            logits = torch.cat([self.linear(x), -self.linear(x)], dim=1)
            return {"logits": logits} if labels is None else {"loss": logits.sum(), "logits": logits}

    rows = Rows(4)
    rows.labels = torch.tensor([0, 1, 1, 0])
    trainer = make_trainer(
        tmp_path,
        parts={"model": Classifier(), "train_dataset": rows},
        label_smoothing_factor=0.2,
        per_device_train_batch_size=4,
        max_steps=1,
    )
    logits = Classifier()(rows.x)["logits"]
    trainer.train()
    expected = torch.nn.functional.cross_entropy(logits, rows.labels, label_smoothing=0.2).item()
    assert losses(trainer) == pytest.approx([expected])


@pytest.mark.fact("Training: Flags of the control end the epoch or the run at the next safe point")
def test_a_run_that_is_stopped_early_tells_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, StopAt(3, saves=False))
    output = trainer.train()
    assert (output.global_step, trainer.state.max_steps) == (3, 10)


@pytest.mark.fact("Training: skip_memory_metrics=False adds {init,train,eval,test}_mem_cpu_alloc_delta")
def test_memory_is_measured_if_asked_for(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, skip_memory_metrics=False)
    metrics = trainer.train().metrics
    assert {"init_mem_cpu_alloc_delta", "train_mem_cpu_alloc_delta"} <= metrics.keys()
    assert "eval_mem_cpu_alloc_delta" in trainer.evaluate()
    assert "test_mem_cpu_alloc_delta" in (trainer.predict(Rows(2)).metrics or {})
    assert not any("mem" in name for name in make_trainer(tmp_path).train().metrics)


@pytest.mark.fact("Training: max_steps overrides num_train_epochs, even 0, which is an error on its own")
def test_a_number_of_steps_is_enough(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, num_train_epochs=0)
    assert trainer.train().global_step == 2
    with pytest.raises(ConfigurationError, match="`num_train_epochs` is 0, so there is nothing to train.*`max_steps`"):
        make_trainer(tmp_path, num_train_epochs=0).train()


def test_a_model_that_is_frozen_altogether_is_refused(tmp_path: Path) -> None:
    model = Regression().requires_grad_(False)
    with pytest.raises(ConfigurationError, match="All parameters of the Regression are frozen.*`requires_grad`"):
        make_trainer(tmp_path, parts={"model": model}).train()


@pytest.mark.fact("Training: A schedule for a different optimizer is an error")
@pytest.mark.parametrize("optimizer_is_given", [True, False])
def test_a_schedule_of_another_optimizer_is_refused(optimizer_is_given: bool, tmp_path: Path) -> None:
    model = Regression()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    parts = {"model": model, "optimizers": (optimizer if optimizer_is_given else None, schedule)}
    with pytest.raises(ConfigurationError, match="The schedule, a StepLR, belongs to another optimizer"):
        make_trainer(tmp_path, parts=parts).train()


def test_an_optimizer_and_its_schedule_train_twice(tmp_path: Path) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = make_trainer(tmp_path, parts={"model": model, "optimizers": (optimizer, schedule)}, max_steps=1)
    for _ in range(2):
        trainer.train()
    assert schedule.get_last_lr() == [0.025]


@pytest.mark.fact("Training: A stream that yields less than its length brings a warning")
def test_a_stream_that_is_shorter_than_it_says_is_pointed_out(tmp_path: Path) -> None:
    class Boasting(Stream):
        def __len__(self) -> int:
            return 20

    trainer = make_trainer(tmp_path, parts={"train_dataset": Boasting(10)}, num_train_epochs=1)
    with pytest.warns(UserWarning, match="20 samples but yields 10"):
        trainer.train()
