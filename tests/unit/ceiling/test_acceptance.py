"""Accept length against draft length."""

from __future__ import annotations

import pytest

from ceilingd.ceiling.acceptance import accept_length_at, acceptance_rate


def test_accept_length() -> None:
    assert accept_length_at(0.8, 3) == pytest.approx(2.952)
    assert accept_length_at(1.0, 3) == 4
    assert accept_length_at(0.0, 3) == 1


@pytest.mark.parametrize(("accept_length", "rate"), [(2.952, 0.8), (1.0, 0.0), (4.0, 1.0)])
def test_the_rate_behind_an_accept_length(accept_length: float, rate: float) -> None:
    assert acceptance_rate(accept_length, 3) == pytest.approx(rate, abs=1e-9)
