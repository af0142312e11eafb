"""Several optimizers as one, compared with loops by hand; and optimizers with modes."""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import ModelEmaCallback, SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from pytorch_accelerated.extras import optimizers as of_extras
from pytorch_accelerated.extras.optimizers import param_groups
from pytorch_accelerated.schedulers import one_cycle

INPUTS = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS @ torch.tensor([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]], dtype=torch.float64)
ROWS = torch.utils.data.TensorDataset(INPUTS, TARGETS)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def muon_and_adamw(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    return {"muon": torch.optim.Muon(matrices, lr=0.02), "adamw": torch.optim.AdamW(others, lr=0.01)}


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


class InOrder(Trainer):
    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        return {**super().get_default_train_dl_kwargs(batch_size), "shuffle": False}


def trained_by_hand(
    updates: int, *, accumulation: int, clip: Callable[[dict[str, Any], nn.Module], object]
) -> nn.Module:
    model = new_model()
    optimizers = muon_and_adamw(model)
    schedulers = [halving(optimizers["muon"]), decaying(optimizers["adamw"])]
    per_update = 4 * accumulation
    for update in range(updates):
        start = update % (len(INPUTS) // per_update) * per_update
        rows = slice(start, start + per_update)
        (model(INPUTS[rows]) - TARGETS[rows]).square().mean().backward()
        clip(optimizers, model)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return model


def clip_each(optimizers: dict[str, Any], model: nn.Module) -> None:
    for name, limit in {"muon": 0.3, "adamw": 0.1}.items():
        parameters = [each for group in optimizers[name].param_groups for each in group["params"]]
        nn.utils.clip_grad_norm_(parameters, limit)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("limit", "clip"),
    [
        (None, lambda optimizers, model: None),
        ({"muon": None, "adamw": None}, lambda optimizers, model: None),
        (0.3, lambda optimizers, model: nn.utils.clip_grad_norm_(model.parameters(), 0.3)),
        ({"muon": 0.3, "adamw": 0.1}, clip_each),
    ],
    ids=["unclipped", "no limit for any", "clipped together", "clipped by itself"],
)
@pytest.mark.parametrize("form", [dict, lambda optimizers: list(optimizers.values())], ids=["by name", "in order"])
def test_several_optimizers_make_the_updates_of_a_loop_by_hand(
    form: Any, limit: Any, clip: Any, accumulation: int
) -> None:
    if isinstance(limit, dict) and form is not dict:
        limit = list(limit.values())
    model = new_model()
    trainer = InOrder(model, nn.MSELoss(), form(muon_and_adamw(model)), callbacks=())
    factories: Any = form({"muon": halving, "adamw": decaying})
    trainer.train(
        ROWS,
        4,
        per_device_batch_size=4,
        gradient_accumulation_steps=accumulation,
        gradient_clip_norm=limit,
        create_scheduler_fn=factories,
    )
    updates = 4 * len(INPUTS) // (4 * accumulation)
    expected = trained_by_hand(updates, accumulation=accumulation, clip=clip)
    torch.testing.assert_close(flat(model), flat(expected), rtol=1e-12, atol=0)
    assert trainer.run_state.updates == updates


def test_a_state_of_other_optimizers_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = new_model()
    trainer = Trainer(model, nn.MSELoss(), muon_and_adamw(model), callbacks=())
    trainer.train(ROWS, 1)
    trainer.save_training_state(tmp_path / "state")
    other = new_model()
    before = flat(other)
    resumed = Trainer(other, nn.MSELoss(), torch.optim.AdamW(other.parameters()), callbacks=())
    with pytest.raises(CheckpointError, match="parameters in its groups"):
        resumed.load_training_state(tmp_path / "state")
    assert torch.equal(flat(other), before)


def twins(model: nn.Sequential, names: str) -> dict[str, torch.optim.Optimizer]:
    """Two optimizers of one kind and of parameters of the same shapes: nothing but their names tells them apart."""
    parts = {"a": model[0], "b": model[1]}
    return {name: torch.optim.Adam(parts[name].parameters(), lr={"a": 0.1, "b": 0.01}[name]) for name in names}


@pytest.mark.parametrize("kept", ["state", "checkpoint", "state dict", "state without names"])
def test_a_dict_of_optimizers_is_saved_and_loaded_by_name(kept: str, tmp_path: Path) -> None:
    rows = torch.utils.data.TensorDataset(INPUTS, INPUTS.flip(1))
    schedules: Any = {"a": halving, "b": decaying}

    def trainer(names: str) -> Trainer:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
        saving = SaveTrainingStateCallback(tmp_path / names)
        return Trainer(model, nn.MSELoss(), twins(model, names), callbacks=[saving], seed=2)

    first = trainer("ab")
    first.train(rows, 1, create_scheduler_fn=schedules)
    first.save_checkpoint(tmp_path / "model.pt")
    first.train(rows, 2, create_scheduler_fn=schedules, resume_from=tmp_path / "ab")
    saved: Any = torch.load(tmp_path / "model.pt")["optimizer_state_dict"]
    for names in ("ab", "ba"):
        second = trainer(names)
        if kept == "state":
            reverse = {name: schedules[name] for name in names}
            second.train(rows, 2, create_scheduler_fn=reverse, resume_from=tmp_path / "ab")
            assert torch.equal(flat(second.model), flat(first.model))
            continue
        if kept == "checkpoint":
            second.load_checkpoint(tmp_path / "model.pt")
        elif kept == "state dict":
            second.optimizer.load_state_dict(saved)
        else:  # as earlier versions wrote it: in order
            second.optimizer.load_state_dict({name: saved[name] for name in ("state", "param_groups")})
        whose = {"a": 0, "b": 1} if kept != "state without names" else dict(zip(names, range(2), strict=True))
        for name, place in whose.items():
            found = second.optimizer[name].state_dict()
            assert found["param_groups"][0]["lr"] == saved["param_groups"][place]["lr"]
            for number, entry in found["state"].items():
                assert torch.equal(entry["exp_avg"], saved["state"][2 * place + number]["exp_avg"])


def test_states_of_optimizers_with_other_names_are_refused_and_those_of_a_list_are_taken_in_order(
    tmp_path: Path,
) -> None:
    model = new_model()
    trainer = Trainer(model, nn.MSELoss(), muon_and_adamw(model), callbacks=())
    trainer.train(ROWS, 1, create_scheduler_fn={"muon": halving})
    trainer.save_training_state(tmp_path / "state")
    for form, is_refused in ((dict, False), (lambda made: list(made.values()), False), ("renamed", True)):
        other = new_model()
        made = muon_and_adamw(other)
        optimizers = {"m": made["muon"], "a": made["adamw"]} if form == "renamed" else form(made)  # type: ignore[operator]
        resumed = Trainer(other, nn.MSELoss(), optimizers, callbacks=())
        with pytest.raises(CheckpointError, match="muon, adamw, but here are m, a") if is_refused else nullcontext():
            resumed.load_training_state(tmp_path / "state")
        assert torch.equal(flat(other), flat(model)) != is_refused


def test_schedules_of_earlier_versions_are_loaded_in_order() -> None:
    model = new_model()
    trainer = Trainer(model, nn.MSELoss(), muon_and_adamw(model), callbacks=())
    trainer.train(ROWS, 1, create_scheduler_fn={"muon": halving})
    saved = trainer.scheduler.state_dict()
    trainer.train(ROWS, 1, create_scheduler_fn={"muon": halving})
    earlier = {"schedulers": [{**saved["muon"], "last_epoch": 7}, None]}
    trainer.scheduler.load_state_dict(earlier)
    assert trainer.scheduler.state_dict()["muon"]["last_epoch"] == 7


@pytest.mark.parametrize("max_lr", [None, 0.05, [0.05, 0.02]])
def test_one_cycle_serves_several_optimizers_as_one_schedule_for_each(max_lr: Any) -> None:
    model, expected = new_model(), new_model()
    trainer = InOrder(model, nn.MSELoss(), muon_and_adamw(model), callbacks=())
    trainer.train(ROWS, 2, per_device_batch_size=4, create_scheduler_fn=one_cycle(max_lr))
    by_hand = muon_and_adamw(expected)
    rates = max_lr if isinstance(max_lr, list) else [0.02, 0.01] if max_lr is None else [max_lr] * 2
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(one, rate, total_steps=12)
        for one, rate in zip(by_hand.values(), rates, strict=True)
    ]
    for start in 2 * list(range(0, len(INPUTS), 4)):
        rows = slice(start, start + 4)
        (expected(INPUTS[rows]) - TARGETS[rows]).square().mean().backward()
        for each in by_hand.values():
            each.step()
            each.zero_grad()
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(flat(model), flat(expected), rtol=1e-12, atol=0)


