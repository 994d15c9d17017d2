"""Lightning's Trainer on a tiny module, for the tests of its callback."""

import csv
import logging
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain_core.adapters.lightning import SafeTrainCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

EXAMPLES, BATCH = 48, 4


class Module(LightningModule):
    def __init__(self, optimizer=torch.optim.AdamW, lr=0.01, dropout=0.1, **options):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.build = lambda: optimizer(self.parameters(), lr=lr, **options)

    def training_step(self, batch, batch_idx):
        x, labels = batch
        loss = F.cross_entropy(self.layers(x), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        x, labels = batch
        self.log("val_loss", F.cross_entropy(self.layers(x), labels))

    def configure_optimizers(self):
        return self.build()


def loader(spoil=None):
    """Batches in order; ``spoil`` maps a batch (from 1) to a factor on its inputs, and its labels are wrong."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 6, generator=generator)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for batch, factor in (spoil or {}).items():
        here = slice((batch - 1) * BATCH, batch * BATCH)
        x[here] *= factor
        labels[here] = (labels[here] + 1) % 3
    return DataLoader(TensorDataset(x, labels), BATCH)


def make(folder, *callbacks, module=None, logger=False, **options):
    """A trainer and a module; ``options`` are the trainer's."""
    torch.manual_seed(0)
    arguments = {
        "max_steps": 12,
        "accelerator": "cpu",
        "devices": 1,
        "gradient_clip_val": 1.0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "logger": CSVLogger(folder, name="", version="") if logger else False,
        "default_root_dir": str(folder),
        **options,
    }
    return Trainer(callbacks=list(callbacks), **arguments), module or Module()


def fit(trainer, module, spoil=None, validate=False, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        trainer.fit(module, loader(spoil), loader() if validate else None, **options)
    return module


def guarded(folder, knobs=None, **options):
    """A trainer with the callback, its module, and the callback."""
    callback = SafeTrainCallback(**(knobs or {}))
    extra = options.pop("callbacks", ())
    return *make(folder, callback, *extra, **options), callback


def rows_of(path):
    return list(csv.DictReader(Path(path).open(newline="")))


def same(a, b):
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())
