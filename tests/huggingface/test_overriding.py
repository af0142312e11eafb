"""What subclasses override, scripts read and patch: it is there, looks like that of transformers, and is called."""

import dataclasses
import functools
import inspect
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.huggingface import Trainer, TrainerCallback, TrainingArguments
from pytorch_accelerated.huggingface.engine.refusing import READ_BY_SCRIPTS
from tests.huggingface.runs import Regression, Rows, StopAt, Stream, Tokens, losses, make_trainer, without_native_parts
from tests.huggingface.test_against_transformers import ROUNDING, run

transformers = pytest.importorskip("transformers")

PUBLIC = """model model_wrapped args state control callback_handler optimizer lr_scheduler train_dataset eval_dataset
data_collator accelerator label_names label_smoother model_accepts_loss_kwargs _train_batch_size
is_deepspeed_enabled is_fsdp_enabled"""
METHODS = """get_train_dataloader get_eval_dataloader get_test_dataloader create_optimizer create_scheduler
create_optimizer_and_scheduler training_step compute_loss prediction_step evaluate predict
evaluation_loop log save_model is_local_process_zero is_world_process_zero num_examples
get_num_trainable_parameters add_callback pop_callback remove_callback train floating_point_ops
compute_loss_context_manager call_model_init get_decay_parameter_names get_learning_rates _evaluate
_save_checkpoint _load_callback_state _load_best_model _load_from_checkpoint _prepare_inputs
_save_optimizer_and_scheduler _save_scaler _save_rng_state _load_optimizer_and_scheduler
_nested_gather _get_train_sampler _get_eval_sampler log_metrics metrics_format
save_metrics save_state create_model_card get_optimizer_group _set_signature_columns_if_needed _remove_unused_columns
_get_collator_with_removed_columns _get_dataloader _move_model_to_device get_total_train_batch_size
set_initial_training_values get_batch_samples"""
CALLED = """_prepare_input _get_learning_rate _get_output_dir autocast_smart_context_manager
gather_function get_cp_size get_sp_size get_tp_size"""


def test_attributes_are_there(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert [name for name in PUBLIC.split() if not hasattr(trainer, name)] == []
    assert not trainer.is_deepspeed_enabled  # type: ignore[attr-defined]  # for scripts
    assert not trainer.is_fsdp_enabled
    trainer._train_batch_size = 5
    assert trainer.get_train_dataloader().batch_size == 5
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


def test_attributes_of_unused_features_have_the_values_of_transformers(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["__init__", *METHODS.split()])
def test_methods_take_what_those_of_transformers_take(name: str) -> None:
    theirs = getattr(transformers.Trainer, name, None)
    if theirs is None:
        assert name in ("_load_callback_state", "_nested_gather")  # of older versions
        return
    ours = inspect.signature(getattr(Trainer, name)).parameters
    expected = [parameter for parameter in inspect.signature(theirs).parameters.values() if parameter.name != "kwargs"]
    assert list(ours)[: len(expected)] == [parameter.name for parameter in expected]
    defaults = [parameter.default for parameter in expected]
    assert [ours[parameter.name].default for parameter in expected] == defaults


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
    repeated = "training_step compute_loss compute_loss_context_manager _prepare_inputs prediction_step"
    for name in f"{once} {repeated}".split():
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


def test_a_patched_evaluation_is_the_one_of_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_strategy="epoch", save_strategy="best", metric_for_best_model="score")
    scores = iter([1.0, 2.0])
    trainer._evaluate = lambda *args, **kwargs: {"eval_score": next(scores)}  # type: ignore[method-assign]
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (2.0, 10)


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

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            calls.append(sorted(self.optimizer.state_dict()["state"]))

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
    assert calls == [str(folder), "callbacks", [0, 1]]
    assert (look.bias, look.weight) == (7.0, first.model.linear.weight.tolist())


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


