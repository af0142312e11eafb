"""A subclass of the trainer may use names of its own: ours are few, and none that a user is likely to choose."""

from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import EarlyStoppingCallback, LogMetricsCallback, TrainerCallback
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model


def words_of(text: str) -> list[str]:
    return text.split()


WORDS = words_of("""
run runs running last_run precision recall accuracy experiment project
update stop close rounds parameters weighted step steps batch batches loss losses state states settings config
options args kwargs device devices model models net network encoder decoder head backbone teacher student generator
discriminator critic optimizer optimizers scheduler schedulers lr lrs learning_rate epoch epochs metric metrics score
scores history log logs logger writer tracker progress bar display clock timer start started end ended begin finish
finished done ready prepare prepared setup reset clear release restore save saves saved load loaded write read
checkpoint checkpoints path folder output outputs input inputs target targets label labels mask masks prediction
predictions predict evaluate evaluation evaluator evaluating train training trainer validate validation test tests
tester infer inference forward backward grad grads gradient gradients norm norms clip scale scaler weight weights bias
buffer buffers cache caches memory queue pool worker workers data dataset datasets loader loaders sampler samplers
collate transform transforms augment mixup cutmix ema average averages momentum decay temperature alpha beta gamma
epsilon threshold patience best best_score best_metric counter count counts total totals index indices position seed
seeds rng random noise phase mode flag flags request requests event events emit fire hook hooks call callback handler
signal signals lock locks thread threads process rank world group gather reduce sync wait result results record
records report reports message messages error errors
""")


@pytest.mark.parametrize("form", ["{}", "_{}"])
def test_a_subclass_may_use_any_likely_name(form: str) -> None:
    """As methods that nobody but the user calls, each on a class of its own, all on one."""
    assert len(WORDS) >= 200
    names = [form.format(word) for word in WORDS]
    names = [name for name in names if not hasattr(Trainer, name) and name not in vars(plain_trainer())]

    def own(self: Any, *args: Any) -> None:
        raise AssertionError("the trainer called a method of the user's")

    kind = type("Own", (Trainer,), dict.fromkeys(names, own))
    data = regression_data(12)
    trainers = [plain_trainer(), plain_trainer(kind)]
    for trainer in trainers:
        trainer.train(
            data, 2, data, per_device_batch_size=4, gradient_clip_norm=1.0, nonfinite_policy="skip", split_on_oom=True
        )
        trainer.evaluate(data)
        trainer.predict(data[0])
    assert_same_parameters(trainers[1].model, trainers[0].model, tolerance=0)


def test_a_subclass_may_keep_anything_under_likely_names() -> None:
    """As attributes that are set before and after the trainer's own constructor."""
    taken = {*dir(Trainer), *vars(plain_trainer())}
    names = [name for word in WORDS for name in (word, f"_{word}") if name not in taken]

    class Keeps(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            for name in names[::2]:
                setattr(self, name, object())
            super().__init__(*args, **kwargs)
            for name in names[1::2]:
                setattr(self, name, object())

    trainer = plain_trainer(Keeps)
    data = regression_data(12)
    trainer.train(data, 2, data, per_device_batch_size=4)
    assert all(type(getattr(trainer, name)) is object for name in names)


# Public names that version 0.1.61 does not have.
REPLACEABLE = words_of("current_run is_last_epoch seed mixed_precision compile_model inference_mode timeout")


def own_method(trainer: Any) -> str:
    return "mine"


@pytest.mark.parametrize("value", [own_method, None, property(own_method)], ids=["method", "None", "property"])
def test_a_subclass_may_define_the_public_names_that_were_added(value: Any):
    trainer = run_everything(type("Own", (Trainer,), dict.fromkeys(REPLACEABLE, value)))
    for name in REPLACEABLE:
        found = getattr(trainer, name)
        assert (found() if callable(found) else found) == (value if value is None else "mine")


@pytest.mark.parametrize("is_assigned_first", [True, False])
def test_a_subclass_may_assign_the_public_names_that_were_added(is_assigned_first: bool):
    class Own(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            for name in REPLACEABLE if is_assigned_first else ():
                setattr(self, name, "mine")
            super().__init__(*args, **kwargs)
            for name in () if is_assigned_first else REPLACEABLE:
                setattr(self, name, "mine")

    trainer = run_everything(Own)
    assert {getattr(trainer, name) for name in REPLACEABLE} == {"mine"}


def run_everything(kind: type[Trainer]) -> Trainer:
    """With callbacks that read the run; the result must be that of the trainer's arguments."""
    usual, own = (
        each(
            model := tiny_model(),
            nn.MSELoss(),
            sgd(model),
            seed=1,
            callbacks=[_Watcher(), LogMetricsCallback(), EarlyStoppingCallback()],
        )
        for each in (Trainer, kind)
    )
    data = regression_data(12)
    for trainer in (usual, own):
        trainer.train(data, 2, data, per_device_batch_size=4)
        trainer.evaluate(data)
        trainer.predict(data[0])
    assert_same_parameters(own.model, usual.model, tolerance=0)
    return own


def test_without_a_subclass_an_argument_may_be_changed_between_runs():
    trainer = plain_trainer()
    assert (trainer.seed, trainer.inference_mode) == (1, False)
    trainer.seed = 5
    trainer.train(regression_data(4), 1)
    assert trainer.run_config.seed == 5


class _Watcher(TrainerCallback):
    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        assert torch.isfinite(kwargs["batch_output"]["loss"])


def plain_trainer(kind: type[Trainer] = Trainer) -> Trainer:
    return kind(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=[_Watcher()], seed=1)
