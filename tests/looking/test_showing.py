"""What the model sees, as `show_batch` and `show_predictions` show it; and what notebooks show of results."""

import re
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.recipes import cross_validate
from pytorch_accelerated.record.text import format_number

SIZE = 8
PICTURES = torch.rand(12, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(12) % 4
NUMBERS = torch.rand(12, 3, generator=torch.Generator().manual_seed(1))


class Augmented(Dataset[Any]):
    """Each row differs each time that it is fetched."""

    def __len__(self) -> int:
        return len(PICTURES)

    def __getitem__(self, index: int) -> Any:
        return PICTURES[index] + torch.randn(3, SIZE, SIZE), CLASSES[index]


class Noting(nn.Module):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[torch.Tensor] = []
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4))

    def forward(self, pictures: torch.Tensor) -> Any:
        self.got.append(pictures.clone())
        return self.layers(pictures)


def make_trainer(model: nn.Module, loss: Any = None, kind: type[Trainer] = Trainer, **kwargs: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return kind(model, loss or nn.CrossEntropyLoss(), optimizer, **{"callbacks": (), "seed": 3, **kwargs})


def cells_of(page: str) -> list[list[str]]:
    text = page.replace("<wbr>", "")
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_shown_is_to_the_bit_what_the_model_gets_in_the_first_update(workers):
    arguments: dict[str, Any] = {"per_device_batch_size": 4, "gradient_accumulation_steps": 2}
    arguments["train_dataloader_kwargs"] = {"num_workers": workers}
    model = Noting()
    trainer = make_trainer(model)
    before = [each.clone() for each in model.parameters()]
    shown = trainer.show_batch(Augmented(), 1, **arguments)
    assert all(map(torch.equal, before, model.parameters()))
    assert trainer.run_state.updates == 0
    model.got.clear()
    trainer.train(Augmented(), 1, **arguments)
    assert torch.equal(shown.batch[0], model.got[0])
    assert torch.equal(shown.inputs[0], model.got[0])
    assert not any(torch.equal(shown.batch[0], other) for other in model.got[1:])


def test_pictures_targets_and_predictions_stand_next_to_each_other(tmp_path):
    trainer = make_trainer(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4)))
    data, names = (PICTURES, CLASSES), ["cat", "dog", "emu", "fox"]
    shown = trainer.show_predictions(data, per_device_batch_size=6, class_names=np.array(names), kinds=None)
    predicted = [names[each] for each in trainer.predict(data).argmax(1)[:6]]
    header, *rows = str(shown).splitlines()
    assert header.split() == ["[0]", "[1]", "prediction"]
    assert [row.split()[-2:] for row in rows] == [[names[i % 4], predicted[i]] for i in range(6)]
    figure = shown.plot(tmp_path / "batch.png")
    assert [axes.get_title() for axes in figure.axes] == [
        f"[1]: {names[i % 4]}\nprediction: {predicted[i]}" for i in range(6)
    ]
    assert torch.equal(torch.tensor(figure.axes[2].images[0].get_array()), PICTURES[2].movedim(0, 2))
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")
    assert shown._repr_html_().startswith("<img ")


def test_masks_lie_over_their_pictures():
    trainer = make_trainer(nn.Conv2d(3, 4, 1))
    data = PICTURES, (PICTURES.sum(1) * 4 / 3.01).long()
    figure = trainer.show_predictions(data, samples=2).plot()
    assert [axes.get_title() for axes in figure.axes] == ["[1]", "prediction"] * 2
    masks = [torch.tensor(axes.images[1].get_array()) for axes in figure.axes]
    predicted = trainer.predict(data).argmax(1)
    assert all(map(torch.equal, masks, [data[1][0], predicted[0], data[1][1], predicted[1]]))


def test_scores_of_two_classes_or_of_labels_are_shown_as_what_they_are_for():
    def predictions_of(model: nn.Module, loss_func: nn.Module, targets: torch.Tensor, **arguments: Any) -> Any:
        trainer = make_trainer(
            nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, targets.shape[1]), model), loss_func
        )
        shown = trainer.show_predictions((PICTURES, targets), per_device_batch_size=12, **arguments)
        return [row.split("  ")[-1] for row in str(shown).splitlines()[1:]], trainer.predict(PICTURES)

    found, scores = predictions_of(
        nn.Identity(), nn.BCEWithLogitsLoss(), (CLASSES[:, None] > 1).float(), class_names=["low", "high"]
    )
    assert found == [["low", "high"][score > 0] for score in scores[:, 0]]
    found, scores = predictions_of(nn.Sigmoid(), nn.BCELoss(), (CLASSES[:, None] > 1).float())
    assert found == [str(int(score > 0.5)) for score in scores[:, 0]]
    found, scores = predictions_of(nn.Identity(), nn.BCEWithLogitsLoss(), (NUMBERS > 0.5).float())
    assert found == [", ".join(str(int(score > 0)) for score in row) for row in scores]

    trainer = make_trainer(nn.Conv2d(3, 1, 1), nn.BCEWithLogitsLoss())
    data = PICTURES, (PICTURES.sum(1, keepdim=True) > 1.5).float()
    masks = [axes.images[1].get_array() for axes in trainer.show_predictions(data, samples=1).plot().axes[:1]]
    assert torch.equal(torch.tensor(masks[0]), (trainer.predict(data)[0, 0] > 0).long())


