"""How the accept length would change with the length of the draft."""

from __future__ import annotations


def accept_length_at(rate: float, draft_steps: int) -> float:
    """Tokens per round, bonus token included, when each drafted token is accepted with probability `rate`: `sum of
    rate^k for k = 0..steps` (Leviathan et al. 2023, equation 1). Rate .8, 3 steps: 1 + .8 + .64 + .512 = 2.952."""
    return sum(rate**step for step in range(draft_steps + 1))


def acceptance_rate(accept_length: float, draft_steps: int) -> float:
    """The rate, 0 to 1, that gives this accept length with this many steps: the inverse of `accept_length_at`.

    2.952 with 3 steps: .8. `accept_length` must be between 1 and `draft_steps + 1`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if accept_length_at(middle, draft_steps) < accept_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2
