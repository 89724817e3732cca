import torch

from specdec.execution.counting import counted


def test_views_and_empty_tensors_are_no_work():
    x = torch.randn(4, 5)
    with counted() as work:
        torch.empty(3)
        x.t()[1:].unsqueeze(0).expand(2, -1, -1)
        x.view(-1).split(10)
    assert work.launches == 0
    assert work.synchronizations == 0


def test_operations_are_counted_by_name():
    x = torch.randn(4, 5)
    with counted() as work:
        (x.t() @ x).relu_().relu_()
        torch.empty(3).copy_(torch.ones(3))
    assert dict(work.operations) == {"mm": 1, "relu_": 2, "ones": 1, "copy_": 1}
    assert work.launches == 5


def test_every_way_of_showing_values_is_a_read():
    x = torch.randn(4)
    with counted() as work:
        x[0].item()
        bool(x[0] > 0)
        x.tolist()
        x.numpy()
        x.nonzero()
        x[x > 0]
    assert work.synchronizations == 6


def test_nothing_is_counted_after_the_block():
    x = torch.randn(4)
    with counted() as work:
        pass
    (x + 1).tolist()
    assert work.launches == work.synchronizations == 0
