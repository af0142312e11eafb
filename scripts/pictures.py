"""Make the pictures in docs/images again: a terminal, reports, plots.

    python scripts/pictures.py              all of them, in a few minutes
    python scripts/pictures.py terminals    one group: terminals, gallery, reports, plots, pages or sweeps
    python scripts/pictures.py segmentation     the picture of one page, or of one example

Everything shown is what the library itself printed or wrote while it trained, or what the code of a page drew. Needs
the packages of the extra `test`, and Chromium to draw pages (on Debian: apt install chromium).
"""

from __future__ import annotations

import html
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.support.mnist import write_mnist  # noqa: E402
from tests.support.pages import script_of  # noqa: E402

IMAGES = REPOSITORY / "docs" / "images"
EXAMPLE = "examples/train_digits.py"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}",
    "MPLBACKEND": "agg",
    "OMP_NUM_THREADS": "1",  # on a busy machine, more threads wait for each other, and the times shown are of waiting
}

TERMINAL_PAGE = """<!DOCTYPE html><style>
body { margin: 0; display: inline-block; background: #1a1e27; color: #e6e9f0; }
div { height: 26px; padding: 10px 14px 0; box-sizing: border-box; }
i { display: inline-block; width: 11px; height: 11px; border-radius: 50%; margin-right: 7px; background: #4a5162; }
pre { margin: 0; padding: 8px 16px 16px; font: 14px/1.35 "DejaVu Sans Mono", monospace; width: COLUMNSch; }
b { color: #8fd19e; font-weight: normal; } u { color: #7eaaf5; text-decoration: none; }
</style><div><i></i><i></i><i></i></div><pre>TEXT</pre>"""

# The examples and their arguments. Ray Train isn't part of the environment, and its example has no picture.
GALLERY: dict[str, tuple[str, ...]] = {
    "train_digits": (),
    "train_mnist": ("--data-dir", "data", "--num-epochs", "3"),
    "transfer_learning": (),
    "transformers_model": (),
    "tiny_language_model": (),
    "click_through_rate": (),
    "mixup_ema": (),
    "timm_scheduler": (),
    "metrics_in_callback": (),
    "metrics_in_subclass": (),
    "custom_callback_event": (),
    "custom_logger": (),
    "predictions_to_csv": (),
    "digits_to_drive": ('{"lr": 0.01, "width": 128}', "--folder", "outputs/one_run"),
    "drive_runs": ("--num-updates", "100", "--num-rounds", "12"),
}
# Starts a script as Python would, where torchvision doesn't match torch, too.
LAUNCH = """
import runpy, sys
from pathlib import Path
from tests.support import torchvision_on_cpu
torchvision_on_cpu.install()
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# The colours of the site at night.
DARK = """
import matplotlib.pyplot as plt
plt.style.use("dark_background")
plt.rcParams.update({"figure.facecolor": "#131416", "axes.facecolor": "#131416", "savefig.facecolor": "#131416"})
"""
# For the code of pages.
FOR_PAGES = """
import matplotlib.pyplot as plt
from tests.support import torchvision_on_cpu
torchvision_on_cpu.install()
plt.rcParams["savefig.dpi"] = 150
"""
# Pages whose code writes a picture by the name of the page.
PAGES = ("segmentation", "multi_label", "time_series", "audio", "object_detection")
PLOTS = """
import sys
from pathlib import Path
import torch
from torch import nn
from examples.train_digits import DigitsNet, load_datasets
from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, MetricsCallback
from pytorch_accelerated.schedulers import CosineLrScheduler, plot_schedule

folder, end = Path(sys.argv[1]), sys.argv[2]
set_seed(0)
train_set, eval_set, _ = load_datasets()

def accuracy(predictions, targets):
    return (predictions.argmax(dim=1) == targets).float().mean()

def new_trainer():
    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    callbacks = [MetricsCallback({"accuracy": accuracy}), *DEFAULT_CALLBACKS]
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks)

