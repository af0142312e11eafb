"""The figures of the layout are counted right, and its limits hold."""

from pathlib import Path

import pytest

from scripts.house import MISSED, ROOT, House, figures, plain_update

TRAINER = """
from pytorch_accelerated.hooks import Hooks

class Trainer(Hooks):
    _own: int

    def train(self):
        self._hidden = self.shown = self.model
        self.calculate_train_batch_loss()
        self.backward_step()
"""
HOOKS = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer

class Hooks:
    def __init__(self, other):
        self.model = self.shown = other._of_another_class

    def _hook(self):
        super()._own

def look(trainer: "Trainer"):
    return trainer._hook, trainer._hidden, trainer.shown
"""


@pytest.fixture
def small(tmp_path: Path) -> House:
    """A package of three files."""
    folder = tmp_path / "src" / "pytorch_accelerated"
    folder.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name, text in {"__init__": "", "trainer": TRAINER, "hooks": HOOKS}.items():
        (folder / f"{name}.py").write_text(text)
    return House(tmp_path)


def test_private_names_are_those_of_all_classes_of_the_trainer(small: House) -> None:
    assert small.private_names(small.bases(small.central["Trainer"])) == {"_own", "_hidden", "_hook"}


def test_attributes_count_that_methods_in_two_files_use(small: House) -> None:
    assert small.attributes_across_files() == 2  # `model` and `shown`


def test_only_code_outside_of_a_class_reaches_in(small: House) -> None:
    assert [access.split()[1] for access in small.accesses_from_outside()] == ["trainer._hook", "trainer._hidden"]


def test_circles_and_copies_are_found(small: House) -> None:
    assert small.circles(with_types=False) == []
    assert small.circles(with_types=True) == [["pytorch_accelerated.hooks", "pytorch_accelerated.trainer"]]
    assert small.copies_of_the_computation() == 1


def test_an_update_is_measured_between_two_forward_passes() -> None:
    update = plain_update(ROOT)
    names = {name for _, name in update.functions}
    assert "Step.finish" in names
    assert not any("Counting" in name or name == "train" for name in names)
    assert any("scaler is None" in decision for decision in update.decisions(House(ROOT)))


def test_figures_keep_to_their_limits_or_to_what_has_been_reached() -> None:
    found = figures(House(ROOT))
    allowed = {figure.name: MISSED.get(figure.name, (figure.limit, ""))[0] for figure in found}
    assert MISSED.keys() <= allowed.keys()
    limited = [(figure.name, figure.now, most) for figure in found if (most := allowed[figure.name]) is not None]
    worse = [f"{name}: {now}, at most {most}" for name, now, most in limited if now > most]
    assert not worse, f"{worse}. `scripts/house.py` says how each figure is counted."
