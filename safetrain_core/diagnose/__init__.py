"""What went wrong: symptom, evidence, cause, fix and lesson, from a log, a step function or a checkpoint folder."""
