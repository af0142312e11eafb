"""Each function of `compat` does with the installed libraries what it says."""

import importlib
import inspect
import os
import pkgutil
import re
import signal
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader

import pytorch_accelerated.ranks.compat
from pytorch_accelerated.ranks.compat import accelerate as compat_accelerate
from pytorch_accelerated.ranks.compat import torch as compat
from pytorch_accelerated.ranks.compat.extras import (
    division_of_stream,
    function_of_scorer,
    parts_of_stream,
    reductions_of,
    set_update_count,
    unsplittable_layers,
)


def test_every_function_has_a_test_that_names_it() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    for module in pkgutil.iter_modules(pytorch_accelerated.ranks.compat.__path__):
        functions = vars(importlib.import_module(f"pytorch_accelerated.ranks.compat.{module.name}"))
        for name, function in functions.items():
            if inspect.isfunction(function) and not name.startswith("_"):
                assert re.search(rf"def test_\w*{name}", tests), f"compat/{module.name}.py: {name}"


# ------------------------------------------------------------------------------------------------------------- torch


@pytest.mark.skipif(os.name != "posix", reason="Windows has no status of signals")
def test_import_what_exit_imports(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # with `-c`, Python ends otherwise
    script.write_text(
        "import signal\n"
        "import torch._dynamo\n"
        "from pytorch_accelerated.ranks.compat.torch import import_what_exit_imports\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import_what_exit_imports()\n"
        "raise KeyboardInterrupt\n"
    )
    status = subprocess.run([sys.executable, script], stderr=subprocess.DEVNULL).returncode
    assert status == -signal.SIGINT


def tensors() -> list[torch.Tensor]:
    return [torch.tensor([3.0, 4.0]), torch.tensor([[6.0], [8.0]])]


def test_copy_all() -> None:
    targets = [torch.zeros(2), torch.zeros(2, 1)]
    compat.copy_all(targets, tensors())
    assert all(map(torch.equal, targets, tensors()))
    compat.copy_all([], [])


def test_add_all() -> None:
    sums = tensors()
    compat.add_all(sums, tensors())
    assert all(torch.equal(twice, 2 * once) for twice, once in zip(sums, tensors(), strict=True))


def test_move_towards() -> None:
    moved = [torch.zeros(2), torch.zeros(2, 1)]
    compat.move_towards(moved, tensors(), 0.5)
    assert all(torch.equal(2 * half, whole) for half, whole in zip(moved, tensors(), strict=True))
    compat.move_towards([], [], 0.5)


@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0)])
def test_scale_all(factor: Any) -> None:
    scaled = tensors()
    compat.scale_all(scaled, factor)
    assert all(torch.equal(twice, 2 * once) for twice, once in zip(scaled, tensors(), strict=True))
    compat.scale_all([], factor)


def test_norms_of() -> None:
    assert [float(norm) for norm in compat.norms_of(tensors())] == [5.0, 10.0]
    assert compat.norms_of([]) == ()


def test_version_of() -> None:
    tensor = torch.zeros(2)
    before = compat.version_of(tensor)
    tensor += 1
    assert before is not None
    assert compat.version_of(tensor) == before + 1
    with torch.inference_mode():
        assert compat.version_of(torch.zeros(2)) is None
    assert compat.version_of(3) is None


def test_acts_in_backward() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.register_hook(lambda gradient: gradient)
    assert not compat.acts_in_backward(parameter)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert compat.acts_in_backward(parameter)
    handle.remove()
    assert not compat.acts_in_backward(parameter)


def test_stored_values() -> None:
    dense = torch.zeros(2)
    assert compat.stored_values(dense) is dense
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    assert not sparse.is_coalesced()
    compat.stored_values(sparse).mul_(2)
    assert sparse.to_dense().tolist() == [6.0, 0.0, 0.0]


def test_is_batch_norm() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(compat.is_batch_norm(kind(2)) for kind in kinds)
    assert not compat.is_batch_norm(nn.LayerNorm(2))


def test_forward_hook_stores() -> None:
    module = nn.Linear(1, 1)
    after = module.register_forward_hook(lambda *args: None)
    before = module.register_forward_pre_hook(lambda *args: None)
    assert [list(store) for store in compat.forward_hook_stores(module)] == [[after.id], [before.id]]


