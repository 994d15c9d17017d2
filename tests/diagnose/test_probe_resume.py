"""What ``probe_resume`` finds in real saves and loads, and that it is quiet on right ones."""

import functools

import pytest
import torch
from resume_runs import PARTS, Kind, load, save, step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain_core import (
    SafeTrainer,
    TrainConfig,
    TrainState,
    atomic_save,
    load_checkpoint,
    probe_resume,
    save_checkpoint,
)

KINDS = [
    Kind("mlp", "adamw", 0),
    Kind("dropout", "adam", 1),
    Kind("batchnorm", "momentum", 2),
    Kind("conv", "fused", 3, scaled=True),
    Kind("tokens", "lion", 4, noise="numpy"),
    Kind("gpt", "rmsprop", 5, noise="python"),
    Kind("linear", "galore", 6, scaled=True),
]


def rules(findings):
    return {finding.rule for finding in findings}


def probed(kind, lost=(), not_loaded=(), **knobs):
    saving, loading = functools.partial(save, without=lost), functools.partial(load, without=not_loaded)
    return rules(probe_resume(saving, loading, step, kind.make, steps_after=9, **knobs))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_right_resume_is_left_alone(kind):
    assert probed(kind) == set()


@pytest.mark.parametrize("how", ["not saved", "not loaded"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("part", ["optimizer", "scheduler", "scaler", "model"])
def test_a_part_left_behind_is_named(part, kind, how):
    if part == "scaler" and not kind.scaled:
        kind = Kind(kind.model, kind.optimizer, kind.seed, scaled=True, noise=kind.noise)
    got = probed(kind, **{"lost" if how == "not saved" else "not_loaded": (part,)})
    expected = {"model": "weights", "scheduler": "schedule"}.get(part, part)
    assert f"resume_without_{expected}" in got
    besides = {"resume_without_schedule"} if part == "optimizer" else set()  # its learning rate is there, too
    assert got <= {f"resume_without_{expected}"} | besides


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_random_states_left_behind_are_named(kind):
    assert probed(kind, not_loaded=("rng",)) - {"resume_at_wrong_data"} == {"resume_without_rng"}


def test_words_and_evidence_name_the_same_step():
    """A draw after the restore: the first step after the five that were saved is the sixth."""

    def early(run, path):
        load(run, path)
        torch.rand(1)

    (found,) = probe_resume(save, early, step, Kind("dropout").make, steps_after=1)
    assert "from step 6 on" in found.symptom
    assert found.evidence[0].step == 6


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_lost_data_position_is_named(kind):
    """In mid-epoch the position matters; the random states, put back, do not make it good."""
    assert probed(kind, lost=("position",)) == {"resume_at_wrong_data"}


@pytest.mark.parametrize("off", [-4, 4, -8])
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_a_position_that_is_a_batch_off_is_named_with_both(kind, off):
    def shifted(run, path):
        load(run, path)
        run.at += off

    findings = probe_resume(save, shifted, step, kind.make, steps_before=3, steps_after=2)
    assert rules(findings) == {"resume_at_wrong_data"}
    values = findings[0].evidence[0].values
    assert values["expected batch"] == 4
    assert values["got batch"] == 4 + off // 4


def test_random_states_restored_too_early_are_named():
    def early(run, path):
        load(run, path)
        torch.rand(1)  # something draws after the restore: a new loader, a module that is built

    assert rules(probe_resume(save, early, step, Kind("dropout").make, steps_after=9)) == {"resume_without_rng"}


def test_several_things_left_behind_are_all_named():
    got = probed(Kind("dropout", "adamw"), lost=("optimizer", "scheduler"), not_loaded=("rng",))
    assert {"resume_without_optimizer", "resume_without_schedule", "resume_without_rng"} <= got


def test_state_outside_of_all_parts_is_told_as_a_difference():
    def averaged(run):
        for name, p in run.model.named_parameters():
            run.average[name] = 0.5 * run.average.get(name, 0.0) + 0.5 * p.detach()
        loss = step(run)
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                p.lerp_(run.average[name], 0.1)
        return loss

    findings = probe_resume(save, load, averaged, Kind("mlp").make)
    assert rules(findings) == {"resume_differs"}
    assert findings[0].evidence[0].step == 6


def test_what_makes_no_difference_is_no_finding():
    """Plain SGD has no state; without dropout and shuffling nothing is drawn."""

    def make():
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    def plain(run):
        net, sgd = run
        sgd.zero_grad()
        net(torch.ones(2, 6)).square().mean().backward()
        sgd.step()

    def only_weights(run, path):
        torch.save(run[0].state_dict(), path)

    def back(run, path):
        run[0].load_state_dict(torch.load(path, weights_only=True))

    assert probe_resume(only_weights, back, plain, make) == []


def test_a_run_that_is_never_the_same_twice_is_not_blamed_on_its_resume():
    fresh = torch.Generator()

    def restless(run):
        for p in run.model.parameters():
            p.data += 1e-3 * torch.randn(p.shape, generator=fresh)
        return step(run)

    assert rules(probe_resume(save, load, restless, Kind("mlp").make)) == {"not_reproducible"}


def one_file(kind):
    """``save_checkpoint`` and ``load_checkpoint``, with the position as a loader that has a state_dict."""

    class Position:
        def __init__(self, run):
            self.run = run

        def state_dict(self):
            return {"order": self.run.order, "at": self.run.at}

        def load_state_dict(self, told):
            self.run.order, self.run.at = told["order"], told["at"]

    def saving(run, path):
        save_checkpoint(
            *(getattr(run, name) for name in PARTS[:3]), TrainState(), path, scaler=run.scaler, loader=Position(run)
        )

    def loading(run, path):
        load_checkpoint(path, *(getattr(run, name) for name in PARTS[:3]), scaler=run.scaler, loader=Position(run))

    return saving, loading


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_our_checkpoints_are_left_alone(kind):
    assert probe_resume(*one_file(kind), step, kind.make, steps_after=9) == []


class Trainer:
    """A ``SafeTrainer`` that is stepped from outside, as its ``fit`` steps itself."""

    def __init__(self, folder, data, knobs):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        config = TrainConfig(**{"batch_size": 8, "max_steps": 20} | knobs)
        loader = DataLoader(data, config.batch_size, shuffle=True)
        self.trainer = SafeTrainer(net, config, loader, checkpoint_dir=folder)
        self.windows = None

    def step(self):
        if self.windows is None:
            self.windows = self.trainer._cursor.windows()
        return self.trainer.amp.step_window(next(self.windows))


@pytest.mark.parametrize("lost", [None, "scheduler", "rng", "loader"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "knobs", [{}, {"batch_size": 4, "gradient_accumulation_steps": 2}, {"use_amp": True, "amp_dtype": "float16"}]
)
def test_our_trainer_is_left_alone_and_a_fault_planted_in_its_file_is_named(knobs, seed, lost, tmp_path):
    data = TensorDataset(*(torch.randn(40, n, generator=torch.Generator().manual_seed(seed)) for n in (6, 3)))
    folders = iter(range(99))

    def saving(run, path):
        run.trainer._keeper.save()
        payload = torch.load(run.trainer._keeper.checkpoints.latest(), weights_only=True)
        if lost == "scheduler":
            with torch.random.fork_rng():
                payload["scheduler"] = Trainer(tmp_path / "fresh", data, knobs).trainer.amp.scheduler.state_dict()
        elif lost == "rng":
            payload["rng"] = None
        elif lost == "loader":
            payload["loader"]["epoch_start"] = None
        atomic_save(payload, path)

    def make():
        return Trainer(tmp_path / str(next(folders)), data, knobs)

    found = probe_resume(saving, lambda run, path: run.trainer._keeper.resume(path), Trainer.step, make, steps_before=3)
    expected = {None: set(), "scheduler": {"resume_without_schedule"}, "rng": {"resume_without_rng"}}
    got = rules(found)
    assert got == expected.get(lost, {"resume_at_wrong_data"}) or (lost == "rng" and "resume_without_rng" in got)


@pytest.mark.parametrize(
    ("knobs", "words"), [({"steps_before": 0}, "steps_before=0"), ({"steps_after": 0}, "steps_after=0")]
)
def test_too_few_steps_are_refused(knobs, words):
    with pytest.raises(ValueError, match=words):
        probe_resume(save, load, step, Kind().make, **knobs)


def test_what_load_raises_is_passed_on():
    with pytest.raises(FileNotFoundError):
        probe_resume(lambda run, path: None, load, step, Kind().make)