def test_looks_before_a_run_leave_several_optimizers_as_they_were() -> None:
    model = new_model()
    optimizers = muon_and_adamw(model)
    trainer = Trainer(model, nn.MSELoss(), optimizers, callbacks=(), seed=1)
    trainer.train(ROWS, 1)
    weights, states = flat(model), copy.deepcopy([each.state_dict() for each in optimizers.values()])
    summary = trainer.summary(ROWS)
    trainer.find_lr(ROWS, num_updates=20)
    trainer.preflight(ROWS, 1, create_scheduler_fn={"muon": halving})
    assert torch.equal(flat(model), weights)
    for before, optimizer in zip(states, optimizers.values(), strict=True):
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for number, entry in before["state"].items():
            assert all(
                torch.equal(torch.as_tensor(after["state"][number][key]), torch.as_tensor(entry[key])) for key in entry
            )
        assert type(optimizer).step is getattr(optimizer.step, "__func__", None)
    values = [value for each in optimizers.values() for entry in each.state.values() for value in entry.values()]
    assert summary.optimizer_bytes == sum(value.nbytes for value in values)


def test_an_update_that_is_not_finite_is_skipped_by_all_of_them() -> None:
    class Bad(InOrder):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * (float("nan") if self.run_state.updates == 2 else 1.0)}

    model = new_model()
    trainer = Bad(model, nn.MSELoss(), muon_and_adamw(model), callbacks=())
    with pytest.warns(UserWarning, match="cannot be applied"):
        trainer.train(ROWS, 1, nonfinite_policy="skip")
    assert flat(model).isfinite().all()
    assert trainer.run_state.skipped_updates == 1