class Doubling(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        outputs = self.model(batch["series"] * 2)[0]
        return {"loss": outputs.mean(), "model_outputs": outputs, "batch_size": len(outputs)}


def test_what_is_not_recognised_is_named_with_what_to_say_and_what_a_hook_changes_is_shown():
    trainer = make_trainer(nn.GRU(5, 2, batch_first=True), kind=Doubling)
    texts = [f"text {number}" for number in range(12)]
    rows = [{"series": torch.full((7, 5), float(i)), "ids": torch.tensor([i, i]), "text": texts[i]} for i in range(12)]
    arguments: dict[str, Any] = {"per_device_batch_size": 3, "train_dataloader_kwargs": {"shuffle": False}}
    shown = trainer.show_batch(rows, decode=lambda ids: f"<{ids[0]}>", **arguments)
    header, *lines = str(shown).splitlines()
    assert header.split() == ["['ids']", "['text']"]
    assert [line.split(maxsplit=1) for line in lines[:3]] == [[f"<{i}>", f"text {i}"] for i in range(3)]
    assert lines[3].startswith("['series']: ")
    assert "3" in lines[3]
    assert lines[3].endswith("; `kinds={\"['series']\": ...}` says which of image, mask, text, row it is")
    assert lines[4].startswith("model input 0: ")
    assert cells_of(shown._repr_html_())[1] == ["&lt;0&gt;", "text 0"]
    asked = trainer.show_batch(rows, kinds={"['series']": "image", "model input 0": "row"}, **arguments)
    assert "7 x 5" in str(asked)
    assert "2.000, 2.000" in str(asked)
    for kinds, words in (({"['series']": "sound"}, "one of image, mask"), ({"pixels": "image"}, "The batch has")):
        with pytest.raises(ConfigurationError, match=words):
            trainer.show_batch(rows, kinds=kinds, **arguments)


def test_a_trainer_says_in_five_lines_what_it_is():
    trainer = make_trainer(nn.Linear(3, 1), nn.MSELoss())
    assert str(trainer).splitlines() == [
        "Trainer of Linear, 4 of 4 parameters trained, on cpu",
        "  loss function: MSELoss",
        "  optimizer:     SGD, lr 0.1, weight_decay 0",
        "  callbacks:     none",
        "  history:       no metrics",
    ]
    lazy = Trainer(nn.LazyLinear(1), nn.MSELoss(), None, callbacks=())
    assert str(lazy).startswith("Trainer of LazyLinear, 0 of 0 parameters trained")
    history = trainer.train((NUMBERS, NUMBERS[:, :1]), 2)
    loss = history.get_latest_metric("train_loss_epoch")
    assert str(trainer).splitlines()[-1] == f"  history:       epoch 2: train_loss_epoch {loss:.4g}"


def test_histories_folds_and_predictions_are_tables_in_notebooks(tmp_path):
    def make(fold: int) -> Trainer:
        torch.manual_seed(fold)
        return make_trainer(nn.Linear(3, 1), nn.MSELoss(), metrics=["mae"])

    data = NUMBERS, NUMBERS[:, :1]
    halves = [list(range(6)), list(range(6, 12))]
    result = cross_validate(make, data, [(halves[1], halves[0]), (halves[0], halves[1])], 2)
    header, *rows = cells_of(result.histories[0]._repr_html_())
    assert header[:3] == ["epoch", "update", "train_loss_epoch"]
    losses = result.histories[0].get_metric_values("train_loss_epoch")
    assert [row[:3] for row in rows] == [[str(e), str(e), format_number(loss)] for e, loss in enumerate(losses, 1)]
    header, *rows = cells_of(result._repr_html_())
    errors = [history.get_latest_metric("eval_mae") for history in result.histories]
    shown = [*errors, statistics.mean(errors), statistics.stdev(errors)]
    assert [row[0] for row in rows] == ["0", "1", "mean", "deviation"]
    assert [row[header.index("eval_mae")] for row in rows] == list(map(format_number, shown))
    assert [line.split() for line in str(result).splitlines()] == [header, *rows]
    stored = result.trainers[0].predict(data, output_path=tmp_path / "predictions")
    _, *rows = cells_of(stored._repr_html_())
    assert rows == [[str(i), format_number(stored.load()[i].item())] for i in range(10)]
