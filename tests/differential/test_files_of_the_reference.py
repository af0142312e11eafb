"""What the reference package wrote is loaded, or refused with what to do."""

import json
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.schedulers import CosineLrScheduler, WSDLrScheduler
from tests.differential.both import FILES
from tests.differential.scenarios.common import IN_ORDER, dataset, train, trainer, weights_of

FACTORIES: dict[str, Any] = {
    "cosine": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
    "wsd": WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=0.5),
    "torch": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_portable_checkpoint_of_the_reference_loads(name: str):
    facts = json.loads((FILES / "facts.json").read_text(encoding="utf-8"))[name]
    made = trainer(lr=0.7)
    returned = made.load_checkpoint(FILES / f"{name}.pt")
    assert returned["note"] == name
    assert weights_of(made.model) == pytest.approx(facts["weights"], rel=1e-12)
    assert made.optimizer.param_groups[0]["lr"] == facts["rate"]


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.filterwarnings("ignore:.*scheduler:UserWarning")
def test_it_loads_into_a_trainer_that_has_a_scheduler_and_trains_on(name: str):
    made = train(trainer(lr=0.7), num_epochs=1, create_scheduler_fn=FACTORIES[name])
    made.load_checkpoint(FILES / f"{name}.pt")
    made.train(dataset(), 1, None, 4, train_dataloader_kwargs=IN_ORDER)
    assert all(torch.isfinite(parameter).all() for parameter in made.model.parameters())


def test_a_training_state_of_the_reference_is_refused_with_what_loads_instead():
    with pytest.raises(InvalidCheckpointError, match="load_checkpoint"):
        trainer().load_training_state(FILES / "state")
    with pytest.raises(InvalidCheckpointError, match="load_checkpoint"):
        train(trainer(), resume_from=FILES / "state")
