"""`docs/checkpoint_format.md` names all that the code writes."""

import dataclasses
import json
import re

import pytest
import torch

from pytorch_accelerated.checkpointing import codec, formats, layout
from tests.chaos.saved_runs import trained
from tests.support.processes import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "checkpoint_format.md").read_text(encoding="utf-8")


def rows(header: str) -> list[str]:
    """The first cells of the table below a header, without the marks of code."""
    (table,) = re.findall(rf"^{re.escape(header)}.*\n\| --- .*\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    return re.findall(r"^\| (.*?) \|", table.replace("`", ""), re.MULTILINE)


def test_every_field_of_the_manifest_is_documented_in_its_order():
    entry = layout.FileEntry("model.json", 2, "0" * 64)
    manifest = json.loads(layout.dump_manifest(layout.Manifest(1, {}, (entry,))))
    fields, entry_fields = (
        re.findall(r"^\| `(\w+)` \|", block, re.MULTILINE)
        for block in re.findall(r"\| field \| what it says \|\n\| --- \| --- \|\n((?:\|.*\n)+)", DOCUMENT)
    )
    assert fields == list(manifest)
    assert entry_fields == [field.name for field in dataclasses.fields(layout.FileEntry)]
    assert list(manifest["files"][0]) == entry_fields


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


def test_every_dtype_is_documented():
    words = set(re.findall(r"\w+", DOCUMENT))
    assert {*formats.DTYPE_NAMES.values(), *codec._DTYPES} <= words


@pytest.mark.parametrize(
    "told",
    [
        f"| `format` | version of this format: {layout.FORMAT} |",
        f"`{layout._FILE_NAME.pattern}`",
        f"`{layout.MANIFEST_NAME}`",
        f"`{layout.PREDICTIONS_FORMAT}`",
    ],
)
def test_the_names_in_the_code_are_those_of_the_document(told):
    assert told in DOCUMENT