@pytest.mark.parametrize(
    ("make", "arguments", "error", "words"),
    [
        (lambda model: [], {}, ConfigurationError, "no optimizer in it"),
        (lambda model: [torch.optim.SGD], {}, ArgumentTypeError, "instances"),
        (
            lambda model: {"a": torch.optim.SGD(model[0].parameters())},
            {},
            ConfigurationError,
            "none of them has '2.weight', '2.bias'",
        ),
        (
            lambda model: [torch.optim.SGD(model.parameters()), torch.optim.SGD(model[0].parameters())],
            {},
            ConfigurationError,
            "more than one has '0.weight', '0.bias'",
        ),
        (
            muon_and_adamw,
            {"create_scheduler_fn": {"sgd": halving}},
            ConfigurationError,
            "sgd, but there are muon, adamw",
        ),
        (muon_and_adamw, {"create_scheduler_fn": [halving, "x"]}, ArgumentTypeError, "pass a function"),
        (muon_and_adamw, {"create_scheduler_fn": one_cycle([0.1])}, ConfigurationError, "1 rates for 2 groups"),
        (muon_and_adamw, {"gradient_clip_norm": [1.0]}, ConfigurationError, "1 values for 2 optimizers"),
        (
            muon_and_adamw,
            {"gradient_clip_norm": {"sgd": 1.0}},
            ConfigurationError,
            "for the optimizers sgd, but there are muon, adamw",
        ),
        (
            muon_and_adamw,
            {"gradient_clip_norm": {"muon": 0}},
            ConfigurationError,
            r"`gradient_clip_norm\['muon'\]` is 0",
        ),
    ],
)
def test_what_does_not_fit_the_model_or_its_optimizers_is_named(
    make: Any, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = new_model()
    with pytest.raises(error, match=words):
        Trainer(model, nn.MSELoss(), make(model), callbacks=()).train(ROWS, 1, **arguments)


def test_groups_of_parameters_by_pattern_without_decay_and_by_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 4))
            self.embed = nn.Linear(3, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
            self.head = nn.Linear(4, 2)

    net = Net()
    groups = {
        each["name"]: each for each in param_groups(net, {"^head": {"lr": 1.0}}, lr=0.1, no_decay=True, layer_decay=0.5)
    }
    rates = {name: group["lr"] for name, group in groups.items()}
    assert rates == {
        "others, layer 0": 0.1 * 0.125,
        "others, layer 0, no decay": 0.1 * 0.125,
        "others, layer 1": 0.1 * 0.25,
        "others, layer 1, no decay": 0.1 * 0.25,
        "others, layer 2": 0.1 * 0.5,
        "others, layer 2, no decay": 0.1 * 0.5,
        "^head, layer 3": 1.0,
        "^head, layer 3, no decay": 1.0,
    }
    assert [each is net.token or each is net.embed.weight for each in groups["others, layer 0"]["params"]] == [
        True,
        True,
    ]
    assert all(("weight_decay" in group) == name.endswith("no decay") for name, group in groups.items())
    assert sum(len(group["params"]) for group in groups.values()) == len(list(net.parameters()))
    torch.optim.AdamW(groups.values(), lr=0.1)
    with pytest.raises(ConfigurationError, match="'neck'"):
        param_groups(net, {"neck": {}})
    with pytest.raises(ConfigurationError, match="needs `lr`"):
        param_groups(net, layer_decay=0.5)


class WithClosure(InOrder):
    """As on the page about optimizers."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.batch = batch
        return super().calculate_train_batch_loss(batch)

    def optimizer_step(self) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = super(WithClosure, self).calculate_train_batch_loss(self.batch)["loss"]
            loss.backward()
            return loss

        self.optimizer.step(closure)


def test_lbfgs_makes_the_steps_of_a_loop_by_hand_and_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(resume_from: Path | None = None, **limits: Any) -> torch.Tensor:
        model = new_model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        saving = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
        trainer = WithClosure(model, nn.MSELoss(), optimizer, callbacks=[saving])
        trainer.train(ROWS, 2, per_device_batch_size=8, resume_from=resume_from, **limits)
        return flat(model)

    expected = new_model()
    optimizer = torch.optim.LBFGS(expected.parameters(), lr=0.5, max_iter=4)
    for start in 2 * list(range(0, len(INPUTS), 8)):
        rows = slice(start, start + 8)

        def closure(rows: slice = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (expected(INPUTS[rows]) - TARGETS[rows]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    whole = run()
    torch.testing.assert_close(whole, flat(expected), rtol=1e-12, atol=0)
    assert torch.equal(run(tmp_path / "step_2"), whole)


# ------------------------------------------------------------------------------------------------------------- modes

schedulefree = pytest.importorskip("schedulefree")


def free(model: nn.Module) -> Any:
    return schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05, warmup_steps=2)


def wrapped(model: nn.Module) -> Any:
    """Its mode is in no state."""
    return schedulefree.ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), momentum=0.8)


def test_a_schedule_free_run_is_that_of_its_own_loop_by_hand() -> None:
    expected = new_model()
    optimizer = free(expected)
    losses = []
    for _ in range(3):
        optimizer.train()
        for start in range(0, len(INPUTS), 8):
            rows = slice(start, start + 8)
            (expected(INPUTS[rows]) - TARGETS[rows]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        losses.append((expected(INPUTS) - TARGETS).square().mean().item())

    model = new_model()
    trainer = InOrder(model, nn.MSELoss(), free(model), callbacks=())
    trainer.train(ROWS, 3, ROWS, per_device_batch_size=8)
    torch.testing.assert_close(flat(model), flat(expected), rtol=1e-12, atol=0)
    recorded = trainer.run_history.get_metric_values("eval_loss_epoch")
    assert recorded == pytest.approx(losses, rel=1e-12)
    assert trainer.evaluate(ROWS)["evaluation_loss"] == pytest.approx(losses[-1], rel=1e-12)
    torch.testing.assert_close(trainer.predict(INPUTS), expected(INPUTS).detach(), rtol=1e-12, atol=0)


class Looking(TrainerCallback):
    """Evaluates, predicts, saves and averages within the epoch, and keeps what it saw."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: dict[str, torch.Tensor] = {}

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == 4:
            trainer.save_checkpoint(self.path)
            trainer.request_evaluation()


def test_what_is_saved_and_evaluated_within_an_epoch_are_the_evaluation_weights_and_training_goes_on_to_the_bit(
    tmp_path: Path,
) -> None:
    def run(*callbacks: Any) -> tuple[nn.Module, Trainer]:
        model = new_model()
        trainer = InOrder(model, nn.MSELoss(), free(model), callbacks=callbacks)
        trainer.train(ROWS, 2, ROWS, per_device_batch_size=4)
        return model, trainer

    plain, _ = run()
    average = ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt")
    looked, trainer = run(Looking(tmp_path / "model.pt"), average)
    assert torch.equal(flat(looked), flat(plain))

    by_hand = new_model()
    optimizer = free(by_hand)
    optimizer.train()
    averaged = flat(by_hand)
    for update, start in zip(range(12), itertools.cycle(range(0, len(INPUTS), 4)), strict=False):
        rows = slice(start, start + 4)
        (by_hand(INPUTS[rows]) - TARGETS[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        averaged = averaged.lerp(flat(by_hand), 0.5)
        if update == 3:
            saved = flat(by_hand)
            loss = (by_hand(INPUTS) - TARGETS).square().mean().item()
        optimizer.train()
    loaded = new_model()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt")["model_state_dict"])
    torch.testing.assert_close(flat(loaded), saved, rtol=1e-9, atol=0)
    assert trainer.run_history.get_metric_values("intermediate_eval_loss") == pytest.approx([loss], rel=1e-9)
    assert average.ema_model is not None
    torch.testing.assert_close(flat(average.ema_model.module), averaged, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (muon_and_adamw, {"create_scheduler_fn": {"muon": halving}, "gradient_clip_norm": np.float32(1.0)}),
        (free, {"eval_dataset": ROWS}),
        (wrapped, {"eval_dataset": ROWS, "nonfinite_policy": "skip"}),
        (lambda model: {"a": wrapped(model[0]), "b": free(model[2])}, {}),
    ],
    ids=["several optimizers", "schedule-free", "schedule-free around another", "several schedule-free"],
)
def test_a_run_resumes_at_every_update_to_the_bit(make: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    def run(folder: Path, resume_from: Path | None = None, **limits: Any) -> torch.Tensor:
        model = new_model()
        saving = SaveTrainingStateCallback(folder, save_every_n_steps=1)
        trainer = Trainer(model, nn.MSELoss(), make(model), callbacks=[saving], seed=3)
        trainer.train(ROWS, 2, per_device_batch_size=6, resume_from=resume_from, **arguments, **limits)
        assert type(trainer.run_config.gradient_clip_norm) in (float, type(None))
        return flat(model)

    whole = run(tmp_path / "whole")
    states = sorted((tmp_path / "whole").glob("step_*"))
    assert len(states) == 8
    for state in states:
        assert torch.equal(run(tmp_path / f"from {state.name}", state), whole), state
    run(tmp_path / "cut", max_num_train_steps=3)
    assert torch.equal(run(tmp_path / "resumed", tmp_path / "cut"), whole)


def test_one_with_modes_among_several_optimizers_is_switched() -> None:
    model = new_model()
    optimizers = [free(model[0]), torch.optim.AdamW(model[2].parameters())]
    Trainer(model, nn.MSELoss(), optimizers, callbacks=()).train(ROWS, 2, ROWS)
    assert not optimizers[0].param_groups[0]["train_mode"]


class Attentive(nn.Module):
    """An embedding, an encoder and a head, which may share the matrix of the embedding."""

    def __init__(self, *, tied: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(blocks))
        self.lm_head = nn.Linear(4, 10, bias=not tied)
        if tied:
            self.lm_head.weight = self.tokens.weight


class Unordered(nn.Module):
    def __init__(self, last: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        setattr(self, last, nn.Linear(4, 1))


def names_of(model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> list[list[str]]:
    names = {id(each): name for name, each in model.named_parameters()}
    return [[names[id(each)] for group in one.param_groups for each in group["params"]] for one in optimizers.values()]


CONVOLUTION = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 2))
DEEP = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2))
_OF_ATTENTION = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
IN_BLOCKS = [f"blocks.{number}.{name}" for number in range(2) for name in _OF_ATTENTION]


@pytest.mark.parametrize(
    ("model", "patterns", "hidden"),
    [
        (DEEP, None, ["0.1.weight", "1.weight"]),
        (CONVOLUTION, None, ["2.weight"]),
        (Attentive(), None, IN_BLOCKS),
        (Attentive(tied=True), None, IN_BLOCKS),
        (Unordered("head"), ["^first", "head"], ["second.weight"]),
        (Unordered("last"), ["^first", "^last"], ["second.weight"]),
    ],
)
def test_muon_gets_the_hidden_matrices_and_adamw_the_rest(
    model: nn.Module, patterns: Any, hidden: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    of_muon, of_adamw = names_of(model, of_extras.muon_and_adamw(model, lr=1e-3, adamw=patterns))
    assert of_muon == hidden
    assert sorted(of_muon + of_adamw) == sorted(name for name, _ in model.named_parameters())
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["Muon", "AdamW"]
    assert said[0].endswith(f": {', '.join(hidden)}")


def test_of_many_layers_the_kinds_of_parameters_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    of_extras.muon_and_adamw(Attentive(blocks=6), lr=1e-3)
    assert capsys.readouterr().out.splitlines()[0].endswith(", ".join(f"blocks.*.{name}" for name in _OF_ATTENTION))


def test_what_is_unclear_about_layers_is_asked() -> None:
    for model, words in ((Unordered("last"), "is its head"), (Unordered("head"), "is its input layer")):
        with pytest.raises(ConfigurationError, match=rf"Which part of the Unordered {words}\?.*adamw=\["):
            of_extras.muon_and_adamw(model, lr=1e-3)
    for patterns, words in ((["frist"], "is not in any name"), (["."], "nothing is left")):
        with pytest.raises(ConfigurationError, match=words):
            of_extras.muon_and_adamw(DEEP, lr=1e-3, adamw=patterns)


def test_updates_of_muon_and_adamw_are_those_of_both_by_hand() -> None:
    models = [copy.deepcopy(DEEP).double() for _ in range(2)]
    trainer = Trainer(models[0], nn.MSELoss(), of_extras.muon_and_adamw(models[0], lr=0.01), callbacks=(), seed=1)
    trainer.train(ROWS, 2, per_device_batch_size=8, train_dataloader_kwargs={"shuffle": False})
    parameters = dict(models[1].named_parameters())
    hidden = [parameters.pop(name) for name in ("0.1.weight", "1.weight")]
    by_hand: list[torch.optim.Optimizer] = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.1),
    ]
    for _, start in itertools.product(range(2), range(0, 24, 8)):
        nn.functional.mse_loss(models[1](INPUTS[start : start + 8]), TARGETS[start : start + 8]).backward()
        for optimizer in by_hand:
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
