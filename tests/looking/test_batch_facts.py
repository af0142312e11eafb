"""What a batch looks like."""

import torch

from pytorch_accelerated.looking.batch_facts import facts_of


def test_tensors_have_shapes_types_ranges_and_shares_of_nan() -> None:
    values = torch.tensor([[0.0, 1.0], [float("nan"), 3.0]])
    facts = facts_of({"x": values, "y": [torch.tensor([2, 7]), torch.tensor([True, False])], "name": "rows"})
    assert str(facts).splitlines() == [
        "['x']     float32  2 x 2  0 to 3, mean 1.333 (25.0% NaN)",
        "['y'][0]  int64    2      2 to 7",
        "['y'][1]  bool     2      0 to 1",
        "['name']  str             'rows'",
    ]
    assert facts.picture is None
    assert "25.0% NaN" in facts._repr_html_()


def test_odd_tensors_are_no_problem() -> None:
    batch = [torch.empty(0, 3), torch.full((2,), float("nan")), torch.tensor(1 + 2j), torch.tensor(float("inf"))]
    assert [entry.value for entry in facts_of(batch).entries] == ["", "", "", "inf to inf"]
    assert facts_of(batch).entries[1].missing == 1
    assert str(facts_of(torch.tensor(3))) == "batch  int64  one number  3 to 3"
    assert str(facts_of([])) == ""


def test_images_are_shown_whatever_the_place_of_their_channels() -> None:
    for shape in [(12, 3, 16, 20), (2, 16, 20, 1)]:
        for images in (torch.rand(shape), (torch.rand(shape) * 255).to(torch.uint8)):
            picture = facts_of([images, torch.arange(12)]).picture
            assert picture is not None
            assert picture.startswith(b"\x89PNG")
            assert len(picture) < 100_000
    assert facts_of(torch.rand(2, 4, 16, 16)).picture is None
    assert facts_of(torch.full((2, 3, 16, 16), float("nan"))).picture is not None
