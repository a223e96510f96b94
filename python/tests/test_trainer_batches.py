"""plumb.Trainer over an iterable: where a resumed run goes on, and what it refuses."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import plumb


def losses_of(steps, data=None, **more):
    """Trains a new layer, over a new loader that shuffles if no data is given."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randn(32, 3)
    net, losses = nn.Linear(4, 3), []

    class Hooks:
        def on_step(self, event):
            losses.append(event["loss"])

    if data is None:
        data = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
    options = {"loss": "mse", "optimizer": "sgd", "lr": 0.05, "threads": 1, "progress": False, **more}
    plumb.Trainer(plumb.capture(net, x[:8]), data, hooks=Hooks(), steps=steps, **options).run()
    return losses


@pytest.mark.parametrize("first", [3, 4, 6, 9])  # within an epoch of four batches, at its end, and in later ones
def test_a_run_that_is_resumed_in_any_epoch_takes_the_batches_of_one_that_was_not(tmp_path, first):
    parts = losses_of(first, checkpoints=tmp_path) + losses_of(11, checkpoints=tmp_path)
    assert parts == losses_of(11)


def test_data_that_is_shorter_than_what_was_taken_is_refused(tmp_path):
    batches = [(torch.randn(8, 4), torch.randn(8, 3)) for _ in range(4)]
    losses_of(3, batches, checkpoints=tmp_path)
    with pytest.raises(plumb.Error, match="the data ends after 2 batches, and the checkpoint was written after 3"):
        losses_of(6, batches[:2], checkpoints=tmp_path)


def test_a_training_under_torch_autocast_is_refused():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(plumb.Error, match='under torch.autocast.*\n.*autocast="bf16"'):
        losses_of(1)


def test_a_batch_norm_without_running_statistics_is_evaluated_as_torch_does(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    torch.save(x, tmp_path / "x.pt")
    torch.save(y, tmp_path / "y.pt")
    for norm in (nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3)):
        net = nn.Sequential(nn.Linear(4, 3), norm)
        files = {"eval_data": tmp_path / "x.pt", "eval_targets": tmp_path / "y.pt"}
        options = {"loss": "mse", "optimizer": "sgd", "steps": 1, "threads": 1, "progress": False, **files}
        found = plumb.Trainer(plumb.capture(net, x), [(x, y)], **options).run().eval_loss
        assert found == pytest.approx(nn.functional.mse_loss(net.eval()(x), y).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mask": "no.pt"}, "mask is for data in files"),
        ({"targets": "none.pt"}, "targets is for data in files"),
        ({"file": "nothing.pt2"}, "file is for a model in a file"),
        ({"hooks": print}, "hooks is a builtin_function_or_method with none"),
        ({"hooks": {"on_step": print}}, "hooks is a dict with none"),
    ],
)
def test_what_a_training_of_batches_would_ignore_is_refused(wrong, says):
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    with pytest.raises(plumb.Error, match=says) as caught:
        plumb.Trainer(plumb.capture(nn.Linear(4, 3), x), [(x, y)], loss="mse", steps=1, **wrong)
    assert caught.value.remedy
