"""Callbacks: the handler, the default flow, the printer and early stopping, and those of transformers among them."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import callbacks as native
from pytorch_accelerated import huggingface
from pytorch_accelerated.errors import ArgumentTypeError, CallbackSetupError
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.huggingface.events.callbacks import (
    DEFAULT_CALLBACKS,
    EVENTS,
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    TrainerCallback,
)
from pytorch_accelerated.huggingface.events.state import TrainerControl, TrainerState
from tests.huggingface.runs import Regression, Rows, make_trainer

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def handler_of(*callbacks: Any) -> CallbackHandler:
    return CallbackHandler([DefaultFlowCallback, *callbacks], "model", "tokenizer", "optimizer", "schedule")


def all_flags(value: bool) -> TrainerControl:
    return TrainerControl(*(value for _ in FLAGS))


class Recorder(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...


@pytest.mark.fact("Events: There are the fifteen events of transformers, from init_end to save")
def test_the_events_are_those_of_transformers() -> None:
    from transformers import TrainerCallback as GenuineCallback

    theirs = {name for name in dir(GenuineCallback) if name.startswith("on_")}
    # Nothing is uploaded, so nobody hears of it.
    assert set(EVENTS) == theirs - {"on_push_begin"}


def test_something_else_than_a_control_may_not_be_returned() -> None:
    class Mistaken(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return True

    with pytest.raises(ArgumentTypeError, match="Mistaken.on_epoch_end returned True"):
        handler_of(Mistaken).on_epoch_end(TrainingArguments(), TrainerState(), TrainerControl())


@pytest.mark.fact(
    "Events: train_begin clears should_training_stop, epoch_begin should_epoch_stop, step_begin the other flags"
)
@pytest.mark.fact("Events: evaluate, save and log each clear their own flag")
@pytest.mark.parametrize("event", EVENTS)
def test_each_event_clears_the_flags_that_transformers_clears(event: str) -> None:
    from transformers.trainer_callback import CallbackHandler as GenuineHandler
    from transformers.trainer_callback import DefaultFlowCallback as GenuineFlow

    # Arguments with which the default flow itself does nothing.
    args = TrainingArguments(logging_strategy="no", save_strategy="no")
    state = TrainerState(max_steps=10)
    extra: list[Any] = [{}] if event in ("on_log", "on_evaluate", "on_predict") else []
    ours, theirs = all_flags(True), all_flags(True)
    genuine: Any = GenuineHandler([GenuineFlow], None, None, None, None)
    assert getattr(handler_of(), event)(args, state, ours, *extra) is ours
    getattr(genuine, event)(args, state, theirs, *extra)
    assert ours == theirs


@pytest.mark.fact("Trainer: Callbacks are classes or instances; a second one of a class brings a warning with its name")
def test_callbacks_are_classes_or_instances_and_a_second_one_warns() -> None:
    handler = handler_of(Recorder, PrinterCallback())
    assert [type(one) for one in handler.callbacks] == [DefaultFlowCallback, Recorder, PrinterCallback]
    assert handler.callback_list == "DefaultFlowCallback, Recorder, PrinterCallback"
    with pytest.warns(UserWarning, match="A second Recorder was added"):
        handler.add_callback(Recorder())
    assert len(handler.callbacks) == 4


@pytest.mark.fact(
    "Trainer: Callbacks are added, popped and removed by class (first match) or instance; popping an absent one "
    "returns None"
)
def test_callbacks_are_taken_out_by_class_or_instance() -> None:
    first, second = Recorder(), Recorder()
    handler = handler_of(first)
    with pytest.warns(UserWarning, match="A second Recorder"):
        handler.add_callback(second)
    assert handler.pop_callback(Recorder) is first
    assert handler.pop_callback(first) is None
    assert handler.pop_callback(second) is second
    assert handler.pop_callback(Recorder) is None
    handler.remove_callback(DefaultFlowCallback)
    handler.remove_callback(DefaultFlowCallback)
    assert handler.callbacks == []


def test_a_class_takes_out_no_instance_of_its_subclasses() -> None:
    class Special(Recorder):
        pass

    handler = handler_of(Special)
    assert handler.pop_callback(Recorder) is None
    assert type(handler.pop_callback(Special)) is Special


@pytest.mark.fact("Interoperation: remove_callback and pop_callback with a class of transformers find our equivalent")
@pytest.mark.parametrize(
    "name",
    ["DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "EarlyStoppingCallback", "TensorBoardCallback"],
)
def test_a_class_of_transformers_finds_ours_of_the_same_job_and_the_other_way_round(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tensorboard")
    genuine = getattr(transformers, name, None) or getattr(transformers.integrations, name)
    ours = getattr(huggingface, name)
    handler = CallbackHandler([DefaultFlowCallback, *([] if ours is DefaultFlowCallback else [ours])], *[None] * 4)
    present = handler.callbacks[-1]
    with pytest.warns(UserWarning, match=f"A second {name}"):
        handler.add_callback(genuine)
    assert type(handler.pop_callback(genuine)) is genuine  # the very class comes first
    assert handler.pop_callback(genuine) is present
    assert handler.pop_callback(genuine) is None
    handler.add_callback(genuine)
    handler.remove_callback(ours)
    assert name not in handler.callback_list


def test_a_class_of_the_user_is_found_by_no_other_of_its_name() -> None:
    class PrinterCallback(TrainerCallback):  # in place of ours, with which it has nothing to do
        pass

    handler = handler_of(PrinterCallback)
    assert handler.pop_callback(huggingface.PrinterCallback) is None
    handler.add_callback(huggingface.PrinterCallback)


@pytest.mark.fact("Trainer: Without DefaultFlowCallback there is a warning")
def test_without_the_default_flow_there_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"no DefaultFlowCallback among the callbacks \(Recorder\)"):
        CallbackHandler([Recorder], None, None, None, None)
    assert list(DEFAULT_CALLBACKS) == [DefaultFlowCallback]


def test_a_misspelt_event_is_warned_about() -> None:
    class Misspelt(TrainerCallback):
        def on_step_ends(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pass

    with pytest.warns(UserWarning, match="Misspelt.on_step_ends will never be called.*'on_step_end'"):
        handler_of(Misspelt)


def test_an_object_without_events_is_not_a_callback() -> None:
    with pytest.raises(ArgumentTypeError, match="'tensorboard' cannot be a callback"):
        handler_of("tensorboard")


def test_the_handler_knows_who_listens() -> None:
    handler = handler_of()
    assert handler.listens_to("on_step_end")  # the default flow
    assert not handler.listens_to("on_substep_end")

    class Substeps(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            pass

    handler.callbacks.append(Substeps())
    assert handler.listens_to("on_substep_end")


def test_ranks_agree_after_each_update_unless_every_callback_declares_otherwise() -> None:
    class Same(TrainerCallback):
        ranks_agree_after_each_update = False

    class Changed(Same):
        """May do more than its base."""

    handler = handler_of(PrinterCallback, EarlyStoppingCallback, huggingface.ProgressCallback, Same)
    assert not handler.ranks_agree_after_each_update()
    handler.callbacks.append(Changed())
    assert handler.ranks_agree_after_each_update()
    handler.callbacks = handler.callbacks[:-1]
    assert not handler.ranks_agree_after_each_update()


@pytest.mark.fact("Interoperation: Callbacks of transformers are called like ours")
def test_genuine_callbacks_are_called() -> None:
    from transformers import EarlyStoppingCallback as GenuineEarlyStopping
    from transformers import TrainerCallback as GenuineCallback

    class Genuine(GenuineCallback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.steps.append(state.global_step)
            control.should_training_stop = kwargs["model"] == "model"
            return control

    genuine = Genuine()
    handler = handler_of(genuine, GenuineEarlyStopping(1))
    assert not handler.listens_to("on_substep_end")
    control = handler.on_step_end(TrainingArguments(), TrainerState(global_step=3, max_steps=9), TrainerControl())
    assert genuine.steps == [3]
    assert control.should_training_stop

    args = TrainingArguments(metric_for_best_model="loss", eval_strategy="steps")
    control = handler.on_evaluate(args, TrainerState(best_metric=0.5), TrainerControl(), {"eval_loss": 0.75})
    assert control.should_training_stop


@pytest.mark.fact("Interoperation: ProgressCallback and PrinterCallback of transformers can show a run")
def test_genuine_displays_show_a_run_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm
    from transformers.trainer_callback import PrinterCallback as GenuinePrinter
    from transformers.trainer_callback import ProgressCallback as GenuineProgress

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # its thread would outlive the test
    handler = handler_of(GenuineProgress, GenuinePrinter)
    handler.eval_dataloader = [1, 2]
    args, state, control = TrainingArguments(), TrainerState(max_steps=2), TrainerControl()
    handler.on_train_begin(args, state, control)
    for state.global_step in (1, 2):
        handler.on_step_end(args, state, control)
    handler.on_prediction_step(args, state, control)
    handler.on_evaluate(args, state, control, {"eval_loss": 1.0})
    handler.on_log(args, state, control, {"eval_loss": 1.0})
    handler.on_train_end(args, state, control)
    shown = capsys.readouterr()
    assert shown.out.count("eval_loss") == 2
    assert "2/2" in shown.err


@pytest.mark.fact("Interoperation: DefaultFlowCallback of transformers counts as DefaultFlowCallback")
def test_a_genuine_default_flow_counts_as_one() -> None:
    from transformers.trainer_callback import DefaultFlowCallback as GenuineFlow

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handler = CallbackHandler([GenuineFlow], None, None, None, None)
    state = TrainerState(global_step=2, max_steps=2)
    assert handler.on_step_end(TrainingArguments(), state, TrainerControl()).should_training_stop


@pytest.mark.fact(
    "Events: DefaultFlowCallback logs, saves and (from eval_delay) evaluates at multiples, and logs the first step on "
    "request"
)
@pytest.mark.fact(
    'Events: DefaultFlowCallback stops at max_steps; it then saves and evaluates if these strategies are "steps"'
)
@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
@pytest.mark.parametrize("max_steps", [6, 7])
@pytest.mark.parametrize("eval_delay", [0, 3, 9])
def test_the_default_flow_asks_for_what_that_of_transformers_asks(
    strategy: str, max_steps: int, eval_delay: int
) -> None:
    from transformers.trainer_callback import DefaultFlowCallback as GenuineFlow

    asked = set()
    for first_step, save_strategy in itertools.product([False, True], ["no", "steps", "epoch", "best"]):
        args = TrainingArguments(
            logging_strategy=strategy, eval_strategy=strategy, save_strategy="no", logging_first_step=first_step
        )
        args.save_strategy = type(args.save_strategy)(save_strategy)
        args.eval_delay = eval_delay
        for step, event in itertools.product(range(1, max_steps + 1), ["on_step_end", "on_epoch_end"]):
            state = TrainerState(
                global_step=step, epoch=step, max_steps=max_steps, logging_steps=2, eval_steps=2, save_steps=3
            )
            ours, theirs = TrainerControl(), TrainerControl()
            getattr(DefaultFlowCallback(), event)(args, state, ours)
            getattr(GenuineFlow(), event)(args, state, theirs)
            assert ours == theirs, (args, state, event)
            asked |= {flag for flag in FLAGS if getattr(ours, flag)}
    assert "should_training_stop" in asked
    assert ("should_evaluate" in asked) == (strategy != "no" and eval_delay <= max_steps)


@pytest.mark.fact("Logging: PrinterCallback omits total_flos")
def test_the_printer_prints_logs_without_the_operations(capsys: pytest.CaptureFixture[str]) -> None:
    logs = {"loss": 0.5, "total_flos": 12.0}
    PrinterCallback().on_log(TrainingArguments(), TrainerState(), TrainerControl(), logs=logs)
    assert capsys.readouterr().out == "{'loss': 0.5}\n"
    assert logs == {"loss": 0.5, "total_flos": 12.0}
    elsewhere = TrainerState(is_local_process_zero=False)
    PrinterCallback().on_log(TrainingArguments(), elsewhere, TrainerControl(), logs=logs)
    assert capsys.readouterr().out == ""


def early_stopping_arguments(**changes: Any) -> TrainingArguments:
    usual = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    return TrainingArguments(**{**usual, **changes})


@pytest.mark.fact(
    "Best model: Early stopping compares with the best value so far; an improvement must exceed the threshold"
)
@pytest.mark.parametrize("greater_is_better", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.25])
@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("values", [[4, 3, 3, 2, 3, 3, 3], [1, 1.25, 1.5, 1.75, 1], [float("nan"), 1, float("nan"), 2]])
def test_early_stopping_judges_as_that_of_transformers(
    values: list[float], patience: int, threshold: float, greater_is_better: bool
) -> None:
    from transformers import EarlyStoppingCallback as GenuineEarlyStopping

    args = early_stopping_arguments(metric_for_best_model="score", greater_is_better=greater_is_better)
    ours, theirs = EarlyStoppingCallback(patience, threshold), GenuineEarlyStopping(patience, threshold)
    state = TrainerState()
    for value in values:
        controls = TrainerControl(), TrainerControl()
        ours.on_evaluate(args, state, controls[0], metrics={"eval_score": value})
        theirs.on_evaluate(args, state, controls[1], metrics={"eval_score": value})  # type: ignore[arg-type]
        assert controls[0] == controls[1]
        assert ours.early_stopping_patience_counter == theirs.early_stopping_patience_counter
        if state.best_metric is None or (value > state.best_metric) == greater_is_better:
            state.best_metric = value


@pytest.mark.fact("Best model: A NaN metric brings a warning, and early stopping counts it as no improvement")
def test_a_metric_that_stays_nan_ends_the_run_as_with_transformers(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback as GenuineEarlyStopping
    from transformers import Trainer as Genuine
    from transformers import TrainingArguments as GenuineArguments

    data: dict[str, Any] = {"model": Regression(), "train_dataset": Rows(4), "eval_dataset": Rows(4)}
    usual: dict[str, Any] = {
        "num_train_epochs": 9,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "report_to": "none",
        "use_cpu": True,
    }
    theirs = Genuine(
        args=GenuineArguments(str(tmp_path / "theirs"), **usual),
        compute_metrics=lambda prediction: {"score": float("nan")},
        callbacks=[GenuineEarlyStopping(2)],
        **data,
    )
    theirs.train()
    ours = make_trainer(
        tmp_path / "ours",
        EarlyStoppingCallback(2),
        parts={**data, "compute_metrics": lambda prediction: {"score": float("nan")}},
        **usual,
    )
    with pytest.warns(UserWarning, match="'score', is NaN at step"):
        ours.train()
    assert ours.state.epoch == theirs.state.epoch == 3


def test_an_evaluation_of_another_set_is_passed_over() -> None:
    callback, control = EarlyStoppingCallback(1), TrainerControl()
    state = TrainerState(best_metric=1.0)
    callback.on_evaluate(early_stopping_arguments(), state, control, metrics={"eval_other_loss": 2.0})
    assert callback.early_stopping_patience_counter == 0
    assert not control.should_training_stop


@pytest.mark.fact(
    "Best model: When training begins, early stopping requires metric_for_best_model and an eval_strategy"
)
@pytest.mark.parametrize(
    "arguments", [{"eval_strategy": "epoch"}, {"metric_for_best_model": "loss"}, {"metric_for_best_model": None}]
)
def test_early_stopping_needs_a_metric_and_evaluations(arguments: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="`metric_for_best_model` is .* and `eval_strategy` is") as caught:
        EarlyStoppingCallback().on_train_begin(TrainingArguments(**arguments), TrainerState(), TrainerControl())
    assert isinstance(caught.value, CallbackSetupError)


@pytest.mark.fact("Best model: Early stopping without load_best_model_at_end brings a warning")
def test_early_stopping_warns_when_the_best_model_is_not_loaded() -> None:
    args = early_stopping_arguments(load_best_model_at_end=False, metric_for_best_model="loss")
    with pytest.warns(UserWarning, match="`load_best_model_at_end` is False"):
        EarlyStoppingCallback().on_train_begin(args, TrainerState(), TrainerControl())
    EarlyStoppingCallback().on_train_begin(early_stopping_arguments(), TrainerState(), TrainerControl())


@pytest.mark.fact("Best model: The state of EarlyStoppingCallback has patience, threshold and counter")
def test_the_state_of_early_stopping_is_that_of_transformers() -> None:
    from transformers import EarlyStoppingCallback as GenuineEarlyStopping

    ours, theirs = EarlyStoppingCallback(3, 0.1), GenuineEarlyStopping(3, 0.1)
    ours.early_stopping_patience_counter = theirs.early_stopping_patience_counter = 2
    assert ours.state() == theirs.state()
    assert vars(EarlyStoppingCallback.from_state(theirs.state())) == vars(ours)


@pytest.mark.parametrize("arguments", [(0,), (1, -0.5), (1, float("nan"))])
def test_early_stopping_refuses_numbers_that_cannot_work(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(CallbackSetupError, match="EarlyStoppingCallback has a patience of"):
        EarlyStoppingCallback(*arguments)


@pytest.mark.parametrize(
    ("callback", "advice"),
    [
        (native.CSVLoggerCallback("log.csv"), "pandas.DataFrame(trainer.state.log_history)"),
        (native.TrackerCallback("tensorboard"), "Use `report_to`"),
        (native.LossSpikeCallback(), "Use pytorch_accelerated.huggingface.LossSpikeCallback"),
    ],
)
def test_a_callback_of_the_native_trainer_is_refused_with_what_to_use_instead(callback: Any, advice: str) -> None:
    with pytest.raises(
        ArgumentTypeError, match=f"{type(callback).__name__} is a callback of pytorch_accelerated.Trainer"
    ) as caught:
        handler_of(callback)
    assert advice in str(caught.value)
