"""What a batch looks like."""

import torch

from pytorch_accelerated.extras.looking.preflight import facts_of


def test_tensors_have_shapes_types_ranges_and_shares_of_nan() -> None:
    values = torch.tensor([[0.0, 1.0], [float("nan"), 3.0]])
    facts = facts_of({"x": values, "y": [torch.tensor([2, 7]), torch.tensor([True, False])], "name": "rows"})
    assert str(facts).splitlines() == [
        "['x']     float32  2 x 2  0 to 3, mean 1.333 (25.0% NaN)",
        "['y'][0]  int64    2      2 to 7",
        "['y'][1]  bool     2      0 to 1",
        "['name']  str             'rows'",
    ]


def test_odd_tensors_are_no_problem() -> None:
    batch = [torch.empty(0, 3), torch.full((2,), float("nan")), torch.tensor(1 + 2j), torch.tensor(float("inf"))]
    assert [entry.value for entry in facts_of(batch).entries] == ["", "", "", "inf to inf"]
    assert facts_of(batch).entries[1].missing == 1
    assert str(facts_of(torch.tensor(3))) == "batch  int64  one number  3 to 3"
    assert str(facts_of([])) == ""