def test_tensor_stores_are_live_as_is_child_store_and_is_persistent_knows_the_state_dict() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("passing", torch.ones(1), persistent=False)
    parameters, buffers = compat.tensor_stores(module)
    assert {name: id(value) for name, value in parameters.items()} == {
        name: id(value) for name, value in module.named_parameters()
    }
    assert list(buffers) == [name for name, _ in module.named_buffers()]
    module.weight = nn.Parameter(torch.zeros(2))
    assert parameters["weight"] is module.weight
    names = [name for name in (*parameters, *buffers) if compat.is_persistent(module, name)]
    assert names == list(module.state_dict())
    model = nn.Sequential(module)
    assert compat.child_store(model) == {"0": module}
    model.append(nn.Linear(1, 1))
    assert len(compat.child_store(model)) == 2


def test_uncompiled_and_the_wrapped_names() -> None:
    model = nn.Linear(1, 1)
    compiled: Any = torch.compile(model, backend="eager")
    assert compat.uncompiled(compiled) is model
    assert compat.uncompiled(model) is model
    assert compat.WRAPPED_NAMES[type(compiled).__name__] in dict(compiled.named_children())


def test_the_wrapped_names_are_those_of_checkpointed_layers_and_replicas() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_sharded_data_parallel

    wrapper = checkpoint_wrapper(nn.Linear(1, 1))
    named = [kind for kind in type(wrapper).__mro__ if kind.__name__ in compat.WRAPPED_NAMES]
    assert compat.WRAPPED_NAMES[named[0].__name__] in dict(wrapper.named_children())
    assert compat.WRAPPED_NAMES["DataParallel"] in dict(nn.DataParallel(nn.Linear(1, 1)).named_children())
    assert compat.WRAPPED_NAMES["FullyShardedDataParallel"] == vars(fully_sharded_data_parallel)["FSDP_WRAPPED_MODULE"]


def test_the_loading_methods_are_called_by_torch() -> None:
    called = []

    class Own(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            called.append("set_extra_state")

        def _load_from_state_dict(self, *args: Any) -> None:
            called.append("_load_from_state_dict")
            super()._load_from_state_dict(*args)  # type: ignore[no-untyped-call]

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            called.append("load_state_dict")
            return super().load_state_dict(*args, **kwargs)

    Own(1, 1).load_state_dict(Own(1, 1).state_dict())
    assert sorted(called) == sorted(compat.LOADING_METHODS)


def test_compile_call_compiles_and_is_compiled_tells() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert not compat.is_compiled(model)
    compat.compile_call(model, backend=backend)
    assert compat.is_compiled(model)
    assert torch.equal(model(torch.ones(1, 2)), model.forward(torch.ones(1, 2)))
    assert len(graphs) == 1


def test_module_versions_are_those_of_a_state_dict_and_set_module_versions_gives_them_to_another() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    versions = compat.module_versions(state)
    assert versions[""]["version"] == nn.BatchNorm1d._version
    old = OrderedDict((name, value) for name, value in state.items() if name != "num_batches_tracked")
    assert compat.module_versions(old) is None
    nn.BatchNorm1d(2).load_state_dict(old)  # converted as a state of the first version
    compat.set_module_versions(old, versions)
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.BatchNorm1d(2).load_state_dict(old)


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_found_infinite(value: float) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(parameter.sum() * value).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    assert compat.found_infinite(scaler, optimizer) == (value == float("inf"))


def loader_of(size: int, **arguments: Any) -> DataLoader[Any]:
    dataset: Any = range(size)
    return DataLoader(dataset, **arguments)


def test_parts_of_schedule() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    parts = [torch.optim.lr_scheduler.StepLR(optimizer, steps) for steps in (1, 2)]
    sequence = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])  # type: ignore[arg-type]
    assert list(compat.parts_of_schedule(sequence)) == parts
    assert list(compat.parts_of_schedule(torch.optim.lr_scheduler.ChainedScheduler(parts, optimizer))) == parts
    assert not compat.parts_of_schedule(parts[0])


def test_note_step() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    compat.note_step(optimizer)
    schedule.step()  # without a warning that no step was taken before


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
def test_pinned() -> None:
    batch = compat.pinned({"x": [torch.zeros(2)]})
    assert batch["x"][0].is_pinned()


def test_kept_pass_is_the_one_whose_workers_of_a_loader_stay_until_end_workers() -> None:
    loader = loader_of(4, batch_size=2, num_workers=1, persistent_workers=True)
    assert compat.kept_pass(loader) is None
    batches = iter(loader)
    assert compat.kept_pass(loader) is batches
    workers = compat.workers_of(batches)
    assert [worker.is_alive() for worker in workers] == [True]
    compat.end_workers(loader, iter([]))
    assert compat.kept_pass(loader) is batches
    compat.end_workers(loader, batches)
    assert compat.kept_pass(loader) is None
    assert not workers[0].is_alive()


def test_stop_workers() -> None:
    batches = iter(loader_of(4, num_workers=1))
    workers = compat.workers_of(batches)
    compat.stop_workers(batches)
    assert not workers[0].is_alive()