def of_both_libraries(make: Any, folder: Path, look: Any, **arguments: Any) -> list[Any]:
    """What `look` sees of a trainer of the class that `make` derives, with ours as its base and with transformers'."""
    bases = {"ours": Trainer, "theirs": transformers.Trainer}
    return [look(run(name, folder / name, kind=make(base), **arguments)) for name, base in bases.items()]


PLANS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "short updates at the end": {"gradient_accumulation_steps": 2, "num_train_epochs": 1.5},
    "a part of an epoch": {"num_train_epochs": 0.4},
    "updates of several epochs": {"max_steps": 12, "num_train_epochs": 1},
    "updates without epochs": {"max_steps": 3, "num_train_epochs": 0},
    "rows left out": {"per_device_train_batch_size": 3, "dataloader_drop_last": True},
    "a stream": {"max_steps": 4, "parts": {"train_dataset": Stream(11)}},
}


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_a_run_can_be_read_and_changed(name: str, tmp_path: Path) -> None:
    def watched(base: Any) -> Any:
        class Watched(base):  # type: ignore[misc]  # of either library
            def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
                *others, max_steps = super().set_initial_training_values(args, dataloader)
                return *others, max_steps - 1

        return Watched

    def look(trainer: Any) -> Any:
        plan = trainer.set_initial_training_values(args=trainer.args, dataloader=trainer.get_train_dataloader())
        state = trainer.state
        return tuple(plan), state.max_steps, state.global_step, state.num_train_epochs

    ours, theirs = of_both_libraries(watched, tmp_path, look, **PLANS[name])
    assert ours == theirs
    assert ours[0][-1] == ours[1] == ours[2]


def own_count(usual: Any, batches: Any, most: int) -> Any:
    """As scripts write it."""
    taken = []
    for _ in range(most):
        try:
            taken.append(next(batches))
        except StopIteration:
            break
    return taken, sum(len(batch["labels"]) * 2 for batch in taken)


def no_count(usual: Any, batches: Any, most: int) -> Any:
    return [next(batches) for _ in range(most)], None


def passed_on(usual: Any, batches: Any, most: int) -> Any:
    return usual(batches, most)


def changed(usual: Any, batches: Any, most: int) -> Any:
    taken, items = usual(batches, most)
    return [{**batch, "x": batch["x"] * 2} for batch in taken], items


@pytest.mark.parametrize("model", [Regression, Tokens])
@pytest.mark.parametrize("take", [own_count, no_count, passed_on, changed])
def test_the_batches_of_an_update_may_be_changed_and_counted(take: Any, model: Any, tmp_path: Path) -> None:
    def watched(base: Any) -> Any:
        class Watched(base):  # type: ignore[misc]  # of either library
            seen: list[Any] = []

            def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
                usual = functools.partial(super().get_batch_samples, device=device)
                batches, items = take(usual, epoch_iterator, num_batches)
                self.seen.append((num_batches, len(batches), items is None or int(items), device))
                return batches, items

            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                self.seen.append((inputs["x"].tolist(), num_items_in_batch is None or int(num_items_in_batch)))
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        return Watched

    def look(trainer: Any) -> Any:
        return trainer.seen, trainer.state.global_step, losses(trainer)

    parts = {"model": None, "model_init": lambda: model()}
    ours, theirs = of_both_libraries(watched, tmp_path, look, parts=parts, gradient_accumulation_steps=2)
    assert ours[:2] == theirs[:2]
    assert ours[2] == pytest.approx(theirs[2], rel=ROUNDING)


