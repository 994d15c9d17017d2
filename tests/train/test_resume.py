"""A resumed run is the same run: bit for bit on a CPU, each sample once, wherever it was stopped."""

import csv
import logging
import os
import signal

import needs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from safetrain_core import CheckpointError, SafeTrainer, TrainConfig, TrainingFailed

DATA = TensorDataset(
    torch.arange(20.0).reshape(20, 1).repeat(1, 3) / 20, torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
)


class Seen(nn.Module):
    """A small net with dropout and BatchNorm that notes which samples pass in training."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.seen = []

    def forward(self, x):
        if self.training:
            self.seen += [round(v * 20) for v in x[:, 0].tolist()]
        return self.net(x)


class Epochal(RandomSampler):
    """A sampler that shuffles by the epoch it is told, like DistributedSampler."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Batches:
    """A batch sampler that shuffles by a generator of its own, and by the epoch it is told."""

    def __init__(self):
        self.generator, self.epoch = torch.Generator().manual_seed(5), None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 10

    def __iter__(self):
        order = torch.randperm(20, generator=self.generator)
        return iter(((order + self.epoch) % 20).reshape(10, 2).tolist())


class Noisy(Dataset):
    """Draws from the global random state for each sample, as augmentation does."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        x, y = DATA[i]
        return x, y + 0.01 * torch.rand(1)


class Stream(IterableDataset):
    """Samples in a new order each epoch, whose length is not told, or told wrongly."""

    def __iter__(self):
        return (DATA[i] for i in torch.randperm(20).tolist())


class ToldShort(Stream):
    def __len__(self):
        return 8


def stateful():
    loader = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata, an optional package, is missing")
    return loader.StatefulDataLoader(DATA, 2, shuffle=True)


LOADERS = {
    "stateful": stateful,
    "shuffle": lambda: DataLoader(DATA, 2, shuffle=True),
    "generator": lambda: DataLoader(DATA, 2, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "set_epoch": lambda: DataLoader(DATA, 2, sampler=Epochal(DATA)),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=Batches()),
    "augmented": lambda: DataLoader(Noisy(), 2, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 2),
    "stream, told as too short": lambda: DataLoader(ToldShort(), 2),
    "workers": lambda: DataLoader(Noisy(), 2, shuffle=True, num_workers=1),
}


def make(folder, loader, fault=None, on_row=None, net=None, **config):
    config = {"learning_rate": 0.05, "checkpoint_every_n_steps": 1, "max_rolling_checkpoints": 1000, **config}
    net = net or Seen()
    return net, SafeTrainer(
        net,
        TrainConfig(**config),
        loader,
        loss_fn=nn.functional.mse_loss,
        checkpoint_dir=folder,
        fault=fault,
        on_row=on_row,
    )


FP16 = {"use_amp": True, "amp_dtype": "float16", "gradient_accumulation_steps": 4, "max_steps": 6}


def test_stopped_at_each_update_of_two_epochs_it_ends_bit_equal(tmp_path):
    """AdamW, cosine, dropout, shuffle, accumulation 4 (a short last window), a float16 scaler that really overflows."""
    net, trainer = make(tmp_path / "whole", LOADERS["shuffle"](), **FP16)
    whole = trainer.fit()
    assert whole.skips > 0
    assert whole.state.epoch == 2 or whole.state.step > 6
    for path in sorted((tmp_path / "whole").glob("step_*.pt"))[:-1]:
        again, second = make(tmp_path / path.stem, LOADERS["shuffle"](), **FP16)
        second.resume(path)
        result = second.fit()
        assert repr(result.rows) == repr(whole.rows[-len(result.rows) :])  # repr, since NaN is not NaN
        for key, value in net.state_dict().items():
            assert torch.equal(value, again.state_dict()[key]), (path, key)


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [4, 10, 14])
def test_each_sample_of_an_epoch_is_seen_exactly_once_and_losses_are_equal(tmp_path, name, stop):
    options = {"max_steps": 20, "checkpoint_every_n_steps": stop}
    net, trainer = make(tmp_path / "a", LOADERS[name](), **options)
    whole = trainer.fit()
    again, second = make(tmp_path / "b", LOADERS[name](), **options)
    assert second.resume(tmp_path / "a" / f"step_{stop:08d}.pt") is not None
    again.seen = []
    result = second.fit()
    assert net.seen[: 2 * stop] + again.seen[-(40 - 2 * stop) :] == net.seen
    assert sorted(net.seen[:20]) == sorted(net.seen[20:]) == list(range(20))
    assert result.rows == whole.rows[stop:]


def test_the_position_is_the_next_epochs_beginning_after_its_last_batch(tmp_path):
    loader = DataLoader(TensorDataset(torch.zeros(100, 3), torch.zeros(100, 1)), 1)
    _, trainer = make(
        tmp_path,
        loader,
        net=nn.Linear(3, 1),
        gradient_accumulation_steps=4,
        max_steps=500,
        checkpoint_every_n_steps=500,
    )
    state = trainer.fit().state
    assert (state.updates, state.epoch, state.batch_in_epoch) == (500, 20, 0)
    _, second = make(tmp_path, loader, net=nn.Linear(3, 1), gradient_accumulation_steps=4, max_steps=500)
    second.resume()
    assert (second.state.epoch, second.state.batch_in_epoch) == (20, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"nan_check_interval": 4},
        {"async_save": True},
        pytest.param({"optimizer_class": "muon"}, marks=needs.muon),
        {"optimizer_class": "adafactor"},
    ],
)
def test_other_ways_of_running_resume_bit_equal_too(tmp_path, options):
    options = {"max_steps": 12, "checkpoint_every_n_steps": 4, "scheduler_type": "constant", **options}
    net, trainer = make(tmp_path / "a", LOADERS["shuffle"](), **options)
    whole = trainer.fit()
    again, second = make(tmp_path / "b", LOADERS["shuffle"](), **options)
    second.resume(tmp_path / "a" / "step_00000004.pt")
    assert second.fit().rows == whole.rows[4:]
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in net.state_dict().items())


def test_the_log_is_continued_without_a_gap_and_without_a_step_twice(tmp_path):
    log = tmp_path / "m.csv"
    options = {"max_steps": 12, "checkpoint_every_n_steps": 5, "csv_log_path": str(log)}

    def die(row):
        if row.step == 8:
            raise KeyboardInterrupt

    _, trainer = make(tmp_path, LOADERS["shuffle"](), on_row=die, **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    _, second = make(tmp_path, LOADERS["shuffle"](), **options)
    assert second.resume().name == "step_00000005.pt"
    second.fit()
    rows = list(csv.DictReader(log.open(newline="")))
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert list(tmp_path.glob("m.*.csv")) == []


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_with_an_interval_a_signal_waits_for_the_look_and_the_resumed_run_is_the_same(tmp_path, stop):
    options = {"max_steps": 14, "nan_check_interval": 4, "checkpoint_every_n_steps": 1000}
    net, trainer = make(tmp_path / "a", LOADERS["shuffle"](), **options)
    whole = trainer.fit()

    def strike(step, _):
        if step == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    _, cut = make(tmp_path / "b", LOADERS["shuffle"](), fault=strike, **options)
    assert cut.fit().state.step == (4 if stop < 5 else 8)
    again, second = make(tmp_path / "b", LOADERS["shuffle"](), **options)
    second.resume()
    rows = second.fit().rows
    assert rows == whole.rows[-len(rows) :]
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in net.state_dict().items())


def test_a_folder_of_another_run_is_refused_by_a_fresh_one(tmp_path):
    make(tmp_path, LOADERS["shuffle"](), max_steps=3)[1].fit()
    with pytest.raises(ValueError, match="holds checkpoints of a run already"):
        make(tmp_path, LOADERS["shuffle"](), max_steps=3)[1].fit()


def test_an_exception_of_a_hook_or_the_loader_leaves_a_checkpoint_to_go_on_from(tmp_path):
    def fails(step, net):
        if step == 6:
            raise OSError("the data server is gone")

    options = {"max_steps": 10, "checkpoint_every_n_steps": 1000, "scheduler_type": "constant"}
    net, trainer = make(tmp_path, LOADERS["generator"](), fault=fails, **options)
    with pytest.raises(OSError, match="data server"):
        trainer.fit()
    first = list(net.seen)
    net, second = make(tmp_path, LOADERS["generator"](), **options)
    assert second.resume().name == "step_00000005.pt"
    net.seen = []
    second.fit()
    assert sorted(first + net.seen) == list(range(20))


def test_an_exception_in_the_model_leaves_the_last_exact_checkpoint(tmp_path):
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("CUDA out of memory")
        return nn.functional.mse_loss(output, target)

    config = TrainConfig(max_steps=12, checkpoint_every_n_steps=5)
    whole = SafeTrainer(Seen(), config, LOADERS["shuffle"](), loss_fn=nn.functional.mse_loss).fit()
    with pytest.raises(RuntimeError, match="out of memory"):
        SafeTrainer(Seen(), config, LOADERS["shuffle"](), loss_fn=loss, checkpoint_dir=tmp_path).fit()
    second = SafeTrainer(Seen(), config, LOADERS["shuffle"](), loss_fn=nn.functional.mse_loss, checkpoint_dir=tmp_path)
    assert second.resume().name == "step_00000005.pt"
    assert second.fit().rows == whole.rows[5:]


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_run_whose_validation_was_cut_short_ends_bit_equal(tmp_path, batch):
    class Val:
        """Draws from the global random state, as every DataLoader does when it begins."""

        strikes = False

        def __iter__(self):
            torch.rand(1)
            for i in range(3):
                if i == batch and self.strikes:
                    self.strikes = False
                    os.kill(os.getpid(), signal.SIGINT)
                yield DATA[i][0].reshape(1, 3), DATA[i][1].reshape(1, 1)

    def trainer(folder, loader):
        config = TrainConfig(max_steps=9, eval_every_n_steps=2)
        return SafeTrainer(Seen(), config, LOADERS["shuffle"](), loader, nn.functional.mse_loss, checkpoint_dir=folder)

    whole = trainer(tmp_path / "a", Val()).fit()
    cut = Val()
    cut.strikes = True
    trainer(tmp_path / "b", cut).fit()
    again = trainer(tmp_path / "b", Val())
    again.resume()
    rows = again.fit().rows
    assert rows == whole.rows[-len(rows) :]


def test_a_validation_that_a_signal_cut_short_is_made_up_for(tmp_path):
    class Val:
        strikes = True

        def __iter__(self):
            for i in range(3):
                if i == 1 and self.strikes:
                    os.kill(os.getpid(), signal.SIGINT)
                yield DATA[i][0].reshape(1, 3), DATA[i][1].reshape(1, 1)

    loader, options = Val(), {"max_steps": 4, "eval_every_n_steps": 2}
    config = TrainConfig(**options)
    cut = SafeTrainer(Seen(), config, LOADERS["shuffle"](), loader, nn.functional.mse_loss, checkpoint_dir=tmp_path)
    assert cut.fit().val_loss is None
    loader.strikes = False
    again = SafeTrainer(Seen(), config, LOADERS["shuffle"](), loader, nn.functional.mse_loss, checkpoint_dir=tmp_path)
    again.resume()
    again.fit()
    assert '"step_00000002.pt"' in (tmp_path / "best.json").read_text() or again._keeper.checkpoints.best() is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_of_the_step_it_ended_with(tmp_path, number):
    def strike(row):
        if row.step == 3:
            os.kill(os.getpid(), number)

    _, trainer = make(tmp_path, LOADERS["shuffle"](), on_row=strike, max_steps=50, checkpoint_every_n_steps=1000)
    result = trainer.fit()
    assert result.status == "interrupted"
    assert trainer._keeper.newest_good().endswith(f"step_{result.state.step:08d}.pt")


def test_a_signal_during_validation_ends_it_promptly_with_a_checkpoint(tmp_path):
    batches = 0

    class Slow:
        def __iter__(self):
            nonlocal batches
            for i in range(1000):
                batches += 1
                if i == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield DATA[i % 20][0].reshape(1, 3), DATA[i % 20][1].reshape(1, 1)

    net = Seen()
    config = TrainConfig(max_steps=10, eval_every_n_steps=2)
    result = SafeTrainer(
        net, config, LOADERS["shuffle"](), Slow(), nn.functional.mse_loss, checkpoint_dir=tmp_path
    ).fit()
    assert (result.status, result.state.updates, result.val_loss) == ("interrupted", 2, None)
    assert batches < 10
    assert (tmp_path / "step_00000002.pt").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
def test_sigusr1_saves_and_goes_on(tmp_path):
    def ask(row):
        if row.step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)

    _, trainer = make(tmp_path, LOADERS["shuffle"](), on_row=ask, max_steps=6, checkpoint_every_n_steps=1000)
    assert trainer.fit().status == "completed"
    assert [p.name for p in sorted(tmp_path.glob("step_*.pt"))] == ["step_00000003.pt", "step_00000006.pt"]


def test_the_best_by_validation_loss_is_kept(tmp_path):
    losses = iter([0.9, 0.2, 0.5, 0.4, 0.8])
    _, trainer = make(
        tmp_path,
        LOADERS["shuffle"](),
        max_steps=4,
        eval_every_n_steps=1,
        max_rolling_checkpoints=1,
        checkpoint_every_n_steps=1,
    )
    trainer.val_loader = [1]
    trainer.validate = lambda: next(losses)
    trainer.fit()
    assert trainer._keeper.checkpoints.best().name == "step_00000002.pt"
    assert len(list(tmp_path.glob("step_*.pt"))) == 2


def test_a_loss_jump_goes_back_to_the_checkpoint_replays_and_leaves_the_bad_window_out(tmp_path):
    """The window itself is bad: each time it comes, the loss is three times what it should be."""
    bad = DATA[13][0]

    class Jumps(Seen):
        def forward(self, x):
            out = super().forward(x)
            return out + (50.0 if self.training and (x == bad).all(dim=1).any() else 0.0)

    options = {
        "max_steps": 30,
        "loss_jump_factor": 5.0,
        "loss_jump_window": 4,
        "checkpoint_every_n_steps": 3,
        "scheduler_type": "constant",
        "max_nan_retries": 5,
    }
    _, trainer = make(tmp_path, DataLoader(DATA, 2), net=Jumps(), **options)
    result = trainer.fit()
    jumps = [row.step for row in result.rows if row.skip_reason == "loss_jump"]
    assert jumps[0] == 7
    assert result.state.retries == len(jumps) >= 2
    assert result.state.updates == 30
    lines = (tmp_path / "bad_windows.jsonl").read_text().splitlines()
    assert lines[0] == '{"epoch": 0, "batch_in_epoch": 6}'
    assert [row.step for row in result.rows] == list(range(1, result.state.step + 1))
    _, second = make(tmp_path, DataLoader(DATA, 2), net=Jumps(), **{**options, "max_steps": 31})
    second.resume()
    assert second._keeper.is_bad((0, 6))
    second.fit()


def test_a_failure_names_the_newest_good_checkpoint(tmp_path):
    def fault(step, net):
        if step >= 5:
            net.net[0].weight.register_hook(lambda grad: grad * torch.nan)

    _, trainer = make(tmp_path, LOADERS["shuffle"](), fault=fault, max_steps=20, max_nan_retries=1)
    with pytest.raises(TrainingFailed, match=r"1 of 1 retries used; resume from .*step_00000004\.pt") as caught:
        trainer.fit()
    assert caught.value.newest_good.endswith("step_00000004.pt")


def test_the_checkpoints_learning_rate_stands_unless_another_is_asked_for(tmp_path, caplog):
    options = {"max_steps": 4, "scheduler_type": "constant", "checkpoint_every_n_steps": 2}
    make(tmp_path, LOADERS["shuffle"](), learning_rate=0.05, **options)[1].fit()
    path = tmp_path / "step_00000002.pt"
    net = Seen()
    silent = SafeTrainer(net, TrainConfig(**options), LOADERS["shuffle"](), checkpoint_dir=tmp_path / "b")
    silent.resume(path)
    assert silent.amp.lr == 0.05
    with caplog.at_level(logging.WARNING):
        _, asked = make(tmp_path / "c", LOADERS["shuffle"](), learning_rate=0.01, **options)
        asked.resume(path)
    assert asked.amp.lr == pytest.approx(0.01)
    assert "replaces the checkpoint's 0.05" in caplog.text
    assert [row.lr for row in asked.fit().rows] == pytest.approx([0.01] * 2)


def test_a_schedule_of_two_phases_resumed_past_the_boundary_has_the_same_rates(tmp_path):
    options = {"max_steps": 10, "scheduler_warmup_ratio": 0.4, "checkpoint_every_n_steps": 1}
    whole = make(tmp_path, LOADERS["shuffle"](), **options)[1].fit()
    for stop in (2, 4, 5, 9):
        _, second = make(tmp_path / str(stop), LOADERS["shuffle"](), **options)
        second.resume(tmp_path / f"step_{stop:08d}.pt")
        assert [row.lr for row in second.fit().rows] == [row.lr for row in whole.rows[stop:]]


def test_what_cannot_be_resumed_is_refused_and_nothing_changes(tmp_path):
    make(tmp_path, LOADERS["shuffle"](), max_steps=4)[1].fit()
    path = tmp_path / "step_00000002.pt"
    with pytest.raises(ValueError, match="no checkpoint_dir"):
        SafeTrainer(Seen(), TrainConfig(max_steps=1), LOADERS["shuffle"]()).resume()
    net, other = make(tmp_path, LOADERS["shuffle"](), max_steps=4, optimizer_class="sgd_momentum")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(CheckpointError, match="holds the optimizer AdamW"):
        other.resume(path)
    _, longer = make(tmp_path, LOADERS["shuffle"](), max_steps=9)
    with pytest.raises(CheckpointError, match="another schedule"):
        longer.resume(path)
    _, generated = make(tmp_path, LOADERS["generator"](), max_steps=4)
    with pytest.raises(CheckpointError, match="1 generators of its own, the checkpoint 0"):
        generated.resume(path)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    _, fresh = make(tmp_path / "none", LOADERS["shuffle"](), max_steps=4)
    assert fresh.resume() is None
    assert fresh.fit().status == "completed"


def test_data_that_has_become_shorter_is_noticed(tmp_path):
    make(tmp_path, LOADERS["shuffle"](), max_steps=8)[1].fit()
    short = DataLoader(TensorDataset(*DATA[:6]), 2, shuffle=True)
    _, second = make(tmp_path, short, max_steps=8)
    second.resume(tmp_path / "step_00000007.pt")
    with pytest.raises(CheckpointError, match="ended after 3 batches, but 7"):
        second.fit()


def test_a_completed_run_that_is_extended_is_the_longer_run_validation_or_not(tmp_path):
    data = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(24, 1))

    def run(folder, steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        config = TrainConfig(max_steps=steps, scheduler_type="constant", learning_rate=0.1)
        loaders = (DataLoader(data, 4, shuffle=True), DataLoader(data, 4, shuffle=True))
        trainer = SafeTrainer(model, config, *loaders, nn.functional.mse_loss, checkpoint_dir=folder)
        trainer.resume()
        return [row.loss for row in trainer.fit().rows]

    whole = run(tmp_path / "whole", 10)
    assert run(tmp_path / "parts", 4) + run(tmp_path / "parts", 10) == whole


def cut_folder(parent, name, manifest=None):
    """A checkpoint folder ``name`` whose manifest has this text; None: has none."""
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / "rank0.bin").write_bytes(b"weights")
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    return folder


@pytest.mark.parametrize("manifest", ["", "{", "{}", '{"schema": "ckpt.dcp.v1"}', '{"schema": "other"}'])
def test_a_folder_whose_manifest_is_damaged_is_no_fresh_start_and_stays(tmp_path, manifest):
    folder = cut_folder(tmp_path, "step_00000010", manifest)
    _, trainer = make(tmp_path, LOADERS["shuffle"](), max_steps=2)
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* is whole; move them"):
        trainer.resume()
    with pytest.raises(ValueError, match="holds checkpoints of a run already"):
        trainer.fit()
    assert {path.name for path in folder.iterdir()} == {"rank0.bin", "manifest.json"}


def test_two_folders_without_a_manifest_are_no_fresh_start_one_is_a_first_save_that_was_cut(tmp_path, caplog):
    first = cut_folder(tmp_path, "step_00000010")
    second = cut_folder(tmp_path, "step_00000020")
    _, trainer = make(tmp_path, LOADERS["shuffle"](), max_steps=2)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        trainer.resume()
    assert (first / "rank0.bin").exists()
    (second / "rank0.bin").unlink()
    second.rmdir()
    with caplog.at_level(logging.WARNING):
        assert trainer.resume() is None
    assert "step_00000010 has no manifest, its save was never finished" in caplog.text
    trainer.fit()
    assert (tmp_path / "step_00000010.abandoned" / "rank0.bin").read_bytes() == b"weights"
    assert (tmp_path / "step_00000002.pt").exists()


@pytest.mark.parametrize("manifest", [None, "{"])
def test_a_newer_folder_that_is_not_whole_is_passed_over_by_name_and_set_aside(tmp_path, caplog, manifest):
    make(tmp_path, LOADERS["shuffle"](), max_steps=3, scheduler_type="constant")[1].fit()
    cut_folder(tmp_path, "step_00000007", manifest)
    _, trainer = make(tmp_path, LOADERS["shuffle"](), max_steps=5, scheduler_type="constant")
    with caplog.at_level(logging.WARNING):
        assert trainer.resume() == tmp_path / "step_00000003.pt"
    assert "passed over: " in caplog.text
    assert "step_00000007" in caplog.text
    assert (tmp_path / "step_00000007.abandoned" / "rank0.bin").exists()


def test_what_was_set_aside_before_stays_beside_what_is_set_aside_now(tmp_path):
    make(tmp_path, LOADERS["shuffle"](), max_steps=3)[1].fit()
    kept = (tmp_path / "step_00000003.pt").read_bytes()
    for _ in range(2):
        _, trainer = make(tmp_path, LOADERS["shuffle"](), max_steps=3)
        trainer.resume(tmp_path / "step_00000002.pt")
        trainer.fit()
    assert (tmp_path / "step_00000003.pt.abandoned").read_bytes() == kept
    assert (tmp_path / "step_00000003.pt.abandoned2").exists()


def test_a_folder_that_is_no_checkpoint_is_the_users_mistake_and_its_newest_is_named(tmp_path):
    _, trainer = make(tmp_path / "other", LOADERS["shuffle"](), max_steps=3)
    with pytest.raises(ValueError, match="is a folder and no checkpoint, and holds none; name a step"):
        trainer.resume(tmp_path)
    make(tmp_path / "first", LOADERS["shuffle"](), max_steps=3)[1].fit()
    with pytest.raises(ValueError, match=r"the newest in it is .*first.step_00000003\.pt; name a step"):
        trainer.resume(tmp_path / "first")


class Broken(Noisy):
    """One of its samples cannot be read, once."""

    reads, broken_at = 0, None

    def __getitem__(self, i):
        self.reads += 1
        if self.reads == self.broken_at:
            raise OSError("a broken file")
        return super().__getitem__(i)


@pytest.mark.parametrize("who", ["a hook", "the loader", "the loader, at a batch that is no pair"])
def test_a_run_that_a_hook_or_the_loader_has_ended_resumes_to_the_same_weights(tmp_path, who):
    """Its last window was fetched, or begun to be, by a dataset that draws random numbers in this process."""
    options = {"max_steps": 12, "gradient_accumulation_steps": 2, "checkpoint_every_n_steps": 100}

    def hook(step, model):
        if step == 7:
            raise OSError("a broken hook")

    def no_pair(samples):
        return torch.zeros(2) if data.reads > 26 else torch.utils.data.default_collate(samples)

    data = Broken()
    whole, trainer = make(tmp_path / "a", DataLoader(data, 2, shuffle=True), **options)
    trainer.fit()
    data = Broken()
    data.broken_at = 27 if who == "the loader" else None
    loader = DataLoader(data, 2, shuffle=True, collate_fn=no_pair if "pair" in who else None)
    _, first = make(tmp_path / "b", loader, fault=hook if who == "a hook" else None, **options)
    with pytest.raises((OSError, ValueError)):
        first.fit()
    net, second = make(tmp_path / "b", DataLoader(Broken(), 2, shuffle=True), **options)
    assert second.resume() is not None
    second.fit()
    for key, value in whole.state_dict().items():
        assert torch.equal(value, net.state_dict()[key]), key
