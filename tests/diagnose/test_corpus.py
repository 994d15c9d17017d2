"""Labelled runs: each symptom that a log can show is found, healthy runs are left alone, and every finding is whole."""

import pytest
from corpus import HEALTHY, TUNING, broken, healthy
from damaged import LABELS, broken_log

from safetrain_core import diagnose
from safetrain_core.diagnose.finding import SEVERITIES

SEEDS = range(TUNING, TUNING + 5)


def worst_rules(found):
    return {finding.rule for finding in found if finding.severity != "info"}


@pytest.mark.parametrize("label", LABELS)
def test_every_symptom_is_found_in_every_seed(label, tmp_path):
    for seed in SEEDS:
        baseline = broken_log(label, seed, tmp_path / f"{seed}.csv")
        found = diagnose(tmp_path / f"{seed}.csv", baseline=baseline)
        assert worst_rules(found) & LABELS[label], (label, seed, [str(f) for f in found])


def test_of_a_hundred_healthy_runs_two_at_most_get_an_error():
    examined, alarmed = 0, []
    for name in HEALTHY:
        for seed in range(6):
            found = diagnose(healthy(name, seed))
            examined += 1
            alarmed += [(name, seed, f.rule) for f in found if f.severity == "error"]
            assert [f.severity for f in found] == sorted((f.severity for f in found), key=SEVERITIES.index)
    assert examined >= 100
    assert len(alarmed) <= 2, alarmed


def test_a_healthy_run_says_so_and_says_what_was_looked_for_and_what_was_not():
    found = diagnose(healthy("plain", 0))
    said = next(f for f in found if f.rule == "healthy")
    assert "nothing found in 80 steps" in said.symptom
    assert "nan_stays" in said.cause
    lacking = next(f for f in found if f.rule == "not_checked")
    assert "scaling factor (for scale_never_moves" in lacking.cause
    assert not {"nan_stays", "scale_never_moves"} <= set(said.cause.replace(",", "").split())


def test_a_finding_has_evidence_cause_fix_and_a_lesson_that_exists(tmp_path):
    for label in LABELS:
        baseline = broken_log(label, 1, tmp_path / "log.csv")
        for finding in diagnose(tmp_path / "log.csv", baseline=baseline):
            assert finding.symptom
            assert finding.cause
            assert finding.fix
            if finding.severity != "info":
                assert finding.evidence, finding
                assert finding.lesson[:2] in {"01", "02", "03", "06"}


def test_evidence_names_the_step_where_it_happened():
    rows, baseline = broken("resume leaves its baseline", 2)
    found = next(f for f in diagnose(rows, baseline=baseline) if f.rule == "leaves_baseline")
    ours, theirs = ({r["step"]: r.get("loss", r.get("train_loss")) for r in run} for run in (rows, baseline))
    first = min(e.step for e in found.evidence)
    assert all(ours[s] == theirs[s] for s in ours if s < first)
    assert any("baseline" in e.values for e in found.evidence)
