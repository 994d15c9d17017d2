"""Applying a policy and taking it back: what takes part, what stays as it was, what is refused."""

import contextlib
import copy
import gc
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
from recompute_cases import POLICIES, TwoStreams, WithKwargs, dense, gpt, gpt_loss, made, plain_stack, vectors
from torch import nn

from safetrain_core import apply_recompute, measure_recompute, remove_recompute
from safetrain_core.memory.recompute import attention_cores, layers_of, recomputed


@contextlib.contextmanager
def calls_of(modules):
    """How often each module runs, second runs included."""
    counts = [0] * len(modules)
    handles = []
    for i, module in enumerate(modules):

        def count(*_, i=i):
            counts[i] += 1

        handles.append(module.register_forward_hook(count))
    yield counts
    for handle in handles:
        handle.remove()


def inner_calls(model, step):
    with calls_of([block.mlp[0] for block in model.blocks]) as counts:
        step(model)
    return counts


@pytest.mark.parametrize(("policy", "twice"), [("none", 1), ("full", 2), ("every_k", 2), ("sqrt", 2), ("offload", 1)])
def test_each_layer_runs_as_often_as_its_policy_says(policy, twice):
    model = apply_recompute(gpt(), policy)
    assert inner_calls(model, lambda m: gpt_loss(m).backward()) == [twice] * 5


def test_only_the_named_layers_run_twice():
    model = apply_recompute(gpt(), ["blocks.1", "blocks.4"])
    assert inner_calls(model, lambda m: gpt_loss(m).backward()) == [1, 2, 1, 1, 2]


def test_selective_runs_the_attention_cores_twice_and_nothing_else():
    model = apply_recompute(gpt(), "selective")
    with calls_of([block.attention for block in model.blocks]) as attention:
        assert inner_calls(model, lambda m: gpt_loss(m).backward()) == [1] * 5
    assert attention == [1] * 5
    products = []
    for block in model.blocks:
        core = block.attention.core
        core.forward.own = lambda *qkv, core=core: products.append(1) or type(core).forward(core, *qkv)
    gpt_loss(model).backward()
    assert len(products) == 10


@pytest.mark.parametrize(("policy", "k"), POLICIES)
def test_evaluation_and_no_grad_bypass_it(policy, k):
    model = apply_recompute(gpt(), policy, k)
    with torch.no_grad():
        assert inner_calls(model, gpt_loss) == [1] * 5
    model.eval()
    assert inner_calls(model, lambda m: gpt_loss(m).backward()) == [1] * 5
    plain = gpt().eval()
    assert torch.equal(gpt_loss(model), gpt_loss(plain))


def test_eval_mode_between_forward_and_backward_is_an_error_not_a_wrong_gradient():
    for policy in ("full", "every_k", "selective"):
        model = apply_recompute(gpt(), policy)
        loss = gpt_loss(model)
        model.eval()
        with pytest.raises(RuntimeError, match=r"put into eval mode .* call model.eval\(\) after backward"):
            loss.backward()


def test_an_input_changed_in_place_after_the_forward_is_an_error_not_a_wrong_gradient():
    for policy in ("full", "every_k"):
        x = vectors()
        loss = apply_recompute(plain_stack(dense), policy)(x).sum()
        x.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed in place"):
            loss.backward()


@pytest.mark.parametrize(("policy", "k"), POLICIES)
def test_names_state_and_classes_stay_as_they_are_and_the_way_back_leaves_no_trace(policy, k):
    model = gpt()
    before = [vars(m).copy() for m in model.modules()]
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    names = [name for name, _ in model.named_parameters()]
    apply_recompute(model, policy, k)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names
    assert [type(m) for m in model.modules()] == classes
    model.load_state_dict(gpt().state_dict(), strict=True)
    assert remove_recompute(model) is model
    assert [vars(m) for m in model.modules()] == before
    remove_recompute(model)


def test_a_policy_takes_the_place_of_the_one_before():
    model = gpt()
    for policy in ("selective", "every_k", "full", "none"):
        assert apply_recompute(model, policy) is model
    assert inner_calls(model, lambda m: gpt_loss(m).backward()) == [1] * 5
    with recomputed(apply_recompute(model, "full"), "none"):
        assert inner_calls(model, lambda m: gpt_loss(m).backward()) == [1] * 5
    assert inner_calls(model, lambda m: gpt_loss(m).backward()) == [2] * 5


def test_a_forward_of_the_instances_own_is_used_and_put_back():
    model, seen = plain_stack(dense), []
    original = model[2].forward
    own = lambda x: seen.append(1) or original(x)  # noqa: E731
    model[2].forward = own
    apply_recompute(model, "every_k")(vectors()).sum().backward()
    assert len(seen) == 2
    assert vars(remove_recompute(model)[2])["forward"] is own


@pytest.mark.parametrize(("policy", "k"), POLICIES)
def test_copies_and_pickles_have_their_own_weights(policy, k):
    model = apply_recompute(gpt(dropout=0.0), policy, k)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        gpt_loss(model).backward()
        gpt_loss(other).backward()
        assert all(p.grad.abs().sum() == 0 for p in other.blocks.parameters())
        assert any(p.grad.abs().sum() > 0 for p in model.blocks.parameters())
        assert [type(vars(m).get("forward")) for m in other.modules()] == [
            type(vars(m).get("forward")) for m in model.modules()
        ]
        model.zero_grad()


@pytest.mark.parametrize(("policy", "k"), POLICIES)
def test_a_loss_thrown_away_without_backward_frees_what_it_kept(policy, k):
    """As a skipped step does: nothing may wait for the garbage collector."""
    model = apply_recompute(gpt(), policy, k)
    freed = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: freed.append(weakref.ref(args[0].untyped_storage())))
    gc.disable()
    try:
        loss = gpt_loss(model)
        assert freed[0]() is not None
        del loss
        assert freed[0]() is None
    finally:
        gc.enable()


