"""What a finding points at: the step where a fault began, and the order of several."""

import itertools
import random

import pytest
from corpus import BROKEN, broken

from safetrain_core import diagnose
from safetrain_core.diagnose.finding import SEVERITIES


def blown_up(dice, bad_step=30):
    """A batch whose norm is 300 times the usual one; the losses after it rise for several rows, each a leap."""
    levels = itertools.chain([20, 60, 40, 150], itertools.repeat(500))
    rows = []
    for step in range(1, 61):
        late = step > bad_step
        loss = (next(levels) if late else 3) * dice.uniform(0.9, 1.1)
        norm = (150 if step == bad_step else 100 if late else 0.5) * dice.uniform(0.8, 1.2)
        rows.append({"step": step, "loss": loss, "grad_norm": norm})
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_is_told_where_its_rise_began_with_the_norm_of_the_batch_before(seed):
    found = diagnose(blown_up(random.Random(seed)))
    assert found[0].rule == "spike_stays"
    assert [evidence.step for evidence in found[0].evidence] == [31, 30]


def test_among_errors_the_one_that_begins_first_comes_first():
    rows = blown_up(random.Random(0))
    for row in rows[44:]:
        row["loss"] = float("nan")
    found = [finding for finding in diagnose(rows) if finding.severity == "error"]
    assert [finding.rule for finding in found] == ["spike_stays", "nan_stays"]
    assert [finding.evidence[0].step for finding in found] == [31, 45]
    for label in BROKEN:
        rows, baseline = broken(label, 0)
        told = [finding for finding in diagnose(rows, baseline=baseline) if finding.evidence]
        places = [
            (SEVERITIES.index(finding.severity), finding.evidence[0].step)
            for finding in told
            if finding.evidence[0].step is not None and finding.rule != "healthy"
        ]
        assert places == sorted(places), (label, told)


def scaled(skips, scale=65536.0):
    """Rows of a scaler that halves on every skip, down to 1."""
    rows = []
    for step, skipped in enumerate(skips, start=1):
        rows.append({"step": step, "loss": 3 - step / 100, "scale": scale, "skipped": int(skipped)})
        scale = max(1.0, scale / 2) if skipped else scale
    return rows


def test_what_overflows_at_a_factor_of_1_is_a_rate_and_no_search():
    dice = random.Random(0)
    rows = scaled([True] * 16 + [dice.random() < 0.5 for _ in range(44)])
    assert rows[16]["scale"] == 1.0
    assert diagnose(rows)[0].rule == "skip_rate"
    assert diagnose(rows)[0].evidence[0].values["steps in all"] == 44


def test_a_search_that_has_ended_hides_no_rate_behind_it():
    later = [step % 6 == 0 for step in range(45)]  # 1 in 6, far from where the factor was found
    assert diagnose(scaled([True] * 12 + later))[0].rule == "skip_rate"


@pytest.mark.parametrize("skips", [12, 16, 23])
def test_the_search_for_the_factor_is_no_rate(skips):
    search = [True] * (skips - 3) + [False, True, False, True, False, True]  # at the end every other step holds
    assert diagnose(scaled(search + [False] * 40, scale=2.0**30))[0].rule == "healthy"


def test_a_log_that_skips_more_than_half_throughout_is_no_search_for_a_factor():
    dice = random.Random(1)
    rows = [{"step": step, "loss": 3 - step / 100, "skipped": int(dice.random() < 0.6)} for step in range(1, 61)]
    assert sum(row["skipped"] for row in rows) > 30
    assert diagnose(rows)[0].rule == "skip_rate"
    found = [step < 24 for step in range(60)]  # 2**24 halved to 1, and never again
    assert all(finding.severity == "info" for finding in diagnose(scaled(found, scale=2.0**24)))
