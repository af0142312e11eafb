"""The README's table of speeds, in both languages; `benchmarks.pages` writes it into them.

The README has nothing but ratios to the hand-written loop. The times are in ``results.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.reporting import row_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "results.json"

# By the beginning of a table's title.
ROWS = {
    "README.md": {
        "An epoch over 60,000 samples in memory": "training, tensors in memory",
        "Training on an ordinary dataset, cheap rows (20,000 samples, batch 32, 0": "training, a `Dataset` of rows",
        "Training on an ordinary dataset, rows with random augmentation (20,000 samples, batch 32, 0": (
            "training, rows with random augmentation"
        ),
        "Training on an ordinary dataset, cheap rows (20,000 samples, batch 32, 2": "training, rows, 2 workers",
        "Training on texts with a padding collate": "training, texts that are padded",
        "Training on a datasets.Dataset, without a format": "training, a `datasets.Dataset`",
        "Evaluation of an ordinary dataset": "evaluation, a `Dataset` of rows",
    },
    "README.zh-CN.md": {
        "An epoch over 60,000 samples in memory": "训练，内存中的张量",
        "Training on an ordinary dataset, cheap rows (20,000 samples, batch 32, 0": "训练，逐行读取的 `Dataset`",
        "Training on an ordinary dataset, rows with random augmentation (20,000 samples, batch 32, 0": "训练，随机增强",
        "Training on an ordinary dataset, cheap rows (20,000 samples, batch 32, 2": "训练，2 个 worker 进程",
        "Training on texts with a padding collate": "训练，需要填充的文本",
        "Training on a datasets.Dataset, without a format": "训练，`datasets.Dataset`",
        "Evaluation of an ordinary dataset": "评估，逐行读取的 `Dataset`",
    },
}
COLUMNS = {
    "ours, no callbacks": "this library",
    "ours, default callbacks": "this library, bars and table",
    "ours, Hugging Face face, lean": "this library, Hugging Face API",
    "ignite, lean": "ignite",
    "skorch, lean": "skorch",
    "Lightning, lean": "Lightning",
    "transformers, lean": "transformers",
    "pytorch-accelerated 0.1.61, lean": "pytorch-accelerated 0.1.61",
}


CHINESE_COLUMNS = {
    "this library": "本库",
    "this library, bars and table": "本库，带进度条和表格",
    "this library, Hugging Face API": "本库，Hugging Face API",
}


def table(results: Mapping[str, Any], page: str) -> str:
    """The table of a page, as Markdown.

    Args:
        results: the content of ``results.json``.
        page: the name of the page.
    """
    tables = [table for case in results["results"].values() for table in case]
    names = [CHINESE_COLUMNS.get(name, name) if page == "README.zh-CN.md" else name for name in COLUMNS.values()]
    lines = [row_of(["", *names]), row_of(["---", *["---:"] * len(COLUMNS)])]
    for beginning, label in ROWS[page].items():
        compared = next(table["compared"] for table in tables if table["title"].startswith(beginning))
        lines.append(row_of([label, *(f"{compared[way]:.2f}" if way in compared else "" for way in COLUMNS)]))
    return "\n".join(lines) + "\n"
