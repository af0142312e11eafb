"""The scripts for other trainers on the pages in docs/coming_from run, where these trainers are installed."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.chaos.size import in_release
from tests.support.processes import REPOSITORY, run_script

PAGES = REPOSITORY / "docs" / "coming_from"
FILE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```", re.DOTALL)


@in_release
@pytest.mark.parametrize(
    ("package", "shown"), [("lightning", "val_accuracy"), ("keras", "val_loss"), ("fastai", "valid_loss")]
)
def test_the_scripts_with_the_other_package_run(package: str, shown: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    files = dict(FILE.findall((PAGES / f"{package}.md").read_text(encoding="utf-8")))
    (tmp_path / "data.py").write_text(files.pop("data.py"), encoding="utf-8")
    # In one process, which is quicker.
    (tmp_path / "scripts.py").write_text("\n".join(files.values()), encoding="utf-8")
    assert shown in run_script(tmp_path / "scripts.py", cwd=tmp_path).stdout
