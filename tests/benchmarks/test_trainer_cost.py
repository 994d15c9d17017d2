"""What the trainer adds to the safe step, and whether a run with faults ends where a clean one does."""

import random
import time

import torch
from measure import Measured, Watch
from peer_loops import gpt
from torch.utils.data import DataLoader

from safetrain_core import (
    AmpTrainState,
    Corpus,
    MiniGPT,
    MiniGPTConfig,
    SafeTrainer,
    TrainConfig,
    next_token_loss,
)
from safetrain_core.optim.build import build_optimizer
from safetrain_core.optim.schedule import make_schedule

AREA = "trainer"
STEPS = 60


def batches():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 96, (STEPS, 4, 65), generator=generator)
    return [(part[:, :-1], part[:, 1:]) for part in ids]


def test_trainer_against_the_same_steps_by_hand(claim, tmp_path):
    data = batches()
    runs = [0]

    def by_hand():
        model = gpt()
        optimizer = build_optimizer(model, "adamw", lr=1e-3, weight_decay=0.01)
        scheduler = make_schedule(optimizer, "cosine", total_steps=STEPS)
        state = AmpTrainState(
            model, amp_dtype=torch.float32, optimizer=optimizer, scheduler=scheduler, loss_fn=next_token_loss
        )
        start = time.perf_counter()
        for x, y in data:
            state.step(x, y)
        return time.perf_counter() - start

    def by_trainer():
        runs[0] += 1
        config = TrainConfig(max_steps=STEPS, csv_log_path=str(tmp_path / f"{runs[0]}.csv"))
        trainer = SafeTrainer(gpt(), config, data, loss_fn=next_token_loss)
        start = time.perf_counter()
        trainer.fit()
        return time.perf_counter() - start

    by_hand(), by_trainer()
    ratios = []
    for i in range(15):
        first, second = (by_trainer, by_hand) if i % 2 else (by_hand, by_trainer)
        a, b = first(), second()
        ratios.append(a / b if i % 2 else b / a)
    claim("SafeTrainer with CSV / the same steps by hand", Measured.of(ratios), "<=", 1.05, "x")


def test_gradient_statistics_cost_one_pass_more_and_block_norms_none(claim):
    x, y = batches()[0]
    passes = {}
    for detail in (False, True):
        state = AmpTrainState(gpt(), amp_dtype=torch.float32, loss_fn=next_token_loss)
        state.step(x, y)
        with Watch(state.optimizer) as watch:
            state.step_window([(x, y)], detail=detail)
        passes[detail] = watch.ops["_foreach_norm"] + watch.ops["aminmax"] / len(list(state.model.parameters()))
    claim("passes over the gradients per step, no statistics", passes[False], "<=", 1)
    claim("passes over the gradients per step, statistics and block norms", passes[True], "<=", 2)


def test_a_run_with_faults_in_one_step_of_twenty_ends_where_the_clean_run_does(claim, compare):
    corpus = Corpus.from_files(None, 32)

    def run(fault=None):
        torch.manual_seed(0)
        model = MiniGPT(MiniGPTConfig(len(corpus.vocab), context=32, layers=2, heads=2, width=32))
        config = TrainConfig(max_steps=2000, batch_size=16, learning_rate=3e-3, max_nan_retries=10**6)
        trainer = SafeTrainer(
            model,
            config,
            DataLoader(corpus.train, 16, shuffle=True),
            DataLoader(torch.utils.data.Subset(corpus.val, range(800)), 100),
            next_token_loss,
            fault=fault,
        )
        return trainer.fit()

    dice = random.Random(0)

    def fault(step, model):
        """In one step of twenty, the gradient or the loss is no number."""
        if dice.random() >= 0.05:
            return
        if dice.random() < 0.5:
            handle = model.head.weight.register_hook(lambda grad: (handle.remove(), grad * float("inf"))[1])
        else:
            handle = model.register_forward_hook(lambda *_: (handle.remove(), _[2] * float("nan"))[1])

    clean, faulty = run(), run(fault)
    compare("validation loss after 2,000 updates, clean", clean.val_loss)
    compare("validation loss after 2,000 updates, with faults", faulty.val_loss)
    claim("faults injected into 2,000 updates", faulty.skips, ">=", 60)
    claim("validation loss, 5 % faults / clean", faulty.val_loss / clean.val_loss, "<=", 1.05, "x")