# -------------------------------------------------------------------------------------------------------- accelerate


@pytest.mark.parametrize("batch_size", [2, None])
def test_given_loader(batch_size: int | None) -> None:
    given: Any = DataLoader(torch.arange(6), batch_size, collate_fn=torch.as_tensor)  # type: ignore[arg-type]
    prepared = Accelerator(cpu=True).prepare(given)
    found = compat_accelerate.given_loader(prepared)
    assert type(found) is DataLoader
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in given]
    assert (found.dataset, found.collate_fn) == (given.dataset, given.collate_fn)
    assert compat_accelerate.given_loader(given) is given


def test_has_process_state() -> None:
    compat_accelerate.forget_settings()
    Accelerator(cpu=True)
    assert compat_accelerate.has_process_state()


def test_forget_settings() -> None:
    compat_accelerate.forget_settings()
    Accelerator(cpu=True, mixed_precision="bf16")
    compat_accelerate.forget_settings()
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
    compat_accelerate.forget_settings()


def test_forget_other_precision_only_if_a_trainer_asked() -> None:
    for is_trainers in (False, True):
        compat_accelerate.forget_settings()
        Accelerator(cpu=True, mixed_precision="bf16")
        if is_trainers:
            compat_accelerate.remember_settings(Accelerator(), trainer_asked=True)
        compat_accelerate.forget_other_precision("bf16")
        assert AcceleratorState().mixed_precision == "bf16"
        compat_accelerate.forget_other_precision(None)
        assert Accelerator(cpu=True).mixed_precision == ("no" if is_trainers else "bf16")
    compat_accelerate.forget_settings()


def test_remember_settings_and_restore_settings() -> None:
    compat_accelerate.forget_settings()
    first = Accelerator(cpu=True, mixed_precision="bf16")
    compat_accelerate.remember_settings(first, trainer_asked=True)
    compat_accelerate.forget_settings()
    second = Accelerator(cpu=True, mixed_precision="no")
    AcceleratorState._shared_state["deepspeed_plugins"] = {}  # as if it trained with DeepSpeed
    compat_accelerate.remember_settings(second, trainer_asked=True)
    for accelerator, precision in ((first, "bf16"), (second, "no")):
        compat_accelerate.restore_settings(accelerator)
        assert accelerator.mixed_precision == AcceleratorState().mixed_precision == precision
    compat_accelerate.forget_settings()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_forget_prepared(precision: str) -> None:
    compat_accelerate.forget_settings()
    accelerator, model = Accelerator(cpu=True, mixed_precision=precision), nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    before = set(vars(nn.Linear(1, 1)))
    assert compat_accelerate.forget_prepared(accelerator, model) == (precision == "bf16")
    assert set(vars(model)) - before <= {"forward"}
    assert not compat_accelerate.forget_prepared(accelerator, model)
    assert accelerator.prepare(model) is model
    compat_accelerate.forget_settings()


# ------------------------------------------------------------------------------- torchmetrics, datasets, transformers


def test_reductions_of_a_metric_and_set_update_count() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.MeanMetric()
    metric.update(torch.tensor([1.0, 3.0]))
    assert float(metric.compute()) == 2.0
    assert set(reductions_of(metric)) == set(metric.metric_state)
    assert all(float(reduction(torch.tensor([1.0, 2.0]))) == 3.0 for reduction in reductions_of(metric).values())
    metric.mean_value = torch.tensor(8.0)
    set_update_count(metric, 5)
    assert metric.update_count == 5
    assert float(metric.compute()) == 4.0


def test_parts_of_stream() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset().map(dict).shuffle(seed=3)
    names = [type(part).__name__ for part in parts_of_stream(stream)]
    assert any(name.startswith("Buffer") or "Shuffle" in name for name in names), names
    assert "MappedExamplesIterable" in names
    assert names[-1].endswith("ExamplesIterable")
    assert list(parts_of_stream(object())) == [None]


def test_division_of_stream() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset()
    assert division_of_stream(stream) is division_of_stream(object()) is None
    assert division_of_stream(split_dataset_by_node(stream, 1, 2).map(dict).shuffle(seed=3)) == (1, 2)


def test_unsplittable_layers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=4, n_positions=4)
    assert list(unsplittable_layers(transformers.GPT2LMHeadModel(config))) == ["GPT2Block"]
    assert unsplittable_layers(nn.Linear(1, 1)) == ()


def test_function_of_scorer() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    assert function_of_scorer(metrics.get_scorer("f1_macro")) is metrics.f1_score
    assert function_of_scorer(metrics.f1_score) is None
