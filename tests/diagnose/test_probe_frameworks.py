"""The probes on the loops of others: Hugging Face's Trainer, Lightning, Accelerate; where they are installed."""

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from safetrain_core import probe_accumulation, probe_clip_order, probe_memory, probe_skip_leaves_state_untouched

BATCH = {
    "x": torch.randn(12, 6, generator=torch.Generator().manual_seed(3)),
    "labels": torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(4)),
}


def rules(findings):
    return [finding.rule for finding in findings]


class Classifier(nn.Module):
    """Gives its loss itself, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def hugging_face(folder, *, divides=True, clip=1.0):
    """``Trainer.train()`` on one window; its own loop, accumulation and clip."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Undivided(transformers.Trainer):
        """A loss computed by hand, as many overrides have it, and the division forgotten."""

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = model(**inputs)["loss"]
            self.accelerator.backward(loss)
            return loss.detach()

    def step(model, window):
        args = transformers.TrainingArguments(
            str(folder),
            max_steps=1,
            gradient_accumulation_steps=len(window),
            per_device_train_batch_size=1,
            max_grad_norm=clip,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        kind = transformers.Trainer if divides else Undivided
        kind(model, args, train_dataset=window, data_collator=lambda items: items[0]).train()

    return step


def test_hugging_faces_trainer_holds_and_an_override_that_forgets_the_division_is_named(tmp_path):
    right, wrong = hugging_face(tmp_path), hugging_face(tmp_path, divides=False)
    assert probe_accumulation(right, Classifier, BATCH, unequal=False) == []
    assert rules(probe_accumulation(wrong, Classifier, BATCH, unequal=False)) == ["loss_not_divided"]


def test_hugging_faces_clip_holds_and_its_absence_is_named(tmp_path):
    assert probe_clip_order(hugging_face(tmp_path), Classifier, BATCH, 1.0, accum_steps=2) == []
    without = hugging_face(tmp_path, clip=0.0)
    assert rules(probe_clip_order(without, Classifier, BATCH, 1.0)) == ["clip_without_effect"]


def test_hugging_faces_trainer_lets_nan_through(tmp_path):
    found = probe_skip_leaves_state_untouched(hugging_face(tmp_path), Classifier, BATCH)
    assert rules(found) == ["nan_reaches_weights"]


def windows(count):
    return [{name: part[at::count] for name, part in BATCH.items()} for at in range(count)]


def test_hugging_faces_step_is_counted_and_left_alone(tmp_path):
    step = hugging_face(tmp_path)
    assert probe_memory(step, Classifier, windows(3)) == []
    (finding,) = probe_memory(step, Classifier, windows(1), limit_bytes=1)
    weights = 4 * sum(p.numel() for p in Classifier().parameters())
    told = finding.evidence[0].values
    assert (finding.rule, told["weight bytes"], told["gradient bytes"]) == ("weights_do_not_fit", weights, weights)
    assert told["optimizer state bytes"] >= 2 * weights  # AdamW, made inside the step


def lightning(*, automatic=True, divides=True, clip=1.0):
    """``Trainer.fit`` on one window; automatic optimization calls for gradients in a closure of the optimizer."""
    package = pytest.importorskip("lightning.pytorch")

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Classifier()
            self.automatic_optimization = automatic
            self.count = 1

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def training_step(self, batch, number):
            loss = self.net(**batch)["loss"]
            if automatic:
                return loss
            optimizer = self.optimizers()
            self.manual_backward(loss / self.count if divides else loss)
            if number == self.count - 1:
                self.clip_gradients(optimizer, clip, "norm")
                optimizer.step()
                optimizer.zero_grad()
            return None

    def step(module, window):
        module.count = len(window)
        knobs = {"accumulate_grad_batches": len(window), "gradient_clip_val": clip} if automatic else {}
        trainer = package.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **knobs,
        )
        trainer.fit(module, DataLoader(window, batch_size=None))

    return step, Module


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_holds(automatic):
    step, module = lightning(automatic=automatic)
    assert probe_accumulation(step, module, BATCH, unequal=False) == []
    assert probe_clip_order(step, module, BATCH, 1.0, accum_steps=2) == []


@pytest.mark.parametrize("automatic", [True, False])
def test_lightnings_step_is_counted_and_left_alone(automatic):
    step, module = lightning(automatic=automatic)
    assert probe_memory(step, module, windows(3)) == []
    (finding,) = probe_memory(step, module, windows(1), limit_bytes=1)
    weights = 4 * sum(p.numel() for p in Classifier().parameters())
    told = finding.evidence[0].values
    assert (finding.rule, told["weight bytes"], told["gradient bytes"]) == ("weights_do_not_fit", weights, weights)
    assert told["optimizer state bytes"] >= 2 * weights


def test_lightnings_faults_are_named():
    step, module = lightning(automatic=False, divides=False)
    assert rules(probe_accumulation(step, module, BATCH, unequal=False)) == ["loss_not_divided"]
    step, module = lightning(clip=0.25)
    assert rules(probe_clip_order(step, module, BATCH, 1.0)) == ["clip_at_another_norm"]
    step, module = lightning()
    assert rules(probe_skip_leaves_state_untouched(step, module, BATCH)) == ["nan_reaches_weights"]


@pytest.mark.parametrize("in_window", [True, False])
def test_accelerates_accumulate_holds_inside_the_context_and_is_named_outside(in_window):
    package = pytest.importorskip("accelerate")

    def step(model, window):
        accelerator = package.Accelerator(cpu=True, gradient_accumulation_steps=len(window))
        net, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.gradient_state._set_sync_gradients(True)
        for number, part in enumerate(window):
            with accelerator.accumulate(net):
                accelerator.gradient_state._set_sync_gradients(number == len(window) - 1)
                loss = net(**part)["loss"]
                # `backward` divides by K itself: who divides, too, divides twice
                accelerator.backward(loss if in_window else loss / len(window))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    expected = [] if in_window else ["loss_divided_twice"]
    assert rules(probe_accumulation(step, Classifier, BATCH, unequal=False)) == expected
