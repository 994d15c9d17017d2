"""What the tests of both callbacks share: a card that follows the rows of a run, and runs on two ranks."""

from hot import Card

POLL = {"gpu_temp_guard": True, "gpu_temp_poll_interval_seconds": 0.01}


class AtStep:
    """A sink that does something when the row of a step has come; it keeps all rows."""

    def __init__(self, step=None, action=lambda: None):
        self.step, self.action, self.rows = step, action, []

    def begin(self, resume_after):
        self.resumed_after = resume_after

    def write(self, row):
        self.rows.append(dict(row))
        if row["step"] == self.step:
            self.action()

    def amend(self, cells):
        self.rows[-1].update(cells)

    def close(self):
        self.closed = True


def heat_at(step, celsius, card=None):
    """Options for a callback whose card is at that temperature when ``step`` has been taken; and the card."""
    card = card or Card()
    return {"sinks": [AtStep(step, lambda: card.be(celsius))], "thermal_source": card, **POLL}, card