def test_batches_that_are_left_out_do_not_count(tmp_path: Path) -> None:
    class First(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            return [next(epoch_iterator)], None

    rows = Rows(10)
    firsts = torch.utils.data.Subset(rows, [0, 1, 4, 5, 8, 9])
    trainer = make_trainer(tmp_path, kind=First, gradient_accumulation_steps=2)
    plain = make_trainer(tmp_path, parts={"train_dataset": firsts})
    trainer.train()
    plain.train()
    assert losses(trainer) == losses(plain)

    class Nothing(Trainer):
        def get_batch_samples(self, *args: Any) -> Any:
            return [], None

    with pytest.raises(HookOutputError, match="Nothing.get_batch_samples returned no batch"):
        make_trainer(tmp_path, kind=Nothing).train()


@pytest.mark.parametrize("is_placed", [None, True, False])
@pytest.mark.parametrize("part", ["model", "model_init"])
def test_a_model_is_moved_by_a_method(part: str, is_placed: bool | None, tmp_path: Path) -> None:
    def watched(base: Any) -> Any:
        class Watched(base):  # type: ignore[misc]  # of either library
            moves: list[Any] = []

            def _move_model_to_device(self, model: Any, device: Any) -> Any:
                self.moves.append((type(model).__name__, device))
                return model  # as for a `device_map`

        return Watched

    def look(trainer: Any) -> Any:
        return trainer.moves, trainer.place_model_on_device

    parts = {"model": Regression()} if part == "model" else {"model": None, "model_init": lambda: Regression()}
    with pytest.MonkeyPatch.context() as patch:
        for arguments in (TrainingArguments, transformers.TrainingArguments):
            patch.setattr(arguments, "place_model_on_device", property(lambda args: is_placed))
        ours, theirs = of_both_libraries(watched, tmp_path, look, parts=parts)
    assert ours == theirs
    assert len(ours[0]) == (0 if is_placed is False else 1 if part == "model" else 2)


def test_arguments_of_a_subclass_use_names_of_the_class(tmp_path: Path) -> None:
    def seen_of(base: Any) -> Any:
        @dataclasses.dataclass
        class Own(base):  # type: ignore[misc]  # of either library
            _VALID_DICT_FIELDS = base._VALID_DICT_FIELDS + ["model_kwargs"]
            model_kwargs: dict[str, Any] | str | None = None
            note: str = "{}"
            optim: str = base.default_optim

            @property
            def place_model_on_device(self) -> Any:
                return super().place_model_on_device

        args = Own(str(tmp_path), use_cpu=True, model_kwargs='{"layers": 2}', lr_scheduler_kwargs='{"num_cycles": 2}')
        given = args.model_kwargs, args.lr_scheduler_kwargs, args.note, args.optim, args.place_model_on_device
        return *given, Own(str(tmp_path), model_kwargs="a name").model_kwargs, Own._VALID_DICT_FIELDS

    assert seen_of(TrainingArguments) == seen_of(transformers.TrainingArguments)


def names_in(code: types.CodeType) -> set[str]:
    """All names that a code reads, inner functions included."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def test_methods_that_transformers_calls_are_called_or_rejected() -> None:
    methods = {name: value for name, value in vars(transformers.Trainer).items() if inspect.isfunction(value)}
    called = methods.keys() & set().union(*(names_in(inspect.unwrap(each).__code__) for each in methods.values()))
    assert len(called) > 60
    sources = Path(inspect.getfile(Trainer)).parent.rglob("*.py")
    ours = set().union(*(names_in(compile(path.read_text(), str(path), "exec")) for path in sources))
    never = called - {name for name in called & ours if hasattr(Trainer, name)}
    assert "_wrap_model" in never
    # These are called there if `push_to_hub` is True, which is no argument here, and else by scripts.
    for name in sorted(never - {"push_to_hub", "init_hf_repo"}):
        with pytest.raises(ConfigurationError, match=f"Custom defines `{name}`, which would never be called. [A-Z]"):
            type("Custom", (Trainer,), {name: lambda self: None})(Regression())


def test_the_loading_of_an_optimizer_cannot_be_replaced() -> None:
    class Custom(Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            pass

    class Further(Custom):
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)

    with pytest.raises(ConfigurationError, match="Custom defines `_load_optimizer_and_scheduler` without calling"):
        Further(Regression())
