"""docs/loop.md has every hook and event, in the order in which a run has them."""

import re

from pytorch_accelerated.facts import order
from tests.support.processes import REPOSITORY

PAGE = (REPOSITORY / "docs" / "loop.md").read_text(encoding="utf-8")
RIGHT = 40


def loop() -> str:
    """The order of a training run: methods on the left, events and recorded metrics on the right."""
    lines = [f"{'your method':<{RIGHT}}event of callbacks, [recorded metric]", ""]
    for line in order.order_of("train(...)", [order.WITH_EVALUATION]):
        name = line.strip()
        if name.startswith(("on_", "[")):
            lines.append(" " * RIGHT + name)
        elif not name.startswith("_"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def test_the_loop_of_the_page_is_that_of_a_run():
    (shown,) = re.findall(r"<!-- loop -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown == loop()


def test_the_page_has_each_hook_and_event():
    public = {name for name in order.NAMES if not name.startswith(("_", "["))}
    explained = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    named = set(re.findall(r"\w+", explained))
    at_the_same_moment = {"on_train_epoch_start", "on_train_step_start", "on_eval_epoch_start", "on_eval_step_start"}
    assert public - named == at_the_same_moment, "name it in a table; the names left out are in the loop alone"
