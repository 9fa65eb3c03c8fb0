"""States through the socket: whole, by key, in any order; a sender that ends is an error and no wait for ever."""

from __future__ import annotations

import pytest
import torch

from eagle3_train.capture.link import AHEAD, Receiver, Sender


def test_states_arrive_whole_and_are_taken_by_key() -> None:
    states = {key: torch.randn(1 + key * 37 % 300, 4, 16, dtype=torch.bfloat16) for key in range(AHEAD * 2)}
    with Receiver(4, 16, torch.bfloat16) as receiver:
        sender = Sender(receiver.address)
        for key, tensor in states.items():
            sender.send(key, tensor)
        for key in reversed(states):
            assert torch.equal(receiver.take(key), states[key])
        sender.close()


def test_a_sender_that_ends_before_it_has_sent_all_is_an_error() -> None:
    with Receiver(1, 8, torch.float32) as receiver:
        sender = Sender(receiver.address)
        sender.send(0, torch.zeros(3, 1, 8))
        sender.close()
        assert receiver.take(0).shape == (3, 1, 8)
        with pytest.raises(RuntimeError, match="ended before it had sent them all"):
            receiver.take(1)


def test_a_receiver_nobody_connects_to_ends() -> None:
    with Receiver(1, 8, torch.float32):
        pass
