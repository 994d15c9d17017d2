"""The rules of thumb, against the figures that they are known by."""

import pytest

from safetrain_core import (
    activation_memory_bytes,
    checkpoint_cost,
    memory_after_checkpoint_bytes,
    optimal_segment,
    selective_checkpoint_cost,
    transformer_activation_bytes,
)


def test_a_layer_of_8192_takes_1_61_gb_and_64_take_103():
    assert activation_memory_bytes(1) == 12 * 8192 * 8192 * 2 == 1_610_612_736
    assert activation_memory_bytes(64) == 103_079_215_104
    assert activation_memory_bytes(2, hidden=3, seq=5, batch=7, bytes_per_value=4) == 2 * 12 * 3 * 5 * 7 * 4


def test_a_checkpointed_step_is_4_units_instead_of_3():
    cost = checkpoint_cost(10)
    assert cost == {"fwd": 10, "recompute": 10, "bwd": 20, "total": 40, "overhead_vs_no_ckpt": pytest.approx(1 / 3)}
    assert checkpoint_cost(10, fwd_per_layer=2.5)["total"] == 100


def test_recomputing_attention_only_costs_5_percent():
    cost = selective_checkpoint_cost(10)
    assert cost["recompute"] == pytest.approx(1.5)
    assert cost["overhead_vs_no_ckpt"] == pytest.approx(0.05)
    assert selective_checkpoint_cost(10, 1.0) == checkpoint_cost(10)
    assert selective_checkpoint_cost(10, attention_fraction=0)["total"] == 30


def test_the_classical_rule_has_its_knee_at_the_root_and_a_transformer_has_not():
    rule = [memory_after_checkpoint_bytes(64, k) for k in range(1, 65)]
    assert rule.index(min(rule)) + 1 == 8 == optimal_segment(64)
    assert rule[0] == (64 + 1) * activation_memory_bytes(1)
    counted = [memory_after_checkpoint_bytes(64, k, boundary_values=1) for k in range(1, 65)]
    assert counted.index(min(counted)) + 1 in (2, 3)
    assert memory_after_checkpoint_bytes(6, 99) == memory_after_checkpoint_bytes(6, 6)


def test_the_best_segment_is_the_brute_force_one():
    for n in range(1, 200):
        least = min(-(-n // k) + k for k in range(1, n + 1))
        k = optimal_segment(n)
        assert -(-n // k) + k == least
        assert abs(k - n**0.5) <= 1


def test_the_finer_rule_has_the_attention_term():
    """Korthikanti et al. 2022, table 2 and figure 1, for 16-bit training: bytes per token and unit of width."""

    def per(model, policy="none"):
        heads, hidden = model
        return transformer_activation_bytes(1, hidden, 2048, 1, heads, policy=policy) / (2048 * hidden)

    assert per((64, 6144)) == pytest.approx(34 + 5 * 64 * 2048 / 6144)
    assert per((96, 12288)) == 34 + 80
    assert per((96, 12288), "selective") == 34
    assert per((96, 12288), "full") == 2
    assert transformer_activation_bytes(96, 12288, 2048, 1, 96) == 96 * 114 * 2048 * 12288


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: activation_memory_bytes(0), "n_layers=0 must be a whole number of at least 1"),
        (lambda: activation_memory_bytes(1, seq=-1), "seq=-1"),
        (lambda: activation_memory_bytes(1, hidden=2.5), "hidden=2.5"),
        (lambda: checkpoint_cost(0), "n_layers=0"),
        (lambda: checkpoint_cost(1, fwd_per_layer=float("nan")), "fwd_per_layer=nan must be a number above 0"),
        (lambda: selective_checkpoint_cost(1, 1.5), "attention_fraction=1.5 must be a share between 0 and 1"),
        (lambda: selective_checkpoint_cost(1, float("nan")), "attention_fraction=nan"),
        (lambda: memory_after_checkpoint_bytes(4, 0), "segment_size=0"),
        (lambda: optimal_segment(0), "n_layers=0"),
        (lambda: transformer_activation_bytes(1, 8, 8, 1, 1, policy="sqrt"), "policy='sqrt' has no formula"),
    ],
)
def test_a_bad_argument_is_refused(call, told):
    with pytest.raises(ValueError, match=told):
        call()
