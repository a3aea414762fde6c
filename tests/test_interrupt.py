"""When a signal takes effect."""

import os
import signal

import pytest

from bpo_jax.interrupt import Abort, Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_at_once_outside_a_shield(number):
    with pytest.raises(KeyboardInterrupt), Interrupt():
        os.kill(os.getpid(), number)


def test_a_shielded_block_runs_to_its_end_first():
    done = []
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        with interrupt.shield():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("update")
        done.append("after")
    assert done == ["update"]


def test_a_second_signal_does_not_wait():
    done = []
    with pytest.raises(Abort), Interrupt() as interrupt, interrupt.shield():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        done.append("update")
    assert not done


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
