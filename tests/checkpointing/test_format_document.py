"""`docs/checkpoint_format.md` names all that the code writes."""

import json
import re

import torch

from pytorch_accelerated.states import codec
from tests.chaos.saved_runs import trained
from tests.support.processes import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "checkpoint_format.md").read_text(encoding="utf-8")


def rows(header: str) -> list[str]:
    """The first cells of the table below a header, without the marks of code."""
    (table,) = re.findall(rf"^{re.escape(header)}.*\n\| --- .*\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    return re.findall(r"^\| (.*?) \|", table.replace("`", ""), re.MULTILINE)


def test_every_kind_of_tagged_value_is_documented_and_no_other():
    assert sorted(rows('| `"$"` |')) == sorted(codec._Decoder({}, "")._kinds)


def test_every_part_of_a_run_is_documented(tmp_path):
    trainer = trained(1)
    vars(trainer)["teacher"] = torch.nn.Linear(1, 1)
    trainer.save_training_state(tmp_path / "state")
    documented = ",".join(rows("| part |")).replace(" ", "").replace("…rank_<W-1>", "").split(",")
    assert sorted(documented) == sorted(path.stem for path in (tmp_path / "state").glob("*.safetensors"))
    facts = json.loads((tmp_path / "state" / "manifest.json").read_text())["facts"]
    assert [name for name in facts if f"`{name}`" not in DOCUMENT] == []
