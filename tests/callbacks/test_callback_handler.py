"""Events reach every callback that acts, in order, and mistakes in callbacks are not swallowed."""

import contextlib
import warnings
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    DEFAULT_CALLBACKS,
    CallbackHandler,
    LogMetricsCallback,
    MetricsCallback,
    ModelEmaCallback,
    PrintMetricsCallback,
    StepBasedEvaluationCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import (
    CallbackMethodNotImplementedError,
    DuplicateCallbackError,
    StopTrainingError,
)
from pytorch_accelerated.loop.callback import EVENTS
from tests.support.reference import regression_data, tiny_trainer


class Named(TrainerCallback):
    """Several of them can be told apart."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name = name
        self.calls = calls

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.calls.append((self.name, kwargs))

    @property
    def state_key(self) -> str:
        return self.name


class Raises(Named):
    def __init__(self, name: str, calls: list[Any], error: Exception) -> None:
        super().__init__(name, calls)
        self.error = error

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        super().on_train_epoch_start(trainer, **kwargs)
        raise self.error


def test_callbacks_act_in_the_order_given_with_what_the_event_brings():
    calls: list[Any] = []
    handler = CallbackHandler([Named("b", calls), Named("a", calls)])
    handler.add_callbacks([Named("c", calls), TrainerCallback])
    handler.call_event("on_train_epoch_start", None, number=1)
    assert calls == [(name, {"number": 1}) for name in "bac"]
    assert [type(callback) for callback in handler] == [Named, Named, Named, TrainerCallback]
    assert handler.callback_list == ["Named", "Named", "Named", "TrainerCallback"]
    assert len(handler) == 4


def test_callbacks_may_come_and_go_between_two_events():
    calls: list[Any] = []

    def called() -> str:
        calls.clear()
        handler.call_event("on_train_epoch_start", None)
        return "".join(name for name, _ in calls)

    first, second, third = (Named(name, calls) for name in "abc")
    handler = CallbackHandler([first])
    assert called() == "a"
    handler.callbacks = [*handler.callbacks, second]
    assert called() == "ab"
    handler.callbacks = [callback for callback in handler.callbacks if callback is not first]  # type: ignore[assignment]
    handler.add_callback(third)
    assert called() == "bc"
    with pytest.raises(AttributeError):
        handler.callbacks.append(first)  # type: ignore[attr-defined]  # it would be lost in silence
    handler.clear_callbacks()
    assert called() == ""
    assert list(handler) == []


def test_overrides_pass_on_what_they_know_with_super():
    calls: list[str] = []

    class Older(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            super().on_train_step_end(trainer, batch, batch_output)  # type: ignore[misc, call-arg]
            calls.append("train step")

        def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            super().on_eval_step_end(trainer, batch, batch_output)  # type: ignore[misc, call-arg]
            calls.append("eval step")

        def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            super().on_eval_epoch_start(trainer)  # type: ignore[call-arg]
            calls.append("eval start")

        def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            super().on_eval_epoch_end(trainer)  # type: ignore[call-arg]
            calls.append("eval end")

    data = regression_data(2)
    tiny_trainer(Older).train(data, 1, data)
    assert calls == ["train step", "eval start", "eval step", "eval end"]


def test_only_what_is_overridden_acts():
    class Patched(TrainerCallback):
        def __init__(self) -> None:
            self.on_train_epoch_end = lambda trainer, **kwargs: calls.append("patched")  # type: ignore[method-assign]

    calls: list[Any] = []
    patched, named = Patched(), Named("named", calls)
    handler = CallbackHandler([patched, TrainerCallback(), named])
    assert handler.acting_methods("on_train_epoch_start") == [named.on_train_epoch_start]
    assert handler.acting_methods("on_train_epoch_end") == [patched.on_train_epoch_end]
    for event in set(EVENTS) - {"on_train_epoch_start", "on_train_epoch_end"}:
        assert handler.acting_methods(event) == []
    handler.call_event("on_train_epoch_end", None)
    assert calls == ["patched"]


@pytest.mark.parametrize(
    ("errors", "called", "raised"),
    [
        ([StopTrainingError("first"), StopTrainingError("second")], "abc", "first"),
        ([AttributeError("oops"), StopTrainingError("never")], "a", "oops"),
        ([CallbackMethodNotImplementedError("not me")], "ac", None),
    ],
    ids=["a wish to stop", "another error", "no error"],
)
def test_a_wish_to_stop_is_raised_after_the_last_callback_and_any_other_error_at_once(
    errors: list[Exception], called: str, raised: str | None
):
    calls: list[Any] = []
    raising = [Raises(name, calls, error) for name, error in zip("ab", errors, strict=False)]
    handler = CallbackHandler([*raising, Named("c", calls)])
    with pytest.raises(type(errors[0]), match=raised) if raised else contextlib.nullcontext():
        handler.call_event("on_train_epoch_start", None)
    assert "".join(name for name, _ in calls) == called


def test_two_indistinguishable_callbacks_are_rejected_also_later():
    handler = CallbackHandler([Named("a", []), Named("b", [])])
    with pytest.raises(DuplicateCallbackError, match="'a'"):
        handler.add_callback(Named("a", []))
    assert len(handler) == 2
    assert issubclass(DuplicateCallbackError, ValueError)


def test_a_second_plain_logger_is_left_out_whatever_its_name():
    class Mine(LogMetricsCallback):
        pass

    handler = CallbackHandler([LogMetricsCallback, PrintMetricsCallback, PrintMetricsCallback(), Mine])
    assert [type(callback) for callback in handler] == [LogMetricsCallback, Mine]


def test_anything_with_an_event_is_a_callback():
    class Duck:
        seen = 0

        def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
            self.seen += 1

    duck = Duck()
    handler = CallbackHandler([duck])
    handler.call_event("on_train_epoch_start", None)
    assert duck.seen == 1
    with pytest.raises(DuplicateCallbackError, match="'Duck'"):
        handler.add_callback(Duck)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("on_train_epoch_ends", "Did you mean 'on_train_epoch_end'?"),
        ("on_train_batch_end", "no event has that name. Did you mean 'on_train_epoch_end'? If you fire it yourself"),
        ("on_epoch_end", "Did you mean 'on_eval_epoch_end'?"),
    ],
)
def test_a_method_that_no_event_will_call_is_warned_about_with_the_nearest_name(name: str, hint: str):
    kind = type("Mine", (TrainerCallback,), {name: lambda self, trainer, **kwargs: None})
    with pytest.warns(UserWarning, match=f"Mine.{name} will never be called") as caught:
        CallbackHandler([kind])
    assert hint in str(caught[0].message)
    assert "`custom_events`" in str(caught[0].message)


def test_a_method_that_resembles_no_event_is_for_one_that_a_user_fires():
    kind = type("Mine", (TrainerCallback,), {"on_half_time": lambda self, **kwargs: None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CallbackHandler([kind])


def test_callbacks_declare_whether_ranks_agree_after_each_update():
    class Watches(TrainerCallback):
        ranks_agree_after_each_update = False

        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None: ...

    class MayStop(Watches):
        """May do more than its base, so what the base declares says nothing about it."""

    class Patched(Watches):
        ranks_agree_after_each_update = False

        def __init__(self) -> None:
            self.on_optimizer_step_end = lambda trainer, **kwargs: None  # type: ignore[method-assign]

    class Listens(CallbackHandler):
        def call_event(self, event: str, *args: Any, **kwargs: Any) -> None: ...

    quiet = [*DEFAULT_CALLBACKS, StepBasedEvaluationCallback(2), MetricsCallback({}), ModelEmaCallback(), Watches]
    assert not CallbackHandler([*quiet, Named("acts elsewhere", [])]).ranks_agree_after_each_update()
    for kind in (MayStop, Patched):
        assert CallbackHandler([*quiet, kind]).ranks_agree_after_each_update()
    assert Listens().ranks_agree_after_each_update()


def test_a_custom_handler_receives_every_event():
    heard: list[str] = []

    class Listens(CallbackHandler):
        def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
            heard.append(event)
            super().call_event(event, *args, **kwargs)

    class Mine(Trainer):
        def _create_callback_handler(self) -> CallbackHandler:
            return Listens(self._callbacks)

    tiny_trainer(base=Mine).train(regression_data(4), 1, per_device_batch_size=2)
    assert heard.count("on_train_step_start") == heard.count("on_optimizer_step_end") == 2
    assert heard[-1] == "on_training_run_end"
