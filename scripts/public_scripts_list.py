"""The scripts that `public_scripts.py` runs: the data that each needs, and the changed paths and sizes.

Every substitution must match, and changes only a path, a size or a download.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublicScript:
    """A script, and how it is made small and kept off the network.

    Attributes:
        path: its path in the folder of examples.
        data: the data it needs, as names of functions of `public_scripts_data.py`.
        arguments: its command line.
        substitutions: by file, texts and their replacements.
        why: why its numbers differ, if they do.
    """

    path: str
    data: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    substitutions: tuple[tuple[str, str, str], ...] = ()
    why: str = ""

    @property
    def shown_changes(self) -> str:
        """The changes, for the table."""
        arguments = [f"`{' '.join(self.arguments)}`"] if self.arguments else []
        return "; ".join([*arguments, *(f"`{old}` → `{new}`" for _, old, new in self.substitutions)]) or "none"


_DETECTION = "vision/faster_rcnn"
_TRANSFER = "vision/transfer_learning"
_TIMM = "vision/using_timm_components"

SCRIPTS = (
    PublicScript(
        "core/train_mnist.py",
        ("mnist",),
        substitutions=(("core/train_mnist.py", "[50000, 5000, 5000]", "[1300, 100, 100]"),),
    ),
    PublicScript(
        "core/custom_callback_event.py",
        ("mnist",),
        substitutions=(("core/custom_callback_event.py", "[55000, 5000]", "[1400, 100]"),),
    ),
    PublicScript(
        "core/train_with_metrics_in_callback.py",
        ("mnist",),
        substitutions=(("core/train_with_metrics_in_callback.py", "[50000, 5000, 5000]", "[1300, 100, 100]"),),
    ),
    PublicScript(
        "core/train_with_metrics_in_loop.py",
        ("mnist",),
        substitutions=(("core/train_with_metrics_in_loop.py", "[50000, 5000, 5000]", "[1300, 100, 100]"),),
    ),
    PublicScript(
        f"{_TRANSFER}/pytorch_tutorial_finetune.py",
        ("ants_and_bees",),
        substitutions=(
            (f"{_TRANSFER}/pytorch_tutorial_finetune.py", "weights=ResNet18_Weights.DEFAULT", "weights=None"),
            (f"{_TRANSFER}/pytorch_tutorial_finetune.py", "num_epochs=8", "num_epochs=2"),
            (f"{_TRANSFER}/pytorch_tutorial_finetune.py", "224", "32"),
        ),
        why="images are cropped at random",
    ),
    PublicScript(
        f"{_TRANSFER}/pets_finetune.py",
        ("pets",),
        arguments=("--batch_size", "8", "--image_size", "32"),
        substitutions=(
            (f"{_TRANSFER}/pets_finetune.py", "pretrained=True", "pretrained=False"),
            (f"{_TRANSFER}/pets_finetune.py", "num_epochs=6", "num_epochs=2"),
        ),
        why="images are cropped at random; the second run ends at its first update there",
    ),
    PublicScript(
        f"{_TRANSFER}/progressive_resizing.py",
        ("imagenette",),
        substitutions=(
            (
                f"{_TRANSFER}/progressive_resizing.py",
                "num_epochs=2, train_image_size=64, eval_image_size=64",
                "num_epochs=1, train_image_size=32, eval_image_size=32",
            ),
            (
                f"{_TRANSFER}/progressive_resizing.py",
                "num_epochs=3, train_image_size=128, eval_image_size=128",
                "num_epochs=1, train_image_size=40, eval_image_size=40",
            ),
            (
                f"{_TRANSFER}/progressive_resizing.py",
                "num_epochs=6, train_image_size=224, eval_image_size=224",
                "num_epochs=2, train_image_size=48, eval_image_size=48",
            ),
        ),
        why="images are cropped at random; later runs end at their first update there",
    ),
    PublicScript(
        f"{_TIMM}/all_timm_components.py",
        ("imagenette",),
        arguments=("--batch_size", "8", "--num_epochs", "2", "--model", "resnet10t"),
        substitutions=(
            (f"{_TIMM}/all_timm_components.py", "pretrained: bool = True", "pretrained: bool = False"),
            (f"{_TIMM}/all_timm_components.py", '"input_size": data_config["input_size"]', '"input_size": (3, 32, 32)'),
        ),
        why="images are cropped at random",
    ),
    PublicScript(
        f"{_TIMM}/train_mixup_ema.py",
        ("imagenette",),
        arguments=("--batch_size", "8", "--num_epochs", "2", "--image_size", "32"),
        substitutions=((f"{_TIMM}/train_mixup_ema.py", '"resnet50d"', '"resnet10t"'),),
        why="images are mixed at random",
    ),
    PublicScript(
        f"{_DETECTION}/train_cars.py",
        ("cars",),
        arguments=("--batch_size", "2", "--num_epochs", "1", "--image_size", "64"),
        substitutions=(
            (f"{_DETECTION}/train_cars.py", "num_warmup_epochs=5", "num_warmup_epochs=0"),
            (f"{_DETECTION}/train_cars.py", "num_cooldown_epochs=5", "num_cooldown_epochs=0"),
            (f"{_DETECTION}/frcnn/model.py", "min_size=image_size", "weights_backbone=None, min_size=image_size"),
            (f"{_DETECTION}/frcnn/model.py", "box_batch_size_per_image=512", "box_batch_size_per_image=16"),
            (f"{_DETECTION}/frcnn/model.py", "box_detections_per_img=100", "box_detections_per_img=5"),
        ),
        why="images are moved at random",
    ),
    PublicScript(
        "nlp/hf_bert_glue_mrpc.py",
        ("glue",),
        arguments=("--num_epochs", "2", "--batch_size", "8"),
        substitutions=(
            ("nlp/hf_bert_glue_mrpc.py", '"bert-base-cased"', '"data/tiny-bert"'),
            ("nlp/hf_bert_glue_mrpc.py", 'load_dataset("glue", "mrpc")', 'load_dataset("data/mrpc")'),
            ("nlp/hf_bert_glue_mrpc.py", 'evaluate.load("glue", "mrpc")', 'evaluate.load("data/glue_metric")'),
        ),
    ),
)
