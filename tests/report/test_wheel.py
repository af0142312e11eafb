"""The wheel has everything that a page is made of, and the licence of what is not ours."""

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_the_parts_of_a_page(tmp_path: Path):
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, which builds the wheel")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(path).namelist())
    folder = ROOT / "src"
    parts = [
        file for file in (folder / "pytorch_accelerated" / "report").rglob("*") if file.suffix not in (".py", ".pyc")
    ]
    files = {str(file.relative_to(folder)) for file in parts if file.is_file()}
    assert "pytorch_accelerated/report/vendored/uplot/LICENSE" in files
    assert files <= names
