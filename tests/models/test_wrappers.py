"""A model is compiled in place, as a whole or by its repeated blocks, and the names of its parameters stay."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.ranks.wrappers import compile_in_place, repeated_blocks
from tests.chaos.size import in_release
from tests.support.reference import assert_same_parameters, regression_data, sgd

EAGER = {"backend": "eager"}
# torch hides this one from users in a way that does not work where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class CountGraphs:
    """A backend that runs graphs as they are, and counts how many it gets."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.norm(torch.tanh(self.layer(inputs)))
        return inputs + outputs


class Tower(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


def train(
    model: nn.Module, compile_model: Any, *, batches: Any = None, eval_dataset: Any = None, num_epochs: int = 2
) -> Trainer:
    trainer = Trainer(model, nn.MSELoss(), sgd(model), callbacks=(), seed=3, compile_model=compile_model)
    kwargs = None if batches is None else {"batch_sampler": batches}
    trainer.train(
        regression_data(24), num_epochs, eval_dataset, per_device_batch_size=4, train_dataloader_kwargs=kwargs
    )
    return trainer


@pytest.mark.parametrize("compile_model", [EAGER, {**EAGER, "regional": True}], ids=["whole", "regional"])
def test_a_compiled_model_trains_to_the_same_weights_under_the_same_names(compile_model: Any, tmp_path: Any) -> None:
    plain, compiled = Tower().double(), Tower().double()
    train(plain, False)
    trainer = train(compiled, compile_model)
    assert_same_parameters(compiled, plain, tolerance=0)
    trainer.save_checkpoint(tmp_path / "compiled.pt")
    assert list(torch.load(tmp_path / "compiled.pt")["model_state_dict"]) == list(Tower().state_dict())
    train(fresh := Tower().double(), False, num_epochs=1)
    Trainer(fresh, nn.MSELoss(), sgd(fresh), callbacks=()).load_checkpoint(tmp_path / "compiled.pt")
    assert_same_parameters(fresh, plain, tolerance=0)


def test_blocks_of_one_class_are_compiled_once() -> None:
    train(model := Tower().double(), {"backend": (backend := CountGraphs()), "regional": True})
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    # The first block gets inputs that depend on parameters, as the others do.
    assert backend.graphs == 1


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Block(2), Block(2))


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh()), []),
        (nn.Sequential(Block(2), nn.Tanh(), Block(2)), ["0", "2"]),
        (nn.Sequential(Block(2), Stage()), ["1.parts.0", "1.parts.1"]),
        (nn.ModuleList([Stage(), Stage()]), ["0", "1"]),
        (nn.ModuleList([Direct(), Direct()]), ["0", "1"]),
        (nn.ModuleDict({"one": Block(2), "two": Block(2)}), []),
        (nn.ModuleList([nn.ModuleList([Block(2), Block(2)]) for _ in range(2)]), ["0.0", "0.1", "1.0", "1.1"]),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2), ["layers.0", "layers.1"]),
    ],
)
def test_repeated_blocks_are_the_outermost_of_their_class_in_a_list(model: nn.Module, blocks: list[str]) -> None:
    names = {module: name for name, module in model.named_modules()}
    assert [names[block] for block in repeated_blocks(model)] == blocks


def test_compiled_modules_are_left_alone() -> None:
    model = Tower()
    compile_in_place(model, EAGER)
    compiled = model._compiled_call_impl
    compile_in_place(model, True)
    assert model._compiled_call_impl is compiled


@in_release
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it imports its compiler
def test_inductor_gives_the_weights_of_the_ordinary_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, compiled = Tower().double(), Tower().double()
    train(plain, False)
    train(compiled, {"regional": True})
    assert_same_parameters(compiled, plain)
    assert compiled.blocks[0]._compiled_call_impl is not None
