"""The page in a real browser: everything is drawn, nothing is fetched, and nothing fails."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import ReportCallback, TrainerCallback
from pytorch_accelerated.extras.report.contents import RunContents, write_page
from pytorch_accelerated.extras.report.reading import write_comparison
from tests.report.digits import train, trainer_with

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium (on Debian: apt install chromium)")


def drawn(page: Path, folder: Path, fragment: str = "") -> str:
    """The elements of the page after its script has run."""
    assert BROWSER is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [BROWSER, *options, profile, "--window-size=1200,900", f"file://{page}{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@needs_browser
def test_a_report_is_drawn_completely(tmp_path: Path):
    page = tmp_path / "run.html"
    train(trainer_with(ReportCallback(page, name="<b>five</b> & </script>")), 3)
    dom = drawn(page, tmp_path, "#dark")
    assert 'data-ready="yes"' in dom  # the last line of the script
    assert 'data-theme="dark"' in dom
    assert "&lt;b&gt;five&lt;/b&gt; &amp; &lt;/script&gt;</h1>" in dom
    assert dom.count("<canvas") >= 1
    assert dom.count("data:image/png") >= 12
    for title in (
        "Curves",
        "Best values",
        "Classes (epoch 3)",
        "Worst predictions (epoch 3)",
        "Time per epoch",
        "What ran",
    ):
        assert f"<h2>{title}</h2>" in dom


@needs_browser
def test_the_rows_of_a_spike_are_folded_and_text(tmp_path: Path):
    class Strange(TrainerCallback):
        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            spike = {"loss": 9.0, "median": 2.0, "epoch": 1, "first_update": 7, "last_update": 7}
            for samples in (list(range(5000)), ["<b>key</b>"], None):
                trainer.run_context.control.emitter.emit("on_loss_spike", **spike, samples=samples)

    page = tmp_path / "run.html"
    train(trainer_with(Strange(), ReportCallback(page)), 1)
    dom = drawn(page, tmp_path)
    assert dom.count("of the training set</summary>") == 2
    assert "<summary>5,000 rows of the training set</summary>" in dom
    assert "4095 and 904 more</p>" in dom
    assert "<summary>1 row of the training set</summary><p>&lt;b&gt;key&lt;/b&gt;</p>" in dom
    assert "<code>trainer.replay(states, update=7)</code>" in dom


@needs_browser
def test_a_comparison_is_drawn_completely(tmp_path: Path):
    pages = [tmp_path / f"{name}.html" for name in ("one", "two")]
    for number, page in enumerate(pages, start=1):
        train(trainer_with(ReportCallback(page)), number)
    write_comparison(pages, tmp_path / "compare.html")
    dom = drawn(tmp_path / "compare.html", tmp_path)
    assert 'data-ready="yes"' in dom
    assert "<h2>What differs</h2>" in dom
    assert re.search(r"<thead><tr><th></th><th>.*?two</span></th><th>.*?one</span></th></tr></thead>", dom)
    (row,) = re.findall(r"<tr[^>]*><td><span[^>]*>config: num epochs.*?</td>(.*?)</tr>", dom)
    assert re.findall(r"<code>(.*?)</code>", row) == ["2", "1"]  # the better one first


def test_a_page_fetches_nothing(tmp_path: Path):
    page = tmp_path / "run.html"
    train(trainer_with(ReportCallback(page)), 1)
    text = page.read_text()
    assert "default-src 'none'" in text  # browsers refuse what does not come with the page
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"', text) == []
    assert len(text) < 200_000


@needs_browser
def test_a_package_that_one_run_did_not_import_is_no_difference(tmp_path: Path):
    runs = [RunContents(name, environment={"device": name, "torch": "2.13"}) for name in ("cpu", "cuda")]
    runs[0].environment["timm"] = "1.0"
    runs.append(RunContents("failed at once", state={"status": "failed"}))  # as a result.json without a page
    write_page(runs, "three", tmp_path / "compare.html")
    dom = drawn(tmp_path / "compare.html", tmp_path)
    assert 'data-ready="yes"' in dom
    assert "environment: device" in dom
    assert "timm" not in re.sub("<script.*?</script>", "", dom, flags=re.DOTALL)
