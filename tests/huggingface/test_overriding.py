"""What subclasses override, scripts read and patch: it is there, looks like that of transformers, and is called."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import huggingface
from pytorch_accelerated.huggingface import Trainer, TrainerState, checkpoints
from tests.huggingface.runs import Regression, Rows, losses, make_trainer

PUBLIC = """model model_wrapped args state control callback_handler optimizer lr_scheduler train_dataset eval_dataset
data_collator accelerator label_names label_smoother model_accepts_loss_kwargs _train_batch_size"""
METHODS = """get_train_dataloader get_eval_dataloader get_test_dataloader create_optimizer create_scheduler
create_optimizer_and_scheduler training_step compute_loss prediction_step evaluate predict
evaluation_loop log save_model is_local_process_zero is_world_process_zero num_examples
get_num_trainable_parameters add_callback pop_callback remove_callback train floating_point_ops
compute_loss_context_manager call_model_init get_decay_parameter_names get_learning_rates _evaluate
_save_checkpoint _load_callback_state _load_best_model _load_from_checkpoint _prepare_inputs
_nested_gather _get_train_sampler _get_eval_sampler"""


@pytest.mark.fact("Trainer: the attributes and methods that scripts read, override and patch are there")
def test_attributes_and_methods_are_there(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert [name for name in PUBLIC.split() if not hasattr(trainer, name)] == []
    assert [name for name in METHODS.split() if not callable(getattr(trainer, name, None))] == []
    assert trainer.num_examples(trainer.get_train_dataloader()) == 10
    assert trainer.num_examples(trainer.get_eval_dataloader()) == 5
    assert trainer.get_num_trainable_parameters() == 3
    trainer.model.linear.bias.requires_grad = False
    assert trainer.get_num_trainable_parameters() == 2
    assert trainer.is_local_process_zero()
    assert trainer.is_world_process_zero()
    with pytest.raises(ValueError, match="There is no optimizer yet"):
        trainer.get_learning_rates()
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    assert trainer.get_learning_rates() == [0.1, 0.1]
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    assert trainer.get_learning_rates() == [pytest.approx(0.09)] * 2


@pytest.mark.fact("DECISIONS: the signatures are those of transformers, as far as scripts use them")
@pytest.mark.parametrize("name", ["__init__", *METHODS.split()])
def test_methods_take_what_those_of_transformers_take(name: str) -> None:
    import transformers

    theirs = getattr(transformers.Trainer, name, None)
    if theirs is None:
        assert name in ("_load_callback_state", "_nested_gather")  # of older versions
        return
    ours = inspect.signature(getattr(Trainer, name)).parameters
    expected = [parameter for parameter in inspect.signature(theirs).parameters.values() if parameter.name != "kwargs"]
    assert list(ours)[: len(expected)] == [parameter.name for parameter in expected]
    defaults = [parameter.default for parameter in expected]
    assert [ours[parameter.name].default for parameter in expected] == defaults


@pytest.mark.fact(
    "DECISIONS: callback handler, TensorBoardCallback, EarlyStoppingCallback and state have their signatures"
)
def test_other_signatures_are_as_scripts_use_them() -> None:
    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    handler = ["callbacks", "model", "processing_class", "optimizer", "lr_scheduler"]
    assert parameters(huggingface.CallbackHandler) == handler
    call_event = parameters(huggingface.CallbackHandler.call_event)
    assert call_event[:5] == ["self", "event", "args", "state", "control"]
    assert parameters(huggingface.TensorBoardCallback) == ["tb_writer"]
    assert parameters(huggingface.EarlyStoppingCallback) == ["early_stopping_patience", "early_stopping_threshold"]
    assert parameters(checkpoints.rotate_checkpoints)[:3] == [
        "output_dir",
        "save_total_limit",
        "best_model_checkpoint",
    ]


@pytest.mark.fact("Checkpoints: TrainerState.save_to_json and load_from_json")
def test_a_state_comes_back_from_json(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.state.save_to_json(tmp_path / "state.json")
    assert TrainerState.load_from_json(tmp_path / "state.json") == trainer.state


@pytest.mark.fact(
    "DECISIONS: _prepare_inputs, compute_loss_context_manager, floating_point_ops are called for each batch"
)
@pytest.mark.fact("Trainer: training_step, compute_loss, prediction_step, _evaluate and create_... may be overridden")
def test_what_is_overridden_is_called(tmp_path: Path) -> None:
    calls: list[str] = []

    class Noting(Trainer):
        def floating_point_ops(self, inputs: Any) -> float:
            return 7.0

    def note(name: str) -> None:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(super(Noting, self), name)(*args, **kwargs)

        setattr(Noting, name, method)

    once = "create_optimizer_and_scheduler create_optimizer create_scheduler get_train_dataloader _get_train_sampler"
    once += " _evaluate evaluate get_eval_dataloader evaluation_loop"
    for (
        name
    ) in f"{once} training_step compute_loss compute_loss_context_manager _prepare_inputs prediction_step".split():
        note(name)
    trainer = make_trainer(tmp_path, kind=Noting, num_train_epochs=1, eval_strategy="epoch")
    trainer.train()
    assert [calls.count(name) for name in once.split()] == [1] * len(once.split())
    assert calls.count("training_step") == 5
    assert calls.count("prediction_step") == 1
    for name in ("compute_loss", "compute_loss_context_manager", "_prepare_inputs"):
        assert calls.count(name) == 6, name
    assert trainer.state.total_flos == 35
    plain = make_trainer(tmp_path, num_train_epochs=1)
    plain.train()
    assert losses(trainer) == losses(plain)


@pytest.mark.fact("Trainer: _evaluate may be patched on the instance")
def test_a_patched_evaluation_is_the_one_of_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_strategy="epoch", save_strategy="best", metric_for_best_model="score")
    scores = iter([1.0, 2.0])
    trainer._evaluate = lambda *args, **kwargs: {"eval_score": next(scores)}  # type: ignore[method-assign]
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (2.0, 10)


@pytest.mark.fact("Evaluating: the prefix of a prediction is test, and any other if given")
def test_prefixes_may_be_given(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    expected = trainer.evaluate()["eval_loss"]
    assert trainer.predict(Rows(5)).metrics["test_loss"] == expected  # type: ignore[index]
    assert trainer.predict(Rows(5), None, "mine").metrics["mine_loss"] == expected  # type: ignore[index]
    assert trainer.evaluate(metric_key_prefix="mine")["mine_loss"] == expected


@pytest.mark.fact("DECISIONS: changes made to the arguments before the Trainer is built count")
def test_arguments_may_be_changed_until_the_trainer_is_made(tmp_path: Path) -> None:
    from tests.huggingface.runs import make_arguments

    args = make_arguments(tmp_path)
    args.label_names = []
    args.per_device_eval_batch_size = 2
    trainer = Trainer(Regression(), args)
    output = trainer.predict(Rows(3))
    assert output.label_ids is None
    assert torch.equal(torch.from_numpy(output.predictions[1]), trainer.model(Rows(3).x)[0].detach())
    args.eval_strategy = "epoch"
    with pytest.raises(ValueError, match="there is no `eval_dataset`"):
        Trainer(Regression(), args, train_dataset=Rows(3))