new_trainer().find_lr(train_set, per_device_batch_size=64).plot().savefig(folder / f"find_lr{end}.png", dpi=80)
history = new_trainer().train(train_set, 6, eval_set, per_device_batch_size=32)
batch = new_trainer().show_batch(train_set, per_device_batch_size=32, class_names=list("0123456789"))
batch.plot().savefig(folder / f"batch{end}.png", dpi=60)
history.plot().savefig(folder / f"plot{end}.png", dpi=80)
weight, bias = (nn.Parameter(torch.zeros(1)) for _ in range(2))
optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "lr": 3e-4}], lr=1e-3)
schedule = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1)
plot_schedule(schedule, 10, 22, optimizer=optimizer).savefig(folder / f"schedule{end}.png", dpi=80)
"""


def screen_of(received: str) -> list[str]:
    """The lines that a terminal shows after these characters: all that bars and tables use are \\r, \\n and "up"."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[A|.", received, flags=re.DOTALL):
        if token == "\x1b[A":
            row -= 1
        elif token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines).rstrip().splitlines()


def in_terminal(command: list[str], columns: int, folder: Path = REPOSITORY) -> list[str]:
    """What a terminal in `folder` shows when Python with `command` has ended."""
    process, reading = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, *command], {**ENVIRONMENT, "TERM": "xterm"})
    ioctl(reading, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    received = b""
    while True:
        select.select([reading], [], [])
        try:
            chunk = os.read(reading, 65536)
        except OSError:  # the program has ended
            chunk = b""
        if not chunk:
            os.waitpid(process, 0)
            return screen_of(received.decode(errors="ignore"))
        received += chunk


def screenshot(page: str | Path, name: str, width: int, *, height: int | None = None, fragment: str = "") -> None:
    """Draw a page, given as HTML or as a file, as the picture `name`: its first `height` pixels, or all that it has."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("Chromium is needed to draw pages. On Debian: apt install chromium")
    with tempfile.TemporaryDirectory() as folder:
        file, picture = Path(folder, "page.html"), Path(folder, "picture.png")
        file.write_text(page if isinstance(page, str) else page.read_text())
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
        size = [f"--window-size={width},{height or 1600}", "--force-device-scale-factor=1.5"]
        where = [f"--user-data-dir={folder}/profile", f"--screenshot={picture}", f"file://{file}{fragment}"]
        subprocess.run([browser, *options, *size, *where], check=True, capture_output=True, timeout=120)
        image = Image.open(picture).convert("RGB")
    if height is None:  # cut off what has the colour of the last line
        corner = image.getpixel((image.width // 2, image.height - 1))
        box = ImageChops.difference(image, Image.new("RGB", image.size, corner)).getbbox()
        image = image.crop((0, 0, image.width, min(box[3] + 18, image.height)))
    save(image, name)


def save(image: Any, name: str) -> None:
    """Save a small file: few colours, no metadata."""
    path = IMAGES / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    image.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(REPOSITORY)}: {image.width} x {image.height}, {path.stat().st_size / 1000:.0f} kB")


def terminal_picture(lines: list[str], name: str, columns: int) -> None:
    """A terminal with these lines."""
    text = html.escape("\n".join(lines))
    text = re.sub(r"^(\$ .*)$", r"<u>\1</u>", text, flags=re.MULTILINE)
    text = re.sub(r"(\d\S*\*)", r"<b>\1</b>", text)
    page = TERMINAL_PAGE.replace("COLUMNS", str(columns)).replace("TEXT", text)
    screenshot(page, name, round(columns * 8.43) + 34)


def terminals(folder: Path) -> None:
    """An example in a terminal."""
    screen = in_terminal([EXAMPLE, "--num-epochs", "6", "--output-dir", "outputs/digits"], 80)
    terminal_picture([f"$ python {EXAMPLE}", *screen], "terminal", 80)


def gallery(folder: Path, names: Sequence[str] = tuple(GALLERY)) -> None:
    """The end of what each example prints."""
    write_mnist(folder / "data")
    for name in names:
        script, arguments = REPOSITORY / "examples" / f"{name}.py", GALLERY[name]
        screen = in_terminal(["-c", LAUNCH, str(script), *arguments], 80, folder)
        command = shlex.join(["python", f"examples/{name}.py", *arguments])
        if name == "digits_to_drive":  # it prints nothing
            command = "cat outputs/one_run/result.json"
            screen = (folder / "outputs/one_run/result.json").read_text().splitlines()
            screen = [line for line in screen if not any(word in line for word in ("pid", "host", 'ed": 1'))]
        lines = [line.replace(f"{folder}/", "") for line in screen if "Warning" not in line]
        lines = [part for line in lines for part in re.findall(".{1,80}", line) or [""]]  # as a terminal breaks them
        shown = ["...", *lines[-16:]] if len(lines) > 16 else lines
        if name in ("digits_to_drive", "drive_runs"):  # they begin with what matters
            shown = [*lines[:14], "..."]
        terminal_picture([f"$ {command}", *shown], f"gallery/{name}", 80)


def reports(folder: Path) -> None:
    """The report of the example, light and dark, and its top for the README."""
    command = [sys.executable, EXAMPLE, "--num-epochs", "10", "--output-dir", str(folder / "digits")]
    subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    page = folder / "digits" / "report.html"
    page.write_text(page.read_text().replace(str(folder), "outputs"))
    screenshot(page, "report", 1100, height=1050, fragment="#light")
    screenshot(page, "report-top", 1100, height=704, fragment="#light")
    screenshot(page, "report-dark", 1100, height=1050, fragment="#dark")


def plots(folder: Path) -> None:
    """The figures of a history, of the finder and of a schedule."""
    for end in ("", "-dark"):
        run((DARK if end else "") + PLOTS, REPOSITORY, str(folder), end)
        for name in ("batch", "find_lr", "plot", "schedule"):
            save(Image.open(folder / f"{name}{end}.png"), f"{name}{end}")


def pages(folder: Path, names: Sequence[str] = PAGES) -> None:
    """What the code of pages draws."""
    for name in names:
        for end in ("", "-dark"):
            run((DARK if end else "") + FOR_PAGES + (script_of(page_of(name)) or ""), folder)
            save(Image.open(folder / f"{name}.png"), f"{name}{end}")


def sweeps(folder: Path) -> None:
    """The comparison of the runs of a sweep, light and dark."""
    run((script_of(page_of("sweep")) or "").replace("n_trials=3", "n_trials=10"), folder)
    for end, fragment in (("", "#light"), ("-dark", "#dark")):
        screenshot(folder / "sweep.html", f"sweep{end}", 1100, height=760, fragment=fragment)


def page_of(name: str) -> Path:
    """The page of `PAGES`."""
    return REPOSITORY / "docs" / "how_to" / f"{name}.md"


def run(script: str, folder: Path, *arguments: str) -> None:
    """Run Python code in `folder`, without its output."""
    command = [sys.executable, "-c", script, *arguments]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)


GROUPS: tuple[Callable[[Path], None], ...] = (terminals, gallery, reports, plots, pages, sweeps)

if __name__ == "__main__":
    known = [*(group.__name__ for group in GROUPS), *PAGES, *GALLERY]
    if unknown := set(sys.argv[1:]) - set(known):
        raise SystemExit(f"Unknown: {', '.join(sorted(unknown))}. There are {', '.join(known)}.")
    for group in GROUPS:
        if group.__name__ in sys.argv[1:] or not sys.argv[1:]:
            with tempfile.TemporaryDirectory() as temporary:
                group(Path(temporary))
    for group, names in ((pages, PAGES), (gallery, tuple(GALLERY))):
        if single := [name for name in names if name in sys.argv[1:]]:
            with tempfile.TemporaryDirectory() as temporary:
                group(Path(temporary), single)
