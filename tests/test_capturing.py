"""A run whose steps are captured and replayed gives what the ordinary run gives, or says why it is not captured."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import PrintProgressCallback, StepBasedEvaluationCallback, TrainerCallback
from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.schedulers import CosineLrScheduler
from pytorch_accelerated.steps.capturing import (
    BATCHES_BEFORE_ANOTHER_LAYOUT,
    MAX_GRAPHS,
    CapturedStepReport,
    refuse_what_cannot_be_captured,
)
from pytorch_accelerated.steps.step_facts import difference
from tests.support.capturing import CapturableSGD, CapturedOnCpu, CapturesTape, TapeCapturer
from tests.support.processes import run_on_ranks
from tests.support.recording import HOOKS, Recorder
from tests.support.reference import regression_data, sgd, tiny_model
from tests.support.resuming import SaveAndStop, assert_same

RANKS = Path(__file__).parent / "ranks"


@pytest.fixture(autouse=True)
def _tapes_need_a_cpu(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu") is None:
        pytest.skip("a tape does not see what autograd does in the threads of a GPU")  # hide the GPUs to run this


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2)).double()


def capturable(module: nn.Module) -> torch.optim.Optimizer:
    return CapturableSGD(module.parameters())


def train(
    *callbacks: Any,
    base: type[Trainer] = Trainer,
    is_captured: bool = True,
    capturer: TapeCapturer | None = None,
    make_model: Callable[[], nn.Module] = model,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = capturable,
    samples: int = 72,
    batch_size: int = 4,
    **arguments: Any,
) -> Trainer:
    """A run of two epochs with dropout and batch norm; `callbacks` are made anew for each."""
    module = make_model()
    kind = type(f"Captured{base.__name__}", (CapturesTape, base), {"capturer": capturer}) if is_captured else base
    made = [callback() for callback in callbacks]
    trainer: Trainer = kind(
        module,
        nn.MSELoss(),
        make_optimizer(module),
        callbacks=made,
        seed=3,
        compile_step="graph" if is_captured else None,
    )
    trainer.train(regression_data(samples), **{"num_epochs": 2, "per_device_batch_size": batch_size, **arguments})
    return trainer


def everything(trainer: Trainer) -> dict[str, Any]:
    """What must be the same in the end, to the bit."""
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "history": {n: trainer.run_history.get_metric_values(n) for n in trainer.run_history.get_metric_names()},
        "run_state": trainer.run_state.state_dict(),
        "torch": torch.default_generator.get_state(),
    }


def compare(*callbacks: Any, **arguments: Any) -> CapturedStepReport:
    """Run twice, captured and not; the results must be the same. Returns what the captured run says."""
    expected = everything(train(*callbacks, is_captured=False, **arguments))
    trainer = train(*callbacks, **arguments)
    assert_same(everything(trainer), expected)
    report = trainer.captured_step_report
    assert report is not None
    state = trainer.run_state
    assert report.captured_steps + report.shadow_steps + report.eager_steps == state.batches_in_epoch * state.epochs
    assert report.captured_updates + report.shadow_updates + report.eager_updates == state.updates
    return report


# ------------------------------------------------------------------------------------------------- equal to the bit


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_norm": 0.1}, {"gradient_clip_value": 0.01}])
def test_a_captured_run_equals_the_ordinary_one(steps: int, clip: dict[str, float]) -> None:
    report = compare(gradient_accumulation_steps=steps, **clip)
    assert report.fallback is None
    assert report.eager_optimizer is None
    # The first batch of an update writes gradients, the others add; an epoch's last update may be weighted otherwise.
    assert report.shadow_steps == (1 if steps == 1 else 2)
    assert report.shadow_updates == 1
    assert report.eager_steps == 3 * steps


def test_three_updates_are_eager_then_one_runs_both_ways_then_all_are_replayed() -> None:
    capturer = TapeCapturer()
    trainer = train(capturer=capturer, samples=40, num_epochs=1)
    assert trainer.captured_step_report == CapturedStepReport(
        captured_steps=6,
        shadow_steps=1,
        eager_steps=3,
        captured_updates=6,
        shadow_updates=1,
        eager_updates=3,
        graphs=2,
        layouts=1,
    )
    assert (capturer.captures, capturer.replays) == (2, 14)


class NotesWhere(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.capturer.noted.append(self.capturer.is_aside)  # type: ignore[attr-defined]
        return super().calculate_train_batch_loss(batch)


def test_what_comes_before_the_capture_runs_aside() -> None:
    capturer = TapeCapturer()
    noted: list[bool] = []
    capturer.noted = noted  # type: ignore[attr-defined]
    train(capturer=capturer, base=NotesWhere)
    # Three steps and the one to compare with; then the capture, for which the capturer itself is in charge.
    assert noted == [True, True, True, True, False]


@pytest.mark.parametrize(
    "create_scheduler_fn",
    [
        CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.5),
    ],
)
def test_a_schedule_reaches_the_replayed_optimizer(create_scheduler_fn: Any) -> None:
    report = compare(create_scheduler_fn=create_scheduler_fn)
    assert report.captured_updates == 32


def test_weights_of_batches_may_differ_without_another_graph() -> None:
    # Updates of three batches and of two: they weigh a third and a half.
    report = compare(samples=32, gradient_accumulation_steps=3, num_epochs=4)
    assert report.graphs == 3
    assert report.eager_steps == 8  # of three updates


def test_an_update_of_a_single_batch_is_weighted_right() -> None:
    # Seven batches: three, three and one.
    report = compare(samples=28, gradient_accumulation_steps=3, num_epochs=12)
    assert report.fallback is None
    assert report.shadow_steps == 3


def test_evaluation_between_steps_changes_nothing() -> None:
    report = compare(functools.partial(StepBasedEvaluationCallback, 5), eval_dataset=regression_data(7))
    assert report.recaptures == {}
    assert report.captured_steps == 32


def test_autocast_is_captured_with_the_step() -> None:
    def run(is_captured: bool) -> Trainer:
        module = model().float()
        kind, compile_step = (CapturedOnCpu, "graph") if is_captured else (Trainer, None)
        trainer = kind(
            module,
            nn.MSELoss(),
            sgd(module),
            callbacks=(),
            seed=3,
            mixed_precision="bf16",
            compile_step=compile_step,
        )
        inputs, targets = regression_data(40)
        trainer.train((inputs.float(), targets.float()), 2, per_device_batch_size=4, gradient_accumulation_steps=3)
        return trainer

    captured = run(is_captured=True)
    assert captured.captured_step_report is not None
    assert captured.captured_step_report.captured_steps > 0
    assert_same(everything(captured), everything(run(is_captured=False)))


class NoiseOfItsOwn(Trainer):
    """Draws from a generator that torch knows nothing of."""

    def training_run_start(self) -> None:
        self.noise = torch.Generator().manual_seed(5)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        noise = torch.randn(inputs.shape, generator=self.noise, dtype=inputs.dtype)
        return super().calculate_train_batch_loss((inputs + noise, targets))


def test_the_users_own_generators_continue() -> None:
    trainers = [train(base=NoiseOfItsOwn, is_captured=is_captured) for is_captured in (True, False)]
    assert_same(everything(trainers[0]), everything(trainers[1]))
    states = [trainer.noise.get_state() for trainer in trainers]  # type: ignore[attr-defined]
    assert torch.equal(*states)
    assert trainers[0].captured_step_report.captured_steps == 32  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------- what hooks and callbacks see


def test_events_come_in_the_same_order() -> None:
    orders = []
    for kind, options in ((Trainer, {}), (CapturedOnCpu, {"compile_step": "graph"})):
        # Hooks that are captured are not called again.
        hooks = [hook for hook in HOOKS if hook not in ("calculate_train_batch_loss", "backward_step")]
        recorder = Recorder([*hooks, "_update_loss_tracker"])
        recorder.on_optimizer_step_start = None  # type: ignore[assignment, method-assign]  # acting there keeps it eager
        trainer = recorder.trainer(base=kind, **options)
        trainer.train(regression_data(20), 2, regression_data(4), per_device_batch_size=2)
        orders.append(recorder.calls)
    assert orders[0] == orders[1]
    assert trainer.captured_step_report.captured_steps == 16  # type: ignore[union-attr]


class SeeOutputs(TrainerCallback):
    def __init__(self) -> None:
        self.outputs: list[int] = []
        self.losses: list[torch.Tensor] = []
        self.known_to_autograd: list[bool] = []
        self.gradients: list[bool] = []

    def on_train_step_end(self, trainer: Trainer, *, batch_output: dict[str, Any], **kwargs: Any) -> None:
        self.outputs.append(batch_output["model_outputs"].data_ptr())
        self.losses.append(batch_output["loss"].detach())
        self.known_to_autograd.append(batch_output["model_outputs"].requires_grad)
        batch_output["mine"] = "does not stay"
        assert "mine" not in vars(trainer)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.gradients += [parameter.grad is not None for parameter in trainer.model.parameters()]


def test_outputs_are_always_in_the_same_place_and_losses_can_be_kept() -> None:
    seen = SeeOutputs()
    train(lambda: seen, samples=40, num_epochs=1)
    assert len(set(seen.outputs[3:])) == 1
    assert not any(seen.known_to_autograd[3:])
    assert len({loss.data_ptr() for loss in seen.losses}) == 10
    ordinary = SeeOutputs()
    train(lambda: ordinary, samples=40, num_epochs=1, is_captured=False)
    assert torch.equal(torch.stack(seen.losses), torch.stack(ordinary.losses))


def test_gradients_are_none_after_an_update_as_ever() -> None:
    seen = SeeOutputs()
    train(lambda: seen)
    assert not any(seen.gradients)


class KeepsGradients(Trainer):
    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_that_are_set_to_zero_are_added_to(steps: int) -> None:
    report = compare(base=KeepsGradients, gradient_accumulation_steps=steps)
    assert report.captured_updates > 0


def test_parameters_that_are_not_optimized_do_not_matter() -> None:
    report = compare(make_optimizer=lambda module: CapturableSGD(module[4].parameters()))  # type: ignore[index]
    assert report.captured_updates == 32


# ----------------------------------------------------------------------------------------------------------- layouts


def test_a_short_last_batch_is_eager_until_it_has_come_often() -> None:
    epochs = BATCHES_BEFORE_ANOTHER_LAYOUT + 4
    report = compare(samples=10, num_epochs=epochs)
    assert report.layouts == 2
    # Three full batches, then sixteen short ones before it is captured, too.
    assert report.eager_steps == 3 + BATCHES_BEFORE_ANOTHER_LAYOUT
    assert report.shadow_steps == 2
    assert report.eager_updates == report.eager_steps  # gradients of both layouts are where the optimizer expects them


def test_a_batch_that_fits_is_eager_if_the_one_before_it_in_its_update_was() -> None:
    sizes = [4] * 20 + [3, 4] * 3
    report = compare(
        num_epochs=1,
        gradient_accumulation_steps=2,
        train_dataloader_kwargs={"batch_sampler": [list(range(size)) for size in sizes]},
    )
    assert report.captured_steps == 12
    assert report.eager_steps == 6 + 6


def test_no_more_than_a_few_graphs_are_kept() -> None:
    sizes = [*range(1, MAX_GRAPHS + 3)] * (BATCHES_BEFORE_ANOTHER_LAYOUT + 4)
    batches = [list(range(size)) for size in sizes]
    report = compare(make_model=tiny_model, num_epochs=1, train_dataloader_kwargs={"batch_sampler": batches})
    assert report.shadow_steps == MAX_GRAPHS
    assert report.layouts == MAX_GRAPHS + 2
    assert report.eager_steps > len(sizes) / 5


def test_the_report_says_that_layouts_never_came_back() -> None:
    batches = [list(range(size)) for size in range(1, 9)]
    trainer = train(num_epochs=1, make_model=tiny_model, train_dataloader_kwargs={"batch_sampler": batches})
    assert str(trainer.captured_step_report) == (
        "Replayed 0 of 8 batches and 0 of 8 optimizer steps; batches of 8 layouts"
    )


# --------------------------------------------------------------------------------------------------------- obstacles


class Waits(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        assert output["loss"].item() < 1e6
        return output


class Branches(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        if output["loss"] > 1:
            output["loss"] = output["loss"] * 0.5
        return output


class DrawsOnHost(Trainer):
    draw: Callable[[], float] = staticmethod(random.random)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        share = self.draw()
        inputs, targets = batch
        return super().calculate_train_batch_loss((share * inputs + (1 - share) * inputs.flip(0), targets))


class DrawsWithNumpy(DrawsOnHost):
    draw = staticmethod(lambda: float(np.random.beta(1, 1)))


class CountsItself(Trainer):
    calls = 0

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.calls += 1
        output = super().calculate_train_batch_loss(batch)
        output["loss"] = output["loss"] / self.calls
        return output


class KeepsTensor(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        self.last_outputs = output["model_outputs"].detach()
        return output


class ChangesParameters(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        with torch.no_grad():
            self.model[0].weight.mul_(0.99)
        return super().calculate_train_batch_loss(batch)


class CountsLate(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "num_items_in_batch": (batch[0][:, 0] > -9).sum()}


class HasOwnPasses(Trainer):
    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        super()._perform_forward_and_backward_passes(batch, step)


class ReplacesBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        self.mean: Any = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs - self.mean


@pytest.mark.parametrize(
    ("base", "because"),
    [
        (Waits, r"the host waits for the device in .*test_capturing.py, line \d+"),
        (Branches, r"the host waits for the device in .*test_capturing.py, line \d+"),
        (DrawsOnHost, "random numbers are drawn on the host"),
        (DrawsWithNumpy, "random numbers are drawn on the host"),
        (CountsItself, "`CapturedCountsItself.calls` is assigned anew in each step"),
        (KeepsTensor, "`CapturedKeepsTensor.last_outputs` is assigned anew in each step"),
        (ChangesParameters, "parameters are changed in `calculate_train_batch_loss`"),
        (CountsLate, "the items of an update are counted only while it runs; override `count_batch_items`"),
        (HasOwnPasses, "`_perform_forward_and_backward_passes` is overridden"),
    ],
)
def test_what_cannot_be_captured_runs_as_ever_with_one_warning_that_says_why(base: Any, because: str) -> None:
    with pytest.warns(UserWarning, match=because) as caught:
        report = compare_seeded(base=base)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert report.captured_steps == report.captured_updates == 0
    assert report.fallback is not None
    assert report.fallback in str(report)


def compare_seeded(**arguments: Any) -> CapturedStepReport:
    """For hooks that are called more often when a step runs both ways: compared without what they count themselves."""
    random.seed(1)
    np.random.seed(1)
    expected = everything(train(is_captured=False, **arguments))
    random.seed(1)
    np.random.seed(1)
    trainer = train(**arguments)
    if arguments.get("base") is not CountsItself:
        assert_same(everything(trainer), expected)
    assert trainer.captured_step_report is not None
    return trainer.captured_step_report


def test_a_buffer_that_is_replaced_is_noticed() -> None:
    report = compare(make_model=ReplacesBuffer)
    assert report.captured_steps == 0
    assert list(report.recaptures) == ["the parameters or buffers"]


def test_a_capture_that_fails_leaves_everything_as_it_was() -> None:
    with pytest.warns(
        UserWarning, match=r"capturing failed \(RuntimeError: operation not permitted .* line \d+\)"
    ) as caught:
        report = compare(base=Waits, capturer=TapeCapturer(notes_waits=False))
    assert len(caught) == 1
    assert report.captured_steps == 0


class WrongReplays(TapeCapturer):
    """Stands for a kernel that cannot be replayed."""

    def _replay(self, tape: Any) -> None:
        super()._replay(tape)
        tape.results()[-1].add_(1e-3)


def test_a_replay_that_differs_is_undone() -> None:
    with pytest.warns(UserWarning, match="a replay computed .* differently"):
        report = compare(capturer=WrongReplays())
    assert report.captured_steps == report.shadow_steps == 0


class OutOfMemory(TapeCapturer):
    def capture(self, function: Any, generators: Any) -> Any:
        result, replay = super().capture(function, generators)

        def replay_without_memory() -> None:
            replay()
            raise torch.OutOfMemoryError

        return result, replay_without_memory


def test_too_little_memory_for_the_comparison_does_not_end_the_run() -> None:
    with pytest.warns(UserWarning, match="memory does not suffice to run a step twice"):
        report = compare(capturer=OutOfMemory())
    assert report.captured_steps == 0


class Strange:
    def __init__(self, size: int) -> None:
        self.size = size


def test_a_batch_with_things_in_it_that_hide_tensors_is_not_captured() -> None:
    class UnpacksBatch(CapturedOnCpu):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return super().calculate_train_batch_loss(batch[0])

    def collate(rows: list[Any]) -> Any:
        return torch.utils.data.default_collate(rows), Strange(len(rows))

    module = tiny_model()
    trainer = UnpacksBatch(module, nn.MSELoss(), sgd(module), callbacks=(), compile_step="graph")
    with pytest.warns(UserWarning, match="the batch has a Strange in it, in which tensors cannot be seen"):
        trainer.train(list(zip(*regression_data(24), strict=True)), 1, per_device_batch_size=4, collate_fn=collate)


class DoublesLoss(TrainerCallback):
    first = 0

    def on_train_step_end(self, trainer: Trainer, *, batch_output: dict[str, Any], **kwargs: Any) -> None:
        if trainer.run_state.updates >= self.first:
            batch_output["loss"] = batch_output["loss"] * 2


class DoublesLossInPlace(DoublesLoss):
    def on_train_step_end(self, trainer: Trainer, *, batch_output: dict[str, Any], **kwargs: Any) -> None:
        if trainer.run_state.updates >= self.first:
            batch_output["loss"].mul_(2)


@pytest.mark.parametrize("callback", [DoublesLoss, DoublesLossInPlace])
def test_a_callback_that_changes_the_loss_keeps_the_step_eager(callback: Any) -> None:
    with pytest.warns(UserWarning, match=r"a callback changes batch_output\['loss'\]"):
        report = compare(callback)
    assert report.captured_steps == 0


@pytest.mark.parametrize("callback", [DoublesLoss, DoublesLossInPlace])
def test_a_callback_that_begins_to_change_the_loss_too_late_is_an_error(callback: Any) -> None:
    def later() -> Any:
        made = callback()
        made.first = 9
        return made

    with pytest.raises(HookOutputError, match="A callback changed batch_output"):
        train(later)


# ----------------------------------------------------------------------------------------------------------- changes


class At(TrainerCallback):
    """Does something to the trainer at the end of one update."""

    def __init__(self, action: Callable[[Trainer], Any], update: int = 7) -> None:
        self.action = action
        self.update = update

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.update:
            self.action(trainer)


def frozen_then_thawed(trainer: Trainer) -> None:
    layer = trainer.model[0]
    layer.requires_grad_(True)


def frozen_model() -> nn.Module:
    module = model()
    module[0].requires_grad_(False)  # type: ignore[index]
    return module


def replace_parameter(trainer: Trainer) -> None:
    layer = trainer.model[4]
    layer.weight.data = layer.weight.data.clone()


def replace_module(trainer: Trainer) -> None:
    trainer.model[3] = nn.ReLU()


def forget_parameter(trainer: Trainer) -> None:
    parameter = trainer.optimizer.param_groups[0]["params"].pop()
    del trainer.optimizer.state[parameter]


def add_group(trainer: Trainer) -> None:
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    trainer.model.register_parameter("extra", extra)
    trainer.optimizer.add_param_group({"params": [extra]})


@pytest.mark.parametrize(
    ("action", "change"),
    [
        (frozen_then_thawed, "`requires_grad`"),
        (replace_parameter, "the addresses of parameters or buffers"),
        (replace_module, "the modules"),
        (add_group, "the parameters or buffers"),
        (forget_parameter, "the optimizer's parameters"),
        (Trainer.invalidate_captured_step, "something by `invalidate_captured_step`"),
    ],
)
def test_after_a_change_the_step_is_captured_anew(action: Callable[[Trainer], Any], change: str) -> None:
    make_model = frozen_model if action is frozen_then_thawed else model
    report = compare(functools.partial(At, action), make_model=make_model)
    assert report.recaptures == {change: 1}
    assert f"changed meanwhile: {change} (1x)" in str(report)
    assert report.shadow_steps == 2
    # Three before the first capture; after the change twice as many.
    assert report.eager_steps == 3 + 6
    assert report.captured_steps == 36 - 9 - 2


def change_every_other_update(trainer: Trainer) -> None:
    trainer.model[1].train(trainer.run_state.updates % 4 < 2)


class EveryUpdate(At):
    def __init__(self, action: Callable[[Trainer], Any]) -> None:
        super().__init__(action)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.action(trainer)


def test_what_changes_all_the_time_is_never_captured() -> None:
    report = compare(functools.partial(EveryUpdate, change_every_other_update))
    assert report.graphs == 0
    assert list(report.recaptures) == ["training and evaluation mode"]


def set_momentum(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["momentum"] = 0.5


def test_a_number_of_the_optimizer_that_changes_is_noticed() -> None:
    report = compare(functools.partial(At, set_momentum))
    assert report.recaptures == {"'momentum' of parameter group 0": 1}
    assert report.shadow_updates == 2
    assert report.shadow_steps == 1  # the other graph stays


def test_loading_a_checkpoint_within_a_run_gives_what_it_gives_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "other.pt"
    train(is_captured=False, num_epochs=1).save_checkpoint(file)
    report = compare(functools.partial(At, lambda trainer: trainer.load_checkpoint(file)))
    assert report.recaptures == {"the optimizer's state": 1}
    assert report.shadow_updates == 2
    assert report.captured_steps == 32  # weights are loaded in place


@pytest.mark.parametrize("updates", [2, 4, 9, 18, 25])
def test_a_resumed_captured_run_equals_the_whole_one(updates: int, tmp_path: Path) -> None:
    whole = everything(train())
    train(functools.partial(SaveAndStop, tmp_path / "state", updates))
    trainer = train(resume_from=tmp_path / "state")
    assert_same(everything(trainer), whole)
    assert trainer.captured_step_report is not None
    assert trainer.captured_step_report.captured_steps == 36 - updates - 4


# ------------------------------------------------------------------------------------------------ the optimizer step


class OwnStep(Trainer):
    def optimizer_step(self) -> None:
        self.optimizer.step()


class OwnClipping(Trainer):
    def _clip_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters(), 0.1)


class LooksAtGradients(TrainerCallback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.norms.append(sum(float(parameter.grad.norm()) for parameter in trainer.model.parameters()))


class AcceptsNumbers(CapturableSGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        super().step()
        for group in self.param_groups:
            group["lr"] = float(group["lr"])


def with_hook(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = CapturableSGD(module.parameters())
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        ({"base": OwnStep}, "`optimizer_step` is overridden"),
        ({"base": OwnClipping}, "`_clip_gradients` is overridden"),
        ({"make_optimizer": sgd}, "parameter group 0 of SGD was not made with capturable=True"),
        ({"make_optimizer": with_hook}, "CapturableSGD has step hooks"),
    ],
)
def test_the_optimizer_stays_eager_where_it_cannot_be_captured(arguments: dict[str, Any], because: str) -> None:
    report = compare(**arguments)
    assert report.eager_optimizer == because
    assert because in str(report)
    assert report.captured_updates == 0
    assert report.captured_steps == 32


def test_a_learning_rate_that_is_a_number_keeps_the_optimizer_eager() -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = AcceptsNumbers(module.parameters())
        optimizer.param_groups[0]["lr"] = 0.1
        return optimizer

    report = compare(make_optimizer=make)
    assert report.eager_optimizer == "the learning rate of parameter group 0 is a number, not a tensor"
    assert report.captured_steps == 32


def test_a_callback_sees_each_gradient_before_an_eager_optimizer_step() -> None:
    seen, ordinary = LooksAtGradients(), LooksAtGradients()
    trainer = train(lambda: seen)
    train(lambda: ordinary, is_captured=False)
    assert seen.norms == ordinary.norms
    assert len(seen.norms) == 36
    assert trainer.captured_step_report is not None
    assert trainer.captured_step_report.eager_optimizer == "a callback acts at `on_optimizer_step_start`"
    assert trainer.captured_step_report.captured_steps == 32


# ---------------------------------------------------------------------------------------------- asking for it, saying


def test_without_a_cuda_device_one_warning_says_so_and_the_run_is_eager() -> None:
    module = tiny_model()
    trainer = Trainer(module, nn.MSELoss(), sgd(module), callbacks=(), seed=3, compile_step="graph")
    with pytest.warns(UserWarning, match="there is no CUDA device, only cpu") as caught:
        trainer.train(regression_data(8), 2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert trainer.captured_step_report is not None
    assert trainer.captured_step_report.eager_steps == 2


def test_who_does_not_ask_gets_no_report_and_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = train(PrintProgressCallback, is_captured=False)
    assert trainer.captured_step_report is None
    assert "eplayed" not in capsys.readouterr().out


def test_who_asks_gets_a_line_at_the_end_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    train(PrintProgressCallback)
    assert capsys.readouterr().out.splitlines()[-1] == "Replayed 32 of 36 batches and 32 of 36 optimizer steps"


def test_an_unknown_way_to_compile_a_step_is_refused() -> None:
    module = tiny_model()
    trainer = Trainer(module, nn.MSELoss(), sgd(module), callbacks=(), compile_step="inductor")
    with pytest.raises(ConfigurationError, match=r"`compile_step` is 'inductor'.* Choose 'graph', or None"):
        trainer.train(regression_data(8), 1)


class StepsLbfgs(CapturedOnCpu):
    def optimizer_step(self) -> None:
        raise AssertionError("the run must not begin")


def test_closures_are_refused_before_the_run() -> None:
    module = tiny_model()
    lbfgs = torch.optim.LBFGS(module.parameters())
    trainer = StepsLbfgs(module, nn.MSELoss(), lbfgs, callbacks=(), compile_step="graph")
    with pytest.raises(ConfigurationError, match="LBFGS decides as it goes how often"):
        trainer.train(regression_data(8), 1)


@pytest.mark.parametrize(
    ("scaler", "kind", "words"),
    [(object(), "NO", "fp16 .*'bf16'"), (None, "FSDP", "FSDP cuts the model into pieces.* DDP")],
)
def test_fp16_and_models_in_pieces_are_refused_before_the_run(scaler: Any, kind: str, words: str) -> None:
    trainer: Any = SimpleNamespace(
        compile_step="graph",
        optimizer=None,
        model=None,
        _accelerator=SimpleNamespace(scaler=scaler, distributed_type=SimpleNamespace(value=kind)),
    )
    with pytest.raises(ConfigurationError, match=words):
        refuse_what_cannot_be_captured(trainer)


def test_graphs_are_let_go_with_the_run() -> None:
    capturer = TapeCapturer()
    trainer = train(capturer=capturer)
    assert trainer._captured_step is None
    assert trainer.optimizer._optimizer_load_state_dict_post_hooks == {}
    trainer.invalidate_captured_step()  # between runs there is nothing to do
    assert trainer.captured_step_report == CapturedStepReport(32, 1, 3, 32, 1, 3, graphs=2, layouts=1)


# ------------------------------------------------------------------------------------------------------- comparison


def test_a_comparison_is_exact_where_algorithms_are_deterministic() -> None:
    expected = {"x": torch.tensor([1.0, 0.0]), "n": torch.tensor([3])}
    close = {"x": torch.tensor([1.0 + 5e-6, 0.0]), "n": torch.tensor([3])}
    assert difference(close, expected) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert difference(close, expected) == "a replay computed x differently"
        assert difference(expected, expected) is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("actual", "same"),
    [
        ({"x": torch.tensor([100.0, 1.0]), "y": torch.tensor([1e-6])}, True),  # the rest of cancelled terms
        ({"x": torch.tensor([100.0, 1.0]), "y": torch.tensor([1e-3])}, False),
        ({"x": torch.tensor([100.0, 1.0005]), "y": torch.tensor([0.0])}, True),
        ({"x": torch.tensor([100.0, 1.005]), "y": torch.tensor([0.0])}, False),
        ({"x": torch.tensor([100.0, float("nan")]), "y": torch.tensor([0.0])}, False),
        ({"x": torch.tensor([100.0, 1.0])}, False),
    ],
)
def test_a_comparison_forgives_rounding_and_nothing_else(actual: dict[str, torch.Tensor], same: bool) -> None:
    expected = {"x": torch.tensor([100.0, 1.0]), "y": torch.tensor([0.0])}
    assert (difference(actual, expected) is None) == same


def test_equal_losses_that_are_not_finite_are_equal() -> None:
    bad = {"x": torch.tensor([float("nan"), float("inf"), 1.0]), "flag": torch.tensor([True])}
    assert difference(bad, {name: tensor.clone() for name, tensor in bad.items()}) is None


# ------------------------------------------------------------------------------------------------------ several ranks


@pytest.mark.processes
def test_ranks_capture_together_and_equal_the_ordinary_run() -> None:
    run_on_ranks(RANKS / "capturing.py", 2)


# --------------------------------------------------------------------------------------------------------- on a GPU


def gpu_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2)).double()


def adamw(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.01), capturable=True, **options)


def train_on_gpu(
    *callbacks: Any,
    base: type[Trainer] = Trainer,
    is_captured: bool = True,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    **arguments: Any,
) -> Trainer:
    """18 updates or more in each of two epochs, the last one of them short."""
    module = gpu_model()
    made = [callback() for callback in callbacks]
    compile_step = "graph" if is_captured else None
    optimizer = make_optimizer(module)
    trainer = base(module, nn.MSELoss(), optimizer, callbacks=made, seed=3, compile_step=compile_step)
    trainer.train(regression_data(73), **{"num_epochs": 2, "per_device_batch_size": 4, **arguments})
    return trainer


def everything_on_gpu(trainer: Trainer) -> dict[str, Any]:
    return {**everything(trainer), "cuda": torch.cuda.get_rng_state()}


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["fused", "foreach"])
@pytest.mark.parametrize("steps", [1, 3])
def test_on_a_gpu_a_captured_run_equals_the_ordinary_one(way: str, steps: int) -> None:
    run = functools.partial(
        train_on_gpu,
        make_optimizer=lambda module: adamw(module, **{way: True}),
        gradient_accumulation_steps=steps,
        gradient_clip_norm=0.5,
        num_epochs=6,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
    )
    captured = run()
    assert_same(everything_on_gpu(captured), everything_on_gpu(run(is_captured=False)))
    report = captured.captured_step_report
    assert report is not None
    assert report.fallback is None
    assert report.eager_optimizer is None
    assert report.captured_steps > 70
    assert report.captured_updates > 20


class SeesDropout(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_train_step_end(self, trainer: Trainer, *, batch_output: dict[str, Any], **kwargs: Any) -> None:
        self.losses.append(batch_output["loss"].detach())


@pytest.mark.gpu
def test_on_a_gpu_dropout_draws_anew_in_each_replay() -> None:
    seen = SeesDropout()
    same_batches = [[0, 1, 2, 3]] * 20
    trainer = train_on_gpu(
        lambda: seen,
        make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.0),
        num_epochs=1,
        train_dataloader_kwargs={"batch_sampler": same_batches},
    )
    assert trainer.captured_step_report is not None
    assert trainer.captured_step_report.captured_steps == 16
    assert len(torch.stack(seen.losses).unique()) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("updates", [2, 4, 25])
def test_on_a_gpu_a_resumed_captured_run_equals_the_whole_one(updates: int, tmp_path: Path) -> None:
    whole = everything_on_gpu(train_on_gpu())
    train_on_gpu(functools.partial(SaveAndStop, tmp_path / "state", updates))
    trainer = train_on_gpu(resume_from=tmp_path / "state")
    assert_same(everything_on_gpu(trainer), whole)
    assert trainer.captured_step_report is not None
    assert trainer.captured_step_report.captured_updates > 0


class Synchronizes(Trainer):
    """Waits in a way that torch's own check for waits does not know."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        torch.cuda.synchronize()
        return output


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("base", "because"),
    [(Waits, r"the host waits for the device in .*, line \d+"), (Synchronizes, "capturing failed")],
)
def test_on_a_gpu_a_step_that_cannot_be_captured_does_no_harm(base: type[Trainer], because: str) -> None:
    with pytest.warns(UserWarning, match=because):
        trainer = train_on_gpu(base=base)
    assert_same(everything_on_gpu(trainer), everything_on_gpu(train_on_gpu(base=base, is_captured=False)))
    after = train_on_gpu()
    assert after.captured_step_report is not None
    assert after.captured_step_report.captured_steps > 0


@pytest.mark.gpu
def test_on_a_gpu_the_memory_of_graphs_is_given_back() -> None:
    allocated = []
    for _ in range(3):
        trainer = train_on_gpu()
        del trainer
        torch.cuda.empty_cache()
        allocated.append(torch.cuda.memory_reserved())
    assert allocated[2] <= allocated[1]
