"""What subclasses override, scripts read and patch: it is there, looks like that of transformers, and is called."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import huggingface
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface import Trainer, TrainerCallback, TrainerState
from pytorch_accelerated.huggingface.arguments.read_by_scripts import READ_BY_SCRIPTS
from pytorch_accelerated.huggingface.checkpoints.folders import rotate_checkpoints
from tests.huggingface.runs import Regression, Rows, StopAt, Tokens, losses, make_trainer, without_native_parts

PUBLIC = """model model_wrapped args state control callback_handler optimizer lr_scheduler train_dataset eval_dataset
data_collator accelerator label_names label_smoother model_accepts_loss_kwargs _train_batch_size
is_deepspeed_enabled is_fsdp_enabled"""
METHODS = """get_train_dataloader get_eval_dataloader get_test_dataloader create_optimizer create_scheduler
create_optimizer_and_scheduler training_step compute_loss prediction_step evaluate predict
evaluation_loop log save_model is_local_process_zero is_world_process_zero num_examples
get_num_trainable_parameters add_callback pop_callback remove_callback train floating_point_ops
compute_loss_context_manager call_model_init get_decay_parameter_names get_learning_rates _evaluate
_save_checkpoint _load_callback_state _load_best_model _load_from_checkpoint _prepare_inputs
_nested_gather _get_train_sampler _get_eval_sampler log_metrics metrics_format save_metrics save_state
create_model_card get_optimizer_group _set_signature_columns_if_needed _remove_unused_columns
_get_collator_with_removed_columns"""
CALLED = """_prepare_input _get_learning_rate _get_output_dir _move_model_to_device autocast_smart_context_manager
gather_function get_cp_size get_sp_size get_tp_size get_total_train_batch_size"""


@pytest.mark.fact("Trainer: The attributes and methods that scripts read, override and patch exist")
def test_attributes_and_methods_are_there(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert [name for name in PUBLIC.split() if not hasattr(trainer, name)] == []
    assert [name for name in METHODS.split() if not callable(getattr(trainer, name, None))] == []
    assert not trainer.is_deepspeed_enabled
    assert not trainer.is_fsdp_enabled
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


@pytest.mark.fact("Trainer: Attributes of unused features can be read and have the same value as in transformers")
def test_attributes_of_unused_features_have_the_values_of_transformers(tmp_path: Path) -> None:
    from tests.huggingface.test_against_transformers import run

    ours, theirs = (run(library, tmp_path / library, trains=False) for library in ("ours", "theirs"))
    compared = [name for name in READ_BY_SCRIPTS if hasattr(theirs, name) and not callable(getattr(theirs, name))]
    compared += ["_signature_columns"]
    assert len(compared) > 12
    for name in set(compared) - {"_memory_tracker"}:
        assert (getattr(ours, name) or None) == (getattr(theirs, name) or None), name
    for name in CALLED.split():
        assert callable(getattr(ours, name)), name
    assert ours.get_total_train_batch_size(ours.args) == theirs.get_total_train_batch_size(theirs.args) == 2
    assert ours._prepare_input(torch.ones(1)).device == ours.args.device


@pytest.mark.fact("Trainer: get_optimizer_group returns the group of a parameter, given itself or by name")
def test_the_group_of_a_parameter_is_found(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, weight_decay=0.5)
    with pytest.raises(ValueError, match="There is no optimizer yet"):
        trainer.get_optimizer_group()
    trainer.create_optimizer()
    linear = trainer.model.linear
    assert [len(group) for group in trainer.get_optimizer_group()] == [1, 1]
    assert trainer.get_optimizer_group(linear.weight)["weight_decay"] == 0.5
    assert trainer.get_optimizer_group("linear.bias")["weight_decay"] == 0
    with pytest.raises(ConfigurationError, match="'linear.scale' is in no group"):
        trainer.get_optimizer_group("linear.scale")


@pytest.mark.fact(
    "Training: current_gradient_accumulation_steps is the number of batches in the update, also in a short last one"
)
def test_the_batches_of_an_update_can_be_read(tmp_path: Path) -> None:
    def seen_by(kind: type[Any]) -> tuple[type[Any], list[int]]:
        seen: list[int] = []

        class Reading(kind):  # type: ignore[misc]  # of either library
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                seen.append(self.current_gradient_accumulation_steps)
                return super().compute_loss(*args, **kwargs)

        return Reading, seen

    import transformers

    from tests.huggingface.test_against_transformers import run

    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2}
    (ours, our_seen), (theirs, their_seen) = seen_by(Trainer), seen_by(transformers.Trainer)
    run("ours", tmp_path / "ours", kind=ours, **arguments)
    run("theirs", tmp_path / "theirs", kind=theirs, **arguments)
    assert our_seen == their_seen == [2, 2, 2, 2, 1] * 2


@pytest.mark.fact("Data: A custom loader can be built as in transformers, with the columns that the model takes")
def test_a_loader_is_made_as_scripts_make_theirs(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
            return torch.utils.data.DataLoader(
                self._remove_unused_columns(self.train_dataset, description="training"),
                batch_size=self._train_batch_size,
                collate_fn=collator,
                sampler=self._get_train_sampler(),
            )

    class Keeping(Own):
        def _set_signature_columns_if_needed(self) -> None:
            self._signature_columns = ["x"]

    rows = [{**Rows(10)[index], "name": "left out", "other": torch.ones(3)} for index in range(10)]
    trainer = make_trainer(tmp_path, kind=Own, parts={"train_dataset": rows})
    trainer.train()
    plain = make_trainer(tmp_path)
    plain.train()
    assert losses(trainer) == losses(plain)
    keeping = make_trainer(tmp_path, kind=Keeping, parts={"train_dataset": rows})
    assert list(next(iter(keeping.get_train_dataloader()))) == list(next(iter(keeping.get_eval_dataloader()))) == ["x"]


@pytest.mark.fact("Trainer: The signatures are those of transformers, as far as scripts use them")
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
    "Trainer: Callback handler, TensorBoardCallback, EarlyStoppingCallback and state have the signatures of "
    "transformers"
)
def test_other_signatures_are_as_scripts_use_them() -> None:
    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    handler = ["callbacks", "model", "processing_class", "optimizer", "lr_scheduler"]
    assert parameters(huggingface.CallbackHandler) == handler
    call_event = parameters(huggingface.CallbackHandler.call_event)
    assert call_event[:5] == ["self", "event", "args", "state", "control"]
    assert parameters(huggingface.TensorBoardCallback) == ["tb_writer"]
    early_stopping = inspect.signature(huggingface.EarlyStoppingCallback).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in early_stopping] == [
        ("early_stopping_patience", 1),
        ("early_stopping_threshold", 0.0),
    ]
    assert parameters(rotate_checkpoints)[:3] == [
        "output_dir",
        "save_total_limit",
        "best_model_checkpoint",
    ]


@pytest.mark.fact("Checkpoints: TrainerState has save_to_json and load_from_json")
def test_a_state_comes_back_from_json(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    trainer.state.save_to_json(tmp_path / "state.json")
    assert TrainerState.load_from_json(tmp_path / "state.json") == trainer.state


@pytest.mark.fact(
    "Trainer: _prepare_inputs, compute_loss_context_manager and floating_point_ops are called for each batch"
)
@pytest.mark.fact("Trainer: training_step, compute_loss, prediction_step, _evaluate and create_... can be overridden")
def test_overridden_methods_are_called(tmp_path: Path) -> None:
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


@pytest.mark.fact("Trainer: _evaluate can be patched on the instance")
def test_a_patched_evaluation_is_the_one_of_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_strategy="epoch", save_strategy="best", metric_for_best_model="score")
    scores = iter([1.0, 2.0])
    trainer._evaluate = lambda *args, **kwargs: {"eval_score": next(scores)}  # type: ignore[method-assign]
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (2.0, 10)


@pytest.mark.fact("Trainer: _load_from_checkpoint and _load_callback_state can be overridden; every resume calls them")
@pytest.mark.parametrize("has_native_parts", [True, False])
def test_methods_that_load_a_checkpoint_may_be_overridden(has_native_parts: bool, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Own(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            self.model.linear.bias.data.fill_(7.0)
            calls.append(resume_from_checkpoint)

        def _load_callback_state(self) -> None:
            super()._load_callback_state()
            calls.append("callbacks")

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.bias, self.weight = kwargs["model"].linear.bias.item(), kwargs["model"].linear.weight.tolist()

    first = make_trainer(tmp_path, StopAt(3))
    first.train()
    folder = tmp_path / "checkpoint-3"
    if not has_native_parts:
        without_native_parts(folder)
    trainer = make_trainer(tmp_path, look := Look(), kind=Own)
    trainer.train()
    assert calls == []
    trainer.train(resume_from_checkpoint=str(folder))
    assert calls == [str(folder), "callbacks"]
    assert (look.bias, look.weight) == (7.0, first.model.linear.weight.tolist())


def test_methods_that_load_a_checkpoint_may_be_patched(tmp_path: Path) -> None:
    make_trainer(tmp_path, StopAt(3)).train()
    calls: list[str] = []
    trainer = make_trainer(tmp_path)
    trainer._load_from_checkpoint = calls.append  # type: ignore[method-assign, assignment]
    trainer.train(resume_from_checkpoint=True)
    assert calls == [str(tmp_path / "checkpoint-3")]


@pytest.mark.fact("Trainer: _train_batch_size is the batch size of the next training loader")
def test_the_batch_size_of_the_loader_may_be_set(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer._train_batch_size = 5
    assert trainer.get_train_dataloader().batch_size == 5


@pytest.mark.fact(
    "Trainer: model_accepts_loss_kwargs tells whether the model receives num_items_in_batch, and can be set"
)
@pytest.mark.parametrize("accepts", [True, False])
def test_a_model_may_be_kept_from_the_number_of_labels(accepts: bool, tmp_path: Path) -> None:
    class Noting(Tokens):
        told: list[Any] = []

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
            self.told.append(kwargs)
            return super().forward(x, labels, **kwargs)

    trainer = make_trainer(tmp_path, parts={"model": Noting()}, num_train_epochs=1)
    assert trainer.model_accepts_loss_kwargs
    trainer.model_accepts_loss_kwargs = accepts
    trainer.train()
    assert Noting.told == [{"num_items_in_batch": 2} if accepts else {}] * 5


@pytest.mark.fact("Evaluation: The prefix of a prediction is test unless another is given")
def test_prefixes_may_be_given(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    expected = trainer.evaluate()["eval_loss"]
    assert trainer.predict(Rows(5)).metrics["test_loss"] == expected  # type: ignore[index]
    assert trainer.predict(Rows(5), None, "mine").metrics["mine_loss"] == expected  # type: ignore[index]
    assert trainer.evaluate(metric_key_prefix="mine")["mine_loss"] == expected


@pytest.mark.fact("Arguments: Changes to the arguments before the Trainer is created take effect")
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


def test_methods_that_transformers_calls_exist_or_are_rejected() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {name for name, value in vars(transformers.Trainer).items() if inspect.isfunction(value)}
    # Of services, searches and ways to cut a model that there are not; scripts call these, and get Python's error.
    of_others = re.compile(
        "push|hub|hf_repo|hp_search|hyperparameter|model_card|_[ctsu]p_|context_parallel|mixed_mesh|fsdp"
    )
    internal = {
        "_build_accelerator_args",
        "_finalize_training",
        "_init_training_state",
        "_issue_warnings_after_load",
        "_load_scaler",
        "_save_scaler",
        "_sync_replicated_trainable_parameters",
        "_tune_save_checkpoint",
        "_update_auto_batch_size",
        "_validate_args",
        "end",
        "get_optimizer_group",
    }
    missing = {name for name in theirs - internal if not hasattr(Trainer, name) and not of_others.search(name)}
    assert "get_batch_samples" in missing
    for name in sorted(missing):
        with pytest.raises(ConfigurationError, match=f"Custom defines `{name}`"):
            type("Custom", (Trainer,), {name: lambda self: None})(Regression())
