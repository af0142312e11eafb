"""The Chinese pages say what the English pages say today."""

from pathlib import Path

import pytest

from scripts.chinese import Translation, differences, digest_of, translations

ALL = translations()
ENGLISH = """# Title

See [start](start.md#install), [code](../train.py) and `train`.

<!-- table: speed -->
| a |
<!-- end of table -->

## Code

| a | b |
| --- | --- |
| 1 | 2 |

<!-- file: train.py -->
```python
rate = 0.1  # small
print(f"{rate} of {2}", "done")
```

<!-- not run: needs Slurm -->
```bash
srun python train.py  # eight
```

```text
0.1 of 2 done
epoch 1
```
"""
CHINESE = """<!-- translation of docs/page.md: -->
# 标题

*[English](../page.md)*

`train`，见[代码](../../train.py)和[开始](start.md#安装)。

<!-- table: speed, zh -->
| 甲 |
| 乙 |
<!-- end of table -->

## 代码

| 甲 | 乙 |
| --- | --- |
| 一 | 二 |

<!-- file: train.py -->
```python
# 很小
rate = 0.1
print(f"比率 {rate}，共 {2}", "完成")
```

<!-- not run: needs Slurm -->
```bash
srun python train.py  # 八个
```

```text
比率 0.1，共 2 完成
epoch 1
```
"""


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_a_chinese_page_is_a_translation_of_the_english_page_of_today(page: Translation) -> None:
    assert differences(page, ALL) == []
    assert not page.has_changed, (
        f"{page.english.name} has changed since {page.path.name} was checked against it: `git log -p {page.english}` "
        f"shows how. Carry the change over into {page.path}, then run `python scripts/chinese.py {page.name}`."
    )


def test_the_pages_that_a_reader_starts_with_are_there_in_chinese() -> None:
    assert {page.name for page in ALL} == {"README", "index", "start", "loop", "callbacks", "huggingface"}


def made(folder: Path, english: str = ENGLISH, chinese: str = CHINESE) -> list[Translation]:
    """A small checkout with two translated pages."""
    (folder / "docs" / "zh").mkdir(parents=True)
    for name, text in {
        "README.md": "# Name\n",
        "README.zh-CN.md": f"<!-- translation of README.md: {digest_of('# Name')} -->\n# 名称\n",
        "docs/page.md": english,
        "docs/zh/page.md": chinese,
        "docs/start.md": "# Start\n",
        "docs/zh/start.md": "<!-- translation of docs/start.md: -->\n# 开始\n",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    return translations(folder)


def test_comments_strings_tables_of_results_and_places_of_links_may_differ(tmp_path: Path) -> None:
    pages = made(tmp_path)
    assert [differences(page, pages) for page in pages] == [[], [], []]


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("## 代码", "### 代码", "levels of its headings are [1, 3]"),
        ("| 一 | 二 |\n", "", "Its tables have 2 rows, those of the English page 3."),
        ("`train`", "`tain`", "`train` is only on the English page."),
        ("speed, zh", "kills, zh", "Its tables of results are ['kills']"),
        ("[代码](../../train.py)", "代码", "The link to ../train.py is only on the English page."),
        ("[开始](start.md#安装)", "[开始](../start.md)", "there is a Chinese page"),
        ("rate = 0.1\n", "rate = 0.2\n", "The block of code in line 20 is not that in line 16 of the English page."),
        ('"完成"', '"finished"', "The block of code in line 20 "),
        ("{rate}，共", "{rats}，共", "The block of code in line 20 "),
        ("file: train.py", "file: tran.py", "The block of code in line 20 "),
        ("<!-- not run: needs Slurm -->\n", "", "The block of code in line 26 "),
        ("srun python", "srun python3", "The block of code in line 27 "),
        ("epoch 1\n", "epoch 2\n", "The block of code in line 31 "),
        ("epoch 1\n```\n", "epoch 1\n```\n\n```python\n```\n", "Only one of the pages has a block of code number 4."),
    ],
)
def test_a_page_that_is_built_differently_is_reported(tmp_path: Path, before: str, after: str, problem: str) -> None:
    assert before in CHINESE
    pages = made(tmp_path, chinese=CHINESE.replace(before, after))
    found = [sentence for page in pages for sentence in differences(page, pages)]
    assert problem in "\n".join(found)


def test_a_changed_english_page_is_noticed_and_new_results_are_none(tmp_path: Path) -> None:
    head = f"<!-- translation of docs/page.md: {digest_of(ENGLISH)} -->"
    chinese = CHINESE.replace("<!-- translation of docs/page.md: -->", head)
    for number, (before, after, has_changed) in enumerate(
        [("", "", False), ("| a |\n<!--", "| 7 |\n<!--", False), ("# Title", "# Another title", True)]
    ):
        pages = made(tmp_path / str(number), ENGLISH.replace(before, after, 1), chinese)
        assert [page.has_changed for page in pages if page.name == "page"] == [has_changed]


def test_a_page_without_its_first_line_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"docs/zh/page.md doesn't name the page that it translates"):
        made(tmp_path, chinese="# 标题\n")