def test_k_above_the_depth_is_the_depth():
    batch = torch.ones(4, 6), torch.ones(4, 6)
    deep, deeper = (measure_recompute(plain_stack(dense), batch, "every_k", k, timed_runs=0) for k in (5, 99))
    assert deep == deeper


def test_every_k_makes_segments_of_k_also_through_a_loop_that_is_not_ours():
    """Two streams, 5 layers: what is kept is the inputs of each segment's first layer."""
    batch = torch.randn(64, 6), torch.zeros(64, 6)
    kept = [measure_recompute(made(TwoStreams), batch, "every_k", k, timed_runs=0).kept_bytes for k in (1, 2, 3, 5)]
    pair = 2 * 64 * 6 * 4
    assert [kept[0] - kept[1], kept[1] - kept[2], kept[2] - kept[3]] == [2 * pair, pair, pair]


@pytest.mark.parametrize(
    ("policy", "k", "told"),
    [
        ("half", 4, "recompute policy 'half' is unknown; use none, full, every_k"),
        ("every_k", 0, "k=0 must be a whole number of at least 1"),
        ("every_k", -2, "k=-2 must be"),
        ("full", 2.0, "k=2.0 must be a whole number"),
        ("every_k", True, "k=True must be a whole number"),
        (["blocks.9"], 4, "no layer 'blocks.9' to recompute; the model's are blocks.0, blocks.1"),
    ],
)
def test_a_mistake_is_refused_and_leaves_the_model_as_it_was(policy, k, told):
    model = apply_recompute(gpt(), "full")
    with pytest.raises(ValueError, match=told.replace("[", r"\[")):
        apply_recompute(model, policy, k)
    assert inner_calls(model, lambda m: gpt_loss(m).backward()) == [2] * 5


@pytest.mark.parametrize("policy", ["full", "every_k", "sqrt", "selective_ops", "offload", ["0"]])
def test_a_model_without_a_stack_is_refused(policy):
    with pytest.raises(ValueError, match="Linear has no stack of layers to recompute"):
        apply_recompute(nn.Linear(2, 2), policy)
    with pytest.raises(ValueError, match="has no stack"):
        apply_recompute(nn.Sequential(), policy)


def test_a_model_without_an_attention_core_is_refused_for_selective():
    with pytest.raises(ValueError, match="WithKwargs has no attention core to recompute; set is_attention_core"):
        apply_recompute(made(WithKwargs), "selective")


def test_stacks_are_the_outermost_containers_and_a_list_inside_one_is_looked_into():
    names = [[name for name, _ in stack] for stack in layers_of(gpt(layers=2))]
    assert names == [["blocks.0", "blocks.1"]]
    nested = nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]), nn.Sequential(nn.Tanh(), nn.Tanh()))
    assert [[name for name, _ in stack] for stack in layers_of(nested)] == [["0", "2"], ["1.0"]]
    pair = nn.ModuleDict({"encoder": plain_stack(dense), "decoder": plain_stack(dense)})
    assert [len(stack) for stack in layers_of(pair)] == [5, 5]


def test_a_model_may_name_its_layers_and_cores_itself():
    class Core(nn.Module):
        is_attention_core = True

        def forward(self, x):
            return x.softmax(-1)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.core = nn.Linear(2, 2), nn.Linear(2, 2), Core()
            self.head = nn.Sequential(nn.Linear(2, 2))

        @property
        def recompute_layers(self):
            return [self.first, self.second]

        def forward(self, x):
            return self.head(self.core(self.second(self.first(x))))

    assert [[name for name, _ in stack] for stack in layers_of(Own())] == [["first", "second"]]
    assert list(attention_cores(Own())) == ["core"]
    for policy in ("full", "selective"):
        apply_recompute(Own(), policy)(torch.ones(1, 2)).sum().backward()


def test_hooks_on_a_layer_run_once_per_step():
    for policy in ("full", "every_k", "sqrt", "selective_ops"):
        model = apply_recompute(gpt(), policy)
        with calls_of(list(model.blocks)) as counts:
            gpt_loss(model).backward()
        assert counts == [1] * 5


class Stochastic(nn.Module):
    """Scales what it is given by chance: Python's and NumPy's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x * random.random() * np.random.rand()))


@pytest.mark.parametrize("policy", ["full", "every_k", "sqrt", "selective_ops"])
def test_the_second_run_draws_from_python_and_numpy_what_the_first_has_drawn_and_moves_neither(policy):
    def gradients(policy):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model = apply_recompute(nn.Sequential(*(Stochastic() for _ in range(4))), policy, k=2)
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
        return [p.grad for p in model.parameters()], random.random(), np.random.rand()

    (plain, *drawn), (again, *drawn_again) = gradients("none"), gradients(policy)
    assert drawn == drawn_again
    assert all(map(torch.equal, plain, again))


def test_measuring_puts_back_buffers_that_the_model_has_made_or_replaced_and_what_chance_has_drawn():
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(Stochastic(), Stochastic())
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("none", None)

        def forward(self, x):
            self.mean = self.mean + x.detach().mean(0)
            self.none = torch.ones(1)
            self.register_buffer("made", torch.ones(1))
            return self.layers(x)

    model = Buffered()
    mean, drawn = model.mean, (random.getstate(), np.random.get_state()[2])
    measure_recompute(model, (torch.ones(3, 4), torch.ones(3, 4)), "full")
    assert model.mean is mean
    assert not mean.any()
    assert model.none is None
    assert not hasattr(model, "made")
    assert drawn == (random.getstate(), np.random.get_state()[2])
