"""A subclass of the trainer may use names of its own: ours are few, and none that a user is likely to choose."""

from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import EarlyStoppingCallback, LogMetricsCallback, TrainerCallback
from tests.support.reference import assert_same_parameters, regression_data, tiny_trainer


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


# Public names that version 0.1.61 does not have.
REPLACEABLE = words_of("current_run is_last_epoch seed mixed_precision compile_model inference_mode timeout lanes")


class _Watcher(TrainerCallback):
    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        assert torch.isfinite(kwargs["batch_output"]["loss"])


def make(kind: type[Trainer] = Trainer) -> Trainer:
    callbacks = [_Watcher(), LogMetricsCallback(), EarlyStoppingCallback()]
    return tiny_trainer(*callbacks, base=kind, seed=1)


def names_of(kind: str) -> list[str]:
    taken = {*dir(Trainer), *vars(make())}
    likely = [name for word in WORDS for name in (word, f"_{word}") if name not in taken]
    return likely if kind == "likely" else REPLACEABLE


def run_everything(kind: type[Trainer]) -> Trainer:
    """With callbacks that read the run; the result must be that of the trainer's arguments."""
    data = regression_data(12)
    usual, own = make(), make(kind)
    arguments: dict[str, Any] = {"gradient_clip_norm": 1.0, "nonfinite_policy": "skip"}
    for trainer in (usual, own):
        trainer.train(data, 2, data, per_device_batch_size=4, **arguments)
        trainer.evaluate(data)
        trainer.predict(data[0])
    assert_same_parameters(own.model, usual.model, tolerance=0)
    return own


def test_a_subclass_may_have_methods_of_any_likely_name() -> None:
    """Which nobody but the user calls."""

    def own(self: Any, *args: Any) -> None:
        raise AssertionError("the trainer called a method of the user's")

    names = names_of("likely")
    assert len(names) >= 400
    run_everything(type("Own", (Trainer,), dict.fromkeys(names, own)))


@pytest.mark.parametrize("kind", ["likely", "added"])
@pytest.mark.parametrize("is_assigned_first", [True, False])
def test_a_subclass_may_keep_anything_under_such_names(is_assigned_first: bool, kind: str) -> None:
    """As attributes that are set before or after the trainer's own constructor."""
    names = names_of(kind)

    class Own(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            for name in names if is_assigned_first else ():
                setattr(self, name, "mine")
            super().__init__(*args, **kwargs)
            for name in () if is_assigned_first else names:
                setattr(self, name, "mine")

    trainer = run_everything(Own)
    assert {getattr(trainer, name) for name in names} == {"mine"}


def own_method(trainer: Any) -> str:
    return "mine"


@pytest.mark.parametrize("value", [own_method, None, property(own_method)], ids=["method", "None", "property"])
def test_a_subclass_may_define_the_public_names_that_were_added(value: Any):
    trainer = run_everything(type("Own", (Trainer,), dict.fromkeys(REPLACEABLE, value)))
    for name in REPLACEABLE:
        found = getattr(trainer, name)
        assert (found() if callable(found) else found) == (value if value is None else "mine")


def test_without_a_subclass_an_argument_may_be_changed_between_runs():
    trainer = make()
    assert (trainer.seed, trainer.inference_mode) == (1, False)
    trainer.seed = 5
    trainer.train(regression_data(4), 1, regression_data(4))
    assert trainer.run_config.seed == 5
