"""The planner: its closed forms against the count, its choice, and what it says when nothing fits."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from safetrain_core import MiniGPT, MiniGPTConfig, apply_recompute, measure_recompute, plan_recompute
from safetrain_core.cli import main

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}

#: layers, width, heads, sequence, batch, vocabulary
SHAPES = [
    (2, 32, 4, 32, 2, 96),
    (4, 64, 4, 512, 1, 96),
    (8, 128, 8, 64, 4, 96),
    (16, 64, 8, 128, 2, 96),
    (12, 128, 4, 256, 1, 500),
    (3, 128, 8, 32, 1, 96),
    (2, 32, 4, 64, 1, 5000),
    (5, 64, 2, 100, 3, 300),
]


def plan_for(shape, attention, budget=10**12, dtype=torch.float32):
    layers, width, heads, seq, batch, vocab = shape
    return plan_recompute(layers, width, seq, batch, heads, dtype, budget, attention, vocab)


def model_of(shape):
    layers, width, heads, seq, batch, vocab = shape
    torch.manual_seed(0)
    tokens = torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(0))
    return MiniGPT(MiniGPTConfig(vocab, seq, layers, heads, width)), (tokens, tokens)


def count(model, batch, option, attention="flash"):
    with sdpa_kernel(KERNELS[attention]):
        return measure_recompute(model, batch, option.policy, option.k or 4, timed_runs=0)


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("shape", SHAPES)
def test_predicted_bytes_are_within_10_percent_of_the_count_and_flops_are_it(shape, attention):
    model, batch = model_of(shape)
    for option in plan_for(shape, attention).options:
        if option.policy == "offload":  # a CPU keeps all on the host; see the next test
            continue
        cost = count(model, batch, option, attention)
        assert option.activation_bytes == pytest.approx(cost.activation_bytes, rel=0.10), option.name
        assert option.overhead == pytest.approx(cost.overhead, abs=1e-9), option.name


def test_offload_is_within_10_percent_on_a_device_that_is_not_the_host():
    shape = (16, 128, 8, 128, 2, 96)
    with FakeTensorMode(), torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        model = MiniGPT(MiniGPTConfig(96, 128, 16, 8, 128))
        tokens = torch.zeros(2, 128, dtype=torch.int64)
        cost = measure_recompute(model, (tokens, tokens), "offload")
    (option,) = [o for o in plan_for(shape, "math").options if o.policy == "offload"]
    assert option.host_bytes == pytest.approx(cost.host_bytes, rel=0.10)
    assert option.activation_bytes == pytest.approx(cost.activation_bytes, rel=0.10)


def fake(shape, dtype):
    """A model that has sizes but no memory, and its batch."""
    layers, width, heads, seq, batch, vocab = shape
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode() as mode:
            model = MiniGPT(MiniGPTConfig(vocab, seq, layers, heads, width))
    finally:
        torch.set_default_dtype(torch.float32)
    tokens = mode.from_tensor(torch.zeros(batch, seq, dtype=torch.int64))
    return model, (tokens, tokens)


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, (8, 128, 8, 64, 4, 96)),
        (torch.bfloat16, (4, 64, 4, 256, 1, 96)),
        (torch.float16, (2, 64, 4, 32, 2, 96)),
    ],
)
def test_sixteen_bits_are_within_10_percent_too(dtype, shape, attention):
    model, batch = model_of(shape)
    model.to(dtype)
    for option in plan_for(shape, attention, dtype=dtype).options:
        if option.policy != "offload":
            cost = count(model, batch, option, attention)
            assert option.activation_bytes == pytest.approx(cost.activation_bytes, rel=0.10), option.name


def test_a_gpt_of_32_layers_and_width_2048_is_within_1_percent_counted_without_its_memory():
    shape = (32, 2048, 16, 4096, 1, 50304)
    model, batch = fake(shape, torch.bfloat16)
    for option in plan_for(shape, "flash", dtype="bfloat16").options:
        if option.policy in ("none", "full", "selective", "selective_ops", "sqrt"):
            cost = count(model, batch, option)
            assert option.activation_bytes == pytest.approx(cost.activation_bytes, rel=0.01), option.name
            assert option.overhead == pytest.approx(cost.overhead, abs=1e-9), option.name


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_the_choice_fits_by_the_count_and_nothing_cheaper_does(attention):
    shape = (8, 64, 4, 128, 2, 96)
    model, batch = model_of(shape)
    options = [o for o in plan_for(shape, attention).options if o.policy != "offload"]
    counts = {option.name: count(model, batch, option, attention) for option in options}
    for budget in sorted(int(option.activation_bytes * 1.12) for option in options):
        choice = plan_for(shape, attention, budget).choice
        assert counts[choice.name].activation_bytes <= budget
        fitting = [o for o in options if o.activation_bytes <= 0.9 * budget]
        assert choice.overhead == min(o.overhead for o in fitting)


def test_with_a_flash_kernel_selective_is_never_the_plan_and_with_math_it_can_be():
    shape = (24, 2048, 16, 2048, 2, 0)
    budgets = range(1_000_000_000, 30_000_000_000, 500_000_000)
    chosen = {
        attention: {plan.choice.policy for b in budgets if (plan := plan_for(shape, attention, b, "bfloat16")).choice}
        for attention in KERNELS
    }
    assert "selective" not in chosen["flash"]
    assert {"none", "selective_ops", "full"} <= chosen["flash"]
    assert {"none", "selective", "full"} <= chosen["math"]


def test_a_roomy_budget_needs_nothing_and_headroom_is_a_tenth():
    shape = SHAPES[3]
    none = plan_for(shape, "flash").options[0].activation_bytes
    assert plan_for(shape, "flash", int(none / 0.9) + 1).choice.policy == "none"
    assert plan_for(shape, "flash", int(none / 0.9) - 1).choice.policy != "none"


def test_when_nothing_fits_it_says_what_would_and_that_does():
    shape = (8, 64, 4, 128, 16, 96)
    least = min(o.activation_bytes for o in plan_for(shape, "flash").options if o.policy != "offload")
    plan = plan_for(shape, "flash", least // 3)
    assert plan.choice is None
    assert 1 <= plan.micro_batch < 16
    assert (plan.accumulation_steps - 1) * plan.micro_batch < 16 <= plan.accumulation_steps * plan.micro_batch
    assert f"batch {plan.micro_batch} with {plan.accumulation_steps} accumulation steps" in plan.advice
    for batch, fits in ((plan.micro_batch, True), (plan.micro_batch + 1, False)):
        assert (plan_for((8, 64, 4, 128, batch, 96), "flash", least // 3).choice is not None) is fits
    smaller = (8, 64, 4, 128, plan.micro_batch, 96)
    model, batch = model_of(smaller)
    option = plan_for(smaller, "flash", least // 3).choice
    assert option.name in plan.advice
    assert count(model, batch, option).activation_bytes <= least // 3


def test_when_not_even_one_sequence_fits_it_names_a_length_that_does():
    plan = plan_for((8, 64, 4, 512, 2, 96), "flash", 2_000_000)
    assert plan.micro_batch is None
    length = int(plan.advice.split("sequences of ")[1].split()[0])
    assert plan_for((8, 64, 4, length, 1, 96), "flash", 2_000_000).choice is not None
    assert plan_for((8, 64, 4, length + 1, 1, 96), "flash", 2_000_000).choice is None
    assert "not even one token" in plan_for((8, 64, 4, 512, 2, 96), "flash", 1000).advice


def test_every_option_but_offload_can_be_applied():
    shape = SHAPES[0]
    model, _ = model_of(shape)
    for option in plan_for(shape, "math").options:
        apply_recompute(model, option.policy, option.k or 4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": 0}, "layers=0 must be a whole number"),
        ({"hidden": 30}, "hidden=30 is not a multiple of heads=4"),
        ({"budget_bytes": 0}, "budget_bytes=0"),
        ({"dtype": "int8"}, "dtype=int8 is not one that is planned for; use float32"),
        ({"attention": "sparse"}, "attention='sparse' is not a kernel"),
        ({"vocab": -1}, "vocab=-1"),
    ],
)
def test_a_bad_argument_is_refused(change, told):
    good = {"layers": 2, "hidden": 32, "seq": 8, "batch": 1, "heads": 4, "dtype": "float32", "budget_bytes": 10**6}
    with pytest.raises(ValueError, match=told):
        plan_recompute(**{**good, **change})


# --- the command -----------------------------------------------------------------------------------------------------


def told_by(capsys, *flags):
    status = main(["plan", "--layers", "64", "--hidden", "8192", "--seq", "8192", *flags])
    return status, capsys.readouterr()


def test_the_command_prints_the_table_and_the_plan(capsys):
    status, out = told_by(capsys, "--budget-gb", "80")
    assert status == 0
    plan = plan_recompute(64, 8192, 8192, 1, 64, "bfloat16", 80_000_000_000)
    assert out.out == plan.report() + "\n"
    assert "Plan: full" in out.out
    assert sum("<- the plan" in line for line in out.out.splitlines()) == 1
    for option in plan.options:
        assert any(line.startswith(option.name + " ") for line in out.out.splitlines())


def test_the_command_ends_with_1_where_nothing_fits(capsys):
    status, out = told_by(capsys, "--budget-gb", "4", "--batch", "4")
    assert status == 1
    assert "Nothing fits" in out.out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--budget-gb", "0"], "--budget-gb 0 must be a number above 0"),
        (["--budget-gb", "nan"], "--budget-gb nan"),
        (["--budget-gb", "80", "--heads", "7"], "hidden=8192 is not a multiple of heads=7"),
        (["--budget-gb", "80", "--batch", "0"], "batch=0"),
        (["--budget-gb", "80", "--dtype", "int8"], "invalid choice: 'int8'"),
        ([], "required: --budget-gb"),
        (["--budget-gb", "80", "--layer", "3"], "unknown argument --layer"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(flags, told, capsys):
    try:
        status, out = told_by(capsys, *flags)
    except SystemExit as stop:
        status, out = stop.code, capsys.readouterr()
    assert status == 2
    assert told in out.err
    assert len(out.err.splitlines()) == 1


def test_an_option_is_plain_data():
    option = plan_for(SHAPES[0], "flash").options[0]
    assert dataclasses.asdict(option)["policy"] == "none"


def test_a_small_models_bytes_are_not_all_0_gb(capsys):
    assert main(["plan", "--layers", "3", "--hidden", "96", "--seq", "17", "--budget-gb", "0.0001"]) == 1
    shown = capsys.readouterr().out
    assert "fits 90.00 kB" in shown
    assert "0.00 GB" not in shown


@pytest.mark.parametrize("flags", ["--layers 100000000 --budget-gb 1", "--layers 2 --budget-gb 1e308"])
def test_the_command_refuses_sizes_that_nobody_trains(flags, capsys):
    assert main(["plan", "--hidden", "128", "--seq", "128", *flags.split()]) == 2
    assert "Traceback" not in capsys.readouterr().err
