"""What ``probe_memory`` counts, what it finds, and that it is quiet on steps that are well."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from probed_loops import Case, amp_window, cases, divides_gradients, loss_of, one_backward, step, with_closure
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from safetrain_core import (
    AmpTrainState,
    MiniGPT,
    MiniGPTConfig,
    apply_recompute,
    measure_recompute,
    next_token_loss,
    probe_memory,
)

WIDTH, LAYERS, BATCH = 32, 6, 256


def deep():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def conv():
    blocks = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 64, 4))


def gpt():
    return MiniGPT(MiniGPTConfig(vocab_size=32, context=32, layers=4, heads=2, width=32, dropout=0.1))


def batch_of(make, samples):
    made = torch.Generator().manual_seed(1)
    if make is gpt:
        return tuple(torch.randint(0, 32, (samples, 32), generator=made) for _ in range(2))
    if make is conv:
        return torch.randn(samples, 4, 8, 8, generator=made), torch.randint(0, 4, (samples,), generator=made)
    return tuple(torch.randn(samples, WIDTH, generator=made) for _ in range(2))


SAMPLES = {deep: BATCH, conv: 32, gpt: 8}
MODELS = pytest.mark.parametrize("make", [deep, conv, gpt], ids=lambda make: make.__name__)


def loss_for(make):
    return {deep: F.mse_loss, conv: F.cross_entropy, gpt: next_token_loss}[make]


def run_of(make, policy=None):
    def built():
        model = make()
        if policy is not None:
            apply_recompute(model, policy)
        return model, torch.optim.AdamW(model.parameters())

    return built


def plain(make):
    def work(run, window):
        model, optimizer = run
        optimizer.zero_grad()
        for x, y in window:
            loss = loss_for(make)(model(x), y)
            (loss / len(window)).backward()
        optimizer.step()

    return work


def rules(findings):
    return [finding.rule for finding in findings]


def seen(step_fn, make_run, window):
    """The bytes counted, from the evidence of a limit that nothing fits."""
    (finding,) = probe_memory(step_fn, make_run, window, limit_bytes=1)
    return finding.evidence[0].values


def state_of(values):
    return sum(values[name] for name in ("weight bytes", "gradient bytes", "optimizer state bytes"))


def test_the_count_equals_the_closed_form_of_a_deep_network():
    def summed(run, window):
        run[1].zero_grad()
        run[0](window[0][0]).sum().backward()
        run[1].step()

    values = seen(summed, run_of(deep), [batch_of(deep, BATCH)])
    weights, rows = LAYERS * (WIDTH + 1) * WIDTH * 4, BATCH * WIDTH * 4
    assert values["weight bytes"] == values["gradient bytes"] == weights
    assert values["optimizer state bytes"] == 2 * weights + 2 * LAYERS * 4  # two moments; a count for each tensor
    assert values["batch bytes"] == 2 * rows
    # Each layer keeps what goes into its GELU and what comes out of it; the last output is not kept, the gradient that
    # comes back takes its place; then the first weight's gradient is made, beside the loss and its own gradient.
    assert values["activation bytes"] == 2 * LAYERS * rows + weights // LAYERS + 2 * 4


@MODELS
@pytest.mark.parametrize("policy", [None, "full"])
def test_the_count_is_that_of_measure_recompute_and_covers_what_autograd_saves(make, policy):
    window = [batch_of(make, SAMPLES[make])]
    values = seen(plain(make), run_of(make, policy), window)
    model = make()
    cost = measure_recompute(model, window[0], policy, loss_fn=loss_for(make), timed_runs=0)
    assert values["activation bytes"] == pytest.approx(cost.activation_bytes, abs=128)
    if policy is None:
        saved = saved_bytes(make, model, window[0])
        assert 0.6 * values["activation bytes"] < saved < values["activation bytes"]
    else:
        assert values["activation bytes"] < 0.75 * seen(plain(make), run_of(make), window)["activation bytes"]


def test_the_optimizers_state_and_temporaries_are_no_activations():
    one = [batch_of(deep, 1)]
    values = seen(plain(deep), run_of(deep), one)
    one_weight = WIDTH * WIDTH * 4
    assert values["activation bytes"] < 2 * (2 * LAYERS + 2) * WIDTH * 4 + one_weight  # of AdamW's step: 2 and more
    assert rules(probe_memory(plain(deep), run_of(deep), one, limit_bytes=state_of(values))) == ["does_not_fit"]
    roomier = state_of(values) + values["batch bytes"] + values["activation bytes"]
    assert probe_memory(plain(deep), run_of(deep), one, limit_bytes=roomier) == []


def saved_bytes(make, model, batch):
    """What autograd keeps between forward and backward, by its own hooks: no weight, no input."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    sizes, alive = {}, []

    def pack(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_for(make)(model(batch[0]), batch[1])
    assert loss.requires_grad
    return sum(sizes.values())


@MODELS
def test_each_limit_gets_its_name(make):
    window = [batch_of(make, SAMPLES[make])]
    judged = [plain(make), run_of(make), window]
    values = seen(*judged)
    state = state_of(values)
    # Before the first backward there are no gradients: activations take their place.
    needed = values["batch bytes"] + max(state, state - values["gradient bytes"] + values["activation bytes"])
    assert rules(probe_memory(*judged, limit_bytes=state - 1)) == ["weights_do_not_fit"]
    assert rules(probe_memory(*judged, limit_bytes=state)) == ["does_not_fit"]
    assert rules(probe_memory(*judged, limit_bytes=0.98 * needed)) == ["does_not_fit"]
    assert rules(probe_memory(*judged, limit_bytes=1.02 * needed)) in ([], ["activations_dominate"])
    assert probe_memory(*judged, limit_bytes=3 * needed) == []
    assert probe_memory(*judged) == []


@MODELS
def test_recompute_and_smaller_micro_batches_fit_where_the_whole_does_not(make):
    x, y = batch_of(make, SAMPLES[make])
    values = seen(plain(make), run_of(make), [(x, y)])
    limit = state_of(values) + values["batch bytes"] + 0.8 * values["activation bytes"] - values["gradient bytes"]
    assert rules(probe_memory(plain(make), run_of(make), [(x, y)], limit_bytes=limit)) == ["does_not_fit"]
    recomputed = probe_memory(plain(make), run_of(make, "full"), [(x, y)], limit_bytes=limit)
    assert rules(recomputed) in ([], ["activations_dominate"])
    quarters = list(zip(x.chunk(4), y.chunk(4), strict=True))
    roomier = limit + values["gradient bytes"]  # which are there while the second micro-batch runs
    assert probe_memory(plain(make), run_of(make), quarters, limit_bytes=roomier) == []


def test_torchs_own_checkpointing_is_seen():
    def recomputing(run, window):
        model, optimizer = run
        optimizer.zero_grad()
        F.mse_loss(checkpoint_sequential(model, 3, window[0][0], use_reentrant=False), window[0][1]).backward()
        optimizer.step()

    window = [batch_of(deep, BATCH)]
    whole = seen(plain(deep), run_of(deep), window)["activation bytes"]
    parts = seen(recomputing, run_of(deep), window)["activation bytes"]
    rows = BATCH * WIDTH * 4
    # the last third is run as it is; then its parts stay: two inputs of segments, and one segment of two layers
    assert parts < whole - 3 * rows


def test_activations_that_are_large_and_much_larger_than_the_rest_are_told():
    def wide():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    large = [(torch.zeros(80_000, 64), torch.zeros(80_000, 64))]
    (finding,) = probe_memory(plain(deep), wide, large)
    assert (finding.rule, finding.severity) == ("activations_dominate", "warning")
    assert finding.evidence[0].values["activation bytes"] > 256 * 2**20
    assert probe_memory(plain(deep), wide, [(large[0][0][:8000], large[0][1][:8000])]) == []  # as many times as large
    limit = 1.2 * sum(v for k, v in finding.evidence[0].values.items() if k.endswith("bytes"))
    assert rules(probe_memory(plain(deep), wide, large, limit_bytes=limit)) == ["activations_dominate"]
    assert probe_memory(plain(deep), wide, large, limit_bytes=3 * limit) == []


@pytest.mark.parametrize("case", cases(count=21), ids=str)
def test_a_right_loop_is_left_alone(case):
    micro_batches = 1 + case.seed
    assert probe_memory(step(case), case.make, window_of(case, micro_batches), seed=case.seed) == []


@pytest.mark.parametrize("right", [divides_gradients, with_closure])
@pytest.mark.parametrize("case", cases(amps=(None,), count=4), ids=str)
def test_right_loops_written_otherwise_are_left_alone(case, right):
    assert probe_memory(right, case.make, window_of(case, 3), limit_bytes=1e9) == []


@pytest.mark.parametrize("case", cases(count=9), ids=str)
def test_ours_is_left_alone(case):
    assert probe_memory(amp_window, case.ours, window_of(case, 2)) == []


def window_of(case, count):
    x, y = case.batch()
    return list(zip(x.chunk(count), y.chunk(count), strict=True))


@pytest.mark.parametrize(
    ("kind", "count"), [("linear", 3), ("mlp", 4), ("batchnorm", 3), ("conv", 2), ("tokens", 4), ("gpt", 3)]
)
def test_a_window_that_goes_back_once_is_named_with_its_micro_batches(kind, count):
    case = Case(kind, "adamw")
    (finding,) = probe_memory(one_backward, case.make, window_of(case, count))
    assert (finding.rule, finding.severity) == ("micro_batches_at_once", "warning")
    assert finding.evidence[0].values["micro-batches at once"] == count


def test_two_calls_of_the_model_for_each_micro_batch_are_one_micro_batch():
    def pairs(run, window, once):
        run.optimizer.zero_grad()
        losses = []
        for x, y in window:
            losses.append((run.model(x) - run.model(x + 0.1)).square().mean() + loss_of(run.model(x), y))
            if not once:
                losses.pop().backward()
        if once:
            sum(losses).backward()
        run.optimizer.step()

    case = Case("mlp", "adamw")
    assert probe_memory(lambda run, w: pairs(run, w, False), case.make, window_of(case, 3)) == []
    (finding,) = probe_memory(lambda run, w: pairs(run, w, True), case.make, window_of(case, 3))
    assert finding.evidence[0].values["micro-batches at once"] == 3


def keeps(what):
    """A loop that stores something of each step in the run."""

    def work(run, window):
        run.optimizer.zero_grad()
        for x, y in window:
            logits = run.model(x)
            loss = loss_of(logits, y)
            loss.backward()
            match what:
                case "total += loss":
                    run.kept["total"] = run.kept.get("total", 0.0) + loss
                case "losses with their graph":
                    run.kept.setdefault("losses", []).append(loss)
                case "logits":
                    run.kept.setdefault("logits", []).append(logits)
                case "validation with a graph":
                    run.kept.setdefault("losses", []).append(loss_of(run.model(x), y))
                case "numbers":
                    run.kept["total"] = run.kept.get("total", 0.0) + loss.item()
                case "detached":
                    run.kept.setdefault("losses", []).append(loss.detach())
                case "validation without a graph":
                    with torch.no_grad():
                        run.kept.setdefault("losses", []).append(loss_of(run.model(x), y))
                case "the last loss only":
                    run.kept["last"] = loss
        run.optimizer.step()

    return work


@pytest.mark.parametrize("what", ["total += loss", "losses with their graph", "logits", "validation with a graph"])
@pytest.mark.parametrize("case", cases(amps=(None,), count=3), ids=str)
def test_a_graph_that_outlives_its_step_is_named(case, what):
    (finding,) = probe_memory(keeps(what), case.make, window_of(case, 2))
    assert (finding.rule, finding.severity) == ("graph_kept", "error")
    left = finding.evidence[0].values["bytes left"]
    assert left > 0
    if what == "validation with a graph" and case.model != "linear":
        assert left > 0.3 * finding.evidence[0].values["activation bytes"]


@pytest.mark.parametrize("what", ["numbers", "detached", "validation without a graph", "the last loss only"])
@pytest.mark.parametrize("case", cases(amps=(None,), count=3), ids=str)
def test_what_is_stored_without_its_graph_is_left_alone(case, what):
    assert probe_memory(keeps(what), case.make, window_of(case, 2)) == []


def test_a_graph_kept_in_a_global_is_found_and_those_of_the_caller_are_not():
    mine = [(torch.ones(3, requires_grad=True) * 2).sum() for _ in range(5)]
    stored = []
    case = Case("mlp", "adamw")

    def work(run, window):
        keeps("numbers")(run, window)
        stored.append(loss_of(run.model(window[0][0]), window[0][1]))

    assert rules(probe_memory(work, case.make, window_of(case, 2))) == ["graph_kept"]
    assert probe_memory(keeps("numbers"), case.make, window_of(case, 2)) == []
    assert len(mine) == 5


def test_a_step_that_really_runs_out_of_memory_is_a_finding():
    class Huge(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.empty(2**58).sum()

    class HugeState(torch.optim.SGD):
        def step(self, closure=None):
            torch.empty(2**58)

    def forward_fails():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Huge(WIDTH, WIDTH))
        return model, torch.optim.SGD(model.parameters())

    def state_fails():
        model = deep()
        return model, HugeState(model.parameters())

    (finding,) = probe_memory(plain(deep), forward_fails, [batch_of(deep, 8)])
    assert (finding.rule, finding.severity) == ("does_not_fit", "error")
    assert finding.evidence[0].values["activation bytes"] >= 2 * 8 * WIDTH * 4
    assert rules(probe_memory(plain(deep), state_fails, [batch_of(deep, 8)])) == ["weights_do_not_fit"]


def test_an_overflow_of_the_scaler_before_the_first_step_is_waited_for():
    def make():
        return AmpTrainState(nn.Linear(8, 4), amp_dtype=torch.float16, init_scale=2.0**30)

    window = [(torch.randn(16, 8), torch.randint(0, 4, (16,)))]
    assert probe_memory(amp_window, make, window) == []
    assert rules(probe_memory(amp_window, make, window, limit_bytes=100)) == ["weights_do_not_fit"]


def test_the_callers_model_random_states_and_hooks_are_as_before():
    model = deep()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def make():
        made = copy.deepcopy(model)
        return made, torch.optim.AdamW(made.parameters())

    probe_memory(plain(deep), make, [batch_of(deep, 8)])
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert torch.equal(state, torch.get_rng_state())
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    with pytest.raises(ValueError, match="same weights twice"):
        probe_memory(plain(deep), lambda: (model, torch.optim.SGD(model.parameters())), [batch_of(deep, 8)])
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"micro_batches": []}, "must be a list of batches"),
        ({"micro_batches": batch_of(deep, 4)}, "must be a list of batches"),
        ({"micro_batches": ["text"]}, "must be a list of batches"),
        ({"limit_bytes": 0}, "limit_bytes=0 must be a number above 0"),
        ({"limit_bytes": "1GB"}, "limit_bytes='1GB' must be a number above 0"),
        ({"limit_bytes": float("nan")}, "limit_bytes=nan"),
        ({"step_fn": lambda run, window: None}, "took no optimizer step on a window of 1"),
        ({"make_model": lambda: 3}, "no module with trainable weights"),
    ],
)
def test_what_cannot_be_judged_is_refused(knobs, words):
    given = {"step_fn": plain(deep), "make_model": run_of(deep), "micro_batches": [batch_of(deep, 4)], **knobs}
    with pytest.raises(ValueError, match=words):
        probe_memory(**given)


def test_an_error_of_the_step_is_its_own():
    def wrong(run, window):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        probe_memory(wrong, run_of(deep), [batch_of(deep, 4)])
