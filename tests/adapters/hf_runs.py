"""Hugging Face's Trainer on tiny models, for the tests of its callback."""

import csv
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from safetrain_core.adapters.huggingface import SafeTrainerCallback

#: Examples, and the batch size of ``make``: 12 steps an epoch.
EXAMPLES, BATCH = 48, 4


class Net(nn.Module):
    """Gives its loss itself, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def data(spoil=None):
    """Examples in order; ``spoil`` maps a step (from 1, at batch size ``BATCH``) to a factor on its inputs.

    The labels of a spoilt batch are wrong, too, so that its loss is large.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 6, generator=generator)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for step, factor in (spoil or {}).items():
        here = slice((step - 1) * BATCH, step * BATCH)
        x[here] *= factor
        labels[here] = (labels[here] + 1) % 3
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]


def in_order(trainer_class=transformers.Trainer):
    """A Trainer that does not shuffle, so that a spoilt example comes at its step."""

    class InOrder(trainer_class):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder


def make(folder, *, examples=None, net=None, trainer_class=None, callbacks=(), **options):
    """A Trainer without a callback of ours; ``options`` are training arguments."""
    torch.manual_seed(0)
    model = net or Net()
    arguments = {
        "max_steps": 12,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
        **options,
    }
    return (trainer_class or in_order())(
        model,
        transformers.TrainingArguments(str(folder), **arguments),
        train_dataset=examples if examples is not None else data(),
        eval_dataset=data() if "eval_strategy" in options else None,
        callbacks=list(callbacks),
    )


def guarded(folder, knobs=None, **options):
    """A Trainer with the callback, and the callback."""
    trainer = make(folder, **options)
    callback = SafeTrainerCallback(trainer, **(knobs or {}))
    trainer.add_callback(callback)
    return trainer, callback


def rows_of(path):
    return list(csv.DictReader(Path(path).open(newline="")))


def same(a, b):
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())
