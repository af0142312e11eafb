"""The loaders of a run, as callbacks and subclasses see them."""

from typing import Any

from pytorch_accelerated.callbacks import TrainerCallback
from tests.differential.scenarios.common import attempt, dataset, grid, plain, trainer

NAMES = """
    batch_size drop_last num_workers pin_memory timeout persistent_workers prefetch_factor device total_batch_size
    total_dataset_length
""".split()
THERE = ["dataset", "sampler", "batch_sampler", "collate_fn", "generator", "worker_init_fn", "multiprocessing_context"]


class _Reads(TrainerCallback):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        for name, loader in {"train": trainer._train_dataloader, "eval": trainer._eval_dataloader}.items():
            self.seen[name] = {
                "length": len(loader),
                **{attribute: attempt(lambda a=attribute, o=loader: plain(getattr(o, a))) for attribute in NAMES},
                **{attribute: hasattr(loader, attribute) for attribute in THERE},
                "rows": attempt(lambda loader=loader: len(loader.dataset)),
                "the user's dataset": attempt(
                    lambda loader=loader, name=name: loader.dataset is getattr(trainer, f"{name}_dataset")
                ),
                "first batch": attempt(lambda loader=loader: [list(item.shape) for item in next(iter(loader))]),
                "batches": attempt(lambda loader=loader: sum(1 for _ in loader)),
                "batches again": attempt(lambda loader=loader: sum(1 for _ in loader)),
            }


def attributes() -> Any:
    def run(**kwargs: Any) -> Any:
        reads = _Reads()
        made = trainer(callbacks=[reads])
        made.train(
            dataset(11),
            1,
            dataset(5),
            4,
            train_dataloader_kwargs={"num_workers": 0, **kwargs},
            eval_dataloader_kwargs={"num_workers": 0, **kwargs},
        )
        return reads.seen

    return grid(run, {"defaults": {}, "in order": {"shuffle": False}, "drop last": {"drop_last": True}})
